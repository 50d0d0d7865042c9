# SPDX-License-Identifier: Apache-2.0
"""Growing pools with an EAGLE-3 drafter inside vLLM.

The drafter is the module that stock ``method: eagle3`` loads.  After every step it *catches up*: it reads the target's
features of all committed tokens (never its own approximations of them).  Then it *grows* each request's pool: level by
level, the best ``k`` nodes of the last level each get their ``k`` most likely children (EAGLE-2, arXiv 2406.16858).
Every frontier node is a virtual sequence: the committed context, then its own path in scratch blocks.  When the next
frontier is chosen, the blocks of the chosen parents are copied, so a path moves with its node.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_targetrows.engine.scratch import BlockCopier, tail_blocks
from vllm_targetrows.engine.statistics import RoundStatistics
from vllm_targetrows.engine.steps import Frontier, Level, Steps
from vllm_targetrows.trees import Pool


class Eagle3Drafter:
    """Grows pools with the drafter that ``proposer`` has loaded.

    Args:
        proposer: vLLM's own proposer; its model, attention groups and layer names are used, its ``propose`` is not.
        vllm_config: the engine's configuration.
        topk: ``k``, children of a node and frontier nodes of a level.
        depth: levels of the pool.
        block_size: tokens in a KV block.
        scratch: int64 ``[S]`` numbers of the scratch blocks.
        copier: copies blocks of the drafter's layers.
        statistics: where the time of the drafter's passes is counted.
        steps: the tensor steps of a round.
    """

    def __init__(
        self,
        proposer: EagleProposer,
        vllm_config: VllmConfig,
        topk: int,
        depth: int,
        block_size: int,
        scratch: torch.Tensor,
        copier: BlockCopier,
        statistics: RoundStatistics,
        steps: Steps,
    ) -> None:
        self.steps = steps
        self.proposer = proposer
        self.vllm_config = vllm_config
        self.topk = topk
        self.depth = depth
        self.block_size = block_size
        self.copier = copier
        self.statistics = statistics
        self.device = proposer.device
        self.last_position = min(vllm_config.model_config.max_model_len, proposer.draft_model_config.max_model_len) - 1
        model: Any = proposer.model
        self.model = model
        offsets = getattr(model, "draft_id_to_target_id", None)
        draft_vocabulary = model.config.draft_vocab_size
        self.target_token = torch.arange(draft_vocabulary, device=self.device)
        if offsets is not None:
            self.target_token = self.target_token + offsets.to(self.device)
        self.tail = tail_blocks(block_size, max(depth - 1, 1))
        self.at_once = len(scratch) // (topk * self.tail)  # requests whose pools fit the scratch blocks together
        self.scratch = scratch[: self.at_once * topk * self.tail].view(-1, topk, self.tail)

    @staticmethod
    def scratch_blocks(topk: int, depth: int, block_size: int) -> int:
        """Scratch blocks that one request's pool needs."""
        return topk * tail_blocks(block_size, max(depth - 1, 1))

    def features(self, hidden_states: torch.Tensor, aux_hidden_states: list[torch.Tensor] | None) -> torch.Tensor:
        """The target's features of every row, ``[rows, drafter hidden size]``."""
        raw = hidden_states if aux_hidden_states is None else torch.cat(aux_hidden_states, dim=-1)
        return self.model.combine_hidden_states(raw)

    def catch_up(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        query_start: torch.Tensor,
        block_table: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the committed tokens' features: one causal pass over the requests' newest positions.

        Args:
            features: ``[rows, hidden]`` the target's feature at each position.
            tokens: int64 ``[rows]`` the token *after* each position.
            positions: int64 ``[rows]``.
            query_start: int32 ``[R + 1]`` on the host, first row of each request.
            block_table: int32 ``[R, blocks]``.

        Returns:
            The last row of each request, ``([R, hidden], [R, hidden])``: the state for the output head and the one to
            feed on.
        """
        last = query_start[1:].to(self.device, torch.int64) - 1
        request = torch.repeat_interleave(
            torch.arange(len(last), device=self.device), (query_start[1:] - query_start[:-1]).to(self.device)
        )
        slots = self._slots(block_table[request].gather(1, (positions // self.block_size)[:, None])[:, 0], positions)
        metadata = CommonAttentionMetadata(
            query_start_loc=query_start.to(self.device),
            query_start_loc_cpu=query_start,
            seq_lens=(positions[last] + 1).int(),
            num_reqs=len(last),
            num_actual_tokens=len(tokens),
            max_query_len=int((query_start[1:] - query_start[:-1]).max()),
            max_seq_len=int(positions.max()) + 1,
            block_table_tensor=block_table,
            slot_mapping=slots,
            causal=True,
            positions=positions,
        )
        head_state, state = self._forward(tokens, positions, features, metadata, draft_index=0)
        return head_state[last], state[last]

    def grow(
        self, head_state: torch.Tensor, state: torch.Tensor, position: torch.Tensor, block_table: torch.Tensor
    ) -> Pool:
        """Grow one pool per request below its continuation.

        Args:
            head_state, state: ``[R, hidden]`` from ``catch_up``.
            position: int64 ``[R]`` the position that ``catch_up`` read last (the continuation's minus one).
            block_table: int32 ``[R, blocks]``.

        Returns:
            Pools of ``k + (depth - 1) * k ** 2`` nodes.
        """
        parts = [
            self._grow(
                head_state[i : i + self.at_once],
                state[i : i + self.at_once],
                position[i : i + self.at_once],
                block_table[i : i + self.at_once],
            )
            for i in range(0, len(position), self.at_once)
        ]
        if len(parts) == 1:
            return parts[0]
        fields = ("tokens", "parents", "depth", "score", "branch")
        return Pool(**{f: torch.cat([getattr(p, f) for p in parts]) for f in fields}, width=self.topk)

    def _grow(self, head_state: torch.Tensor, state: torch.Tensor, position: torch.Tensor, table: torch.Tensor) -> Pool:
        requests, k = len(position), self.topk
        log_q, token = self._children(head_state)  # [R, k]
        index = torch.arange(k, device=self.device).expand(requests, k)
        levels = [Level(token, torch.full_like(token, -1), torch.ones_like(token), log_q, index)]
        frontier, frontier_state = Frontier(token, log_q, index, index, index), state[:, None].expand(-1, k, -1)
        if self.depth > 1:
            paths = _Paths(self, position, table)
        for depth in range(2, self.depth + 1):
            head_state, new_state = paths.forward(frontier.token, frontier_state, depth - 2)
            log_q, token = (part.view(requests, k, k) for part in self._children(head_state))
            level, frontier = self.steps.expand(log_q, token, frontier, k + (depth - 2) * k * k, depth)
            levels.append(level)
            if depth == self.depth:
                break
            # Paths and states follow the chosen nodes.
            paths.follow(frontier.parent, depth - 1)
            frontier_state = new_state.view(requests, k, -1).gather(
                1, frontier.parent[:, :, None].expand(-1, -1, new_state.shape[-1])
            )
        tokens, parents, depths, score, branch = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
        return Pool(tokens=tokens, parents=parents, depth=depths, score=score, branch=branch, width=k)

    def _children(self, head_state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest children by the drafter's rows: ``log q`` and target tokens, ``([n, k], [n, k])``."""
        with self.statistics.forward("draft"):
            logits = self.model.logits_processor(self.model.lm_head, head_state)
        return self.steps.children(logits, self.topk, self.target_token)

    def _slots(self, block: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return block.to(torch.int64) * self.block_size + position % self.block_size

    def _forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        metadata: CommonAttentionMetadata,
        draft_index: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, per_layer = self.proposer.build_per_group_and_layer_attn_metadata(metadata, draft_index)
        slots = {name: metadata.slot_mapping for name in self.proposer._draft_attn_layer_names}
        with (
            self.statistics.forward("draft"),
            set_forward_context(per_layer, self.vllm_config, num_tokens=len(tokens), slot_mapping=slots),
        ):
            # vLLM's compiled graphs check no strides: anything but contiguous inputs would be misread in silence.
            return self.model(
                input_ids=tokens.int().contiguous(),
                positions=positions.clamp(max=self.last_position).contiguous(),
                hidden_states=states.contiguous(),
                inputs_embeds=None,
            )


class _Paths:
    """The frontier's paths in scratch blocks while one group of requests grows its pools."""

    def __init__(self, drafter: Eagle3Drafter, position: torch.Tensor, table: torch.Tensor) -> None:
        requests, k, tail, size = len(position), drafter.topk, drafter.tail, drafter.block_size
        self.drafter = drafter
        self.scratch = drafter.scratch[:requests]  # [R, k, tail]
        self.start = position + 1  # position of the first path entry
        column = self.start // size
        columns = column[:, None] + torch.arange(tail, device=position.device)
        width = int(columns.max()) + 1
        padded = torch.nn.functional.pad(table, (0, max(0, width - table.shape[1])))[:, :width]
        self.first_column = column
        virtual = padded[:, None].expand(-1, k, -1).clone()
        virtual.scatter_(2, columns[:, None].expand(-1, k, -1), self.scratch.to(virtual.dtype))
        self.table = virtual.view(requests * k, width)
        self.query_start = torch.arange(requests * k + 1, dtype=torch.int32)
        # Each path starts with a copy of the context's last, partly filled block.
        source = padded.gather(1, column[:, None]).to(torch.int64).expand(-1, k)
        drafter.copier.copy(source.reshape(-1), self.scratch[:, :, 0].reshape(-1))

    def forward(self, tokens: torch.Tensor, states: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the frontier's tokens, ``[R, k]`` with states ``[R, k, hidden]``, at path entry ``step``."""
        drafter, k = self.drafter, self.drafter.topk
        position = self.start + step
        column = position // drafter.block_size - self.first_column
        block = self.scratch.gather(2, column[:, None, None].expand(-1, k, 1)).view(-1)
        positions = position.repeat_interleave(k)
        metadata = CommonAttentionMetadata(
            query_start_loc=self.query_start.to(drafter.device),
            query_start_loc_cpu=self.query_start,
            seq_lens=(positions + 1).int(),
            num_reqs=len(positions),
            num_actual_tokens=len(positions),
            max_query_len=1,
            max_seq_len=int(position.max()) + 1,
            block_table_tensor=self.table,
            slot_mapping=drafter._slots(block, positions),
            causal=True,
            positions=positions,
        )
        return drafter._forward(tokens.reshape(-1), positions, states.reshape(len(positions), -1), metadata, step + 1)

    def follow(self, parent: torch.Tensor, entries: int) -> None:
        """Give path ``j`` of each request the content of path ``parent[:, j]``, which has ``entries`` entries."""
        used = int(((self.start + entries - 1) // self.drafter.block_size - self.first_column).max()) + 1
        scratch = self.scratch[:, :, :used]
        source = scratch.gather(1, parent[:, :, None].expand(-1, -1, used))
        self.drafter.copier.copy(source.reshape(-1), scratch.reshape(-1))
