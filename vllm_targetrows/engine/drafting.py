# SPDX-License-Identifier: Apache-2.0
"""Growing pools with an EAGLE-3 drafter inside vLLM.

The drafter is the module that stock ``method: eagle3`` loads.  After every step it *catches up*: it reads the target's
features of all committed tokens (never its own approximations of them).  Then it *grows* each request's pool: level by
level, the best ``k`` nodes of the last level each get their ``k`` most likely children (EAGLE-2, arXiv 2406.16858).
Every frontier node is a virtual sequence: the committed context, then its own path in scratch blocks.  When the next
frontier is chosen, the blocks of the chosen parents are copied, so a path moves with its node.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_targetrows.engine import transfer
from vllm_targetrows.engine.config import TargetRowsConfig
from vllm_targetrows.engine.scratch import BlockCopier, tail_blocks
from vllm_targetrows.engine.statistics import RoundStatistics
from vllm_targetrows.engine.steps import Committed, Frontier, Level, Steps
from vllm_targetrows.engine.transfer import on_device
from vllm_targetrows.selection import NEVER
from vllm_targetrows.trees import Pool, concatenated


class Eagle3Drafter:
    """Grows pools with the drafter that ``proposer`` has loaded.

    Args:
        proposer: vLLM's own proposer; its model, attention groups and layer names are used, its ``propose`` is not.
        vllm_config: the engine's configuration.
        options: the method's options.
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
        options: TargetRowsConfig,
        block_size: int,
        scratch: np.ndarray,
        copier: BlockCopier,
        statistics: RoundStatistics,
        steps: Steps,
    ) -> None:
        self.steps = steps
        self.whole = False  # whether the next pools get all their levels, needed or not
        self.proposer = proposer
        self.vllm_config = vllm_config
        self.options = options
        self.topk, self.depth = topk, depth = options.tree_topk, options.tree_depth
        self.floor = _log(options.tree_min_probability)
        self.growing = max(self.floor, _log(options.tree_grow_probability))
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
        self.scratch = scratch[: self.at_once * topk * self.tail].reshape(-1, topk, self.tail)

    @staticmethod
    def scratch_blocks(topk: int, depth: int, block_size: int) -> int:
        """Scratch blocks that one request's pool needs."""
        return topk * tail_blocks(block_size, max(depth - 1, 1))

    def features(
        self, hidden_states: torch.Tensor, aux_hidden_states: list[torch.Tensor] | None, rows: torch.Tensor
    ) -> torch.Tensor:
        """The target's features, ``[n, drafter hidden size]``, of the pass's ``rows`` (int64 ``[n]``)."""
        layers = [hidden_states] if aux_hidden_states is None else aux_hidden_states
        raw = torch.cat([states.index_select(0, rows) for states in layers], dim=-1)
        with self.statistics.forward("draft"):
            return self.model.combine_hidden_states(raw)

    def catch_up(
        self, features: torch.Tensor, committed: Committed, block_table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the committed tokens' features: one causal pass over the requests' newest positions.

        Args:
            features: ``[n, hidden]`` the target's feature at each of the ``n`` positions.
            committed: the positions and the tokens behind them, of ``R`` requests.
            block_table: int32 ``[R, blocks]``.

        Returns:
            At the newest committed position of each request, ``([R, hidden], [R, hidden])``: the state for the output
            head and the one to feed on.
        """
        counts, end = committed.counts, committed.end
        query_start = torch.from_numpy(np.append(0, np.cumsum(counts)).astype(np.int32))
        (seq_lens,) = on_device(self.device, end.astype(np.int32))
        metadata = CommonAttentionMetadata(
            query_start_loc=query_start.to(self.device, non_blocking=True),
            query_start_loc_cpu=query_start,
            seq_lens=seq_lens,
            num_reqs=len(counts),
            num_actual_tokens=len(committed.tokens),
            max_query_len=int(counts.max()),
            max_seq_len=int(end.max()),
            block_table_tensor=block_table,
            slot_mapping=committed.slots,
            causal=True,
            positions=committed.positions,
        )
        head_state, state = self.forward(committed.tokens, features, metadata, draft_index=0)
        return head_state[committed.last], state[committed.last]

    def grow(
        self,
        head_state: torch.Tensor,
        state: torch.Tensor,
        position: torch.Tensor,
        bound: np.ndarray,
        block_table: torch.Tensor,
    ) -> Pool:
        """Grow one pool per request below its continuation.

        Args:
            head_state, state: ``[R, hidden]`` from ``catch_up``.
            position: int64 ``[R]`` the newest committed position (the continuation's minus one).
            bound: int64 ``[R]`` on the host: no position is larger.
            block_table: int32 ``[R, blocks]``.

        Returns:
            Pools of ``k + (depth - 1) * k ** 2`` nodes, or of fewer levels where deeper ones would not be selected.
        """
        groups = (slice(i, i + self.at_once) for i in range(0, len(bound), self.at_once))
        parts = [self._grow(head_state[g], state[g], position[g], bound[g], block_table[g]) for g in groups]
        return parts[0] if len(parts) == 1 else concatenated(parts)

    def _grow(
        self,
        head_state: torch.Tensor,
        state: torch.Tensor,
        position: torch.Tensor,
        bound: np.ndarray,
        table: torch.Tensor,
    ) -> Pool:
        requests, k = len(bound), self.topk
        log_q, token = self._children(head_state)  # [R, k]
        index = torch.arange(k, device=self.device).repeat(requests, 1)
        levels = [Level(token, torch.full_like(token, -1), torch.ones_like(token), log_q, index)]
        frontier, states = Frontier(token, log_q, index, index, index), state[:, None].expand(-1, k, -1)
        for depth in range(2, self.depth + 1):
            if not self._worth_growing(levels, frontier):
                break
            if depth == 2:
                paths = _Paths(self, position, bound, table)
            else:  # Paths and states follow the chosen nodes.
                paths.follow(frontier.parent, depth - 2)
                states = states.gather(1, frontier.parent[:, :, None].expand(-1, -1, states.shape[-1]))
            head_state, new_state = paths.forward(frontier.token, states, depth - 2)
            states = new_state.view(requests, k, -1)
            log_q, token = (part.view(requests, k, k) for part in self._children(head_state))
            level, frontier = self.steps.expand(log_q, token, frontier, k + (depth - 2) * k * k, depth)
            levels.append(level)
        tokens, parents, depths, score, branch = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
        if self.floor > NEVER:
            # A root row may find a node of the first level likely; the drafter alone has only its own word.
            own = score if self.options.selection == "draft" else score[:, k:]
            own.masked_fill_(own < self.floor, NEVER)
        return Pool(tokens=tokens, parents=parents, depth=depths, score=score, branch=branch, width=k)

    def _worth_growing(self, levels: list[Level], frontier: Frontier) -> bool:
        """Whether a node below the frontier is likely enough to grow and could be selected.

        None scores more than the frontier's best.  Requests of one step grow together: one of them is reason enough.
        """
        if not transfer.looking_is_free(self.device) or self.whole:
            return True
        budget = self.options.num_speculative_tokens
        # Of equal scores the shallower node wins, so B nodes as good as the frontier's best leave no room.
        by_draft = self.options.selection in ("draft", "pearl") and not self.options.frontier
        full = by_draft and self.topk + (len(levels) - 1) * self.topk**2 >= budget
        if self.growing == NEVER and not full:
            return True
        best = frontier.score[:, 0]
        growing = best >= self.growing
        if full:
            growing &= best > torch.cat([level.score for level in levels], dim=1).topk(budget, dim=1).values[:, -1]
        return bool(growing.any())

    def _children(self, head_state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest children by the drafter's rows: ``log q`` and target tokens, ``([n, k], [n, k])``."""
        with self.statistics.forward("draft"):
            logits = self.model.logits_processor(self.model.lm_head, head_state)
        return self.steps.children(logits, self.topk, self.target_token)

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, metadata: CommonAttentionMetadata, draft_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the drafter: the states for the output head and those to feed on."""
        _, per_layer = self.proposer.build_per_group_and_layer_attn_metadata(metadata, draft_index)
        slots = dict.fromkeys(self.proposer._draft_attn_layer_names, metadata.slot_mapping)
        positions = metadata.positions
        if metadata.max_seq_len - 1 > self.last_position:
            positions = positions.clamp(max=self.last_position)
        with (
            self.statistics.forward("draft"),
            set_forward_context(per_layer, self.vllm_config, num_tokens=len(tokens), slot_mapping=slots),
        ):
            # vLLM's compiled graphs check no strides: anything but contiguous inputs would be misread in silence.
            return self.model(
                input_ids=tokens.int().contiguous(),
                positions=positions.contiguous(),
                hidden_states=states.contiguous(),
                inputs_embeds=None,
            )


def _log(probability: float) -> float:
    return math.log(probability) if probability else NEVER


class _Paths:
    """The frontier's paths in scratch blocks while one group of requests grows its pools."""

    def __init__(self, drafter: Eagle3Drafter, position: torch.Tensor, bound: np.ndarray, table: torch.Tensor) -> None:
        scratch = drafter.scratch[: len(bound)]  # [R, k, tail]
        self.drafter = drafter
        self.layout = drafter.steps.paths(position, bound, table, drafter.block_size, scratch, drafter.depth)
        (self.scratch,) = on_device(drafter.device, scratch)
        self.query_start = torch.arange(len(self.layout.table) + 1, dtype=torch.int32)
        # Each path starts with a copy of the context's last, partly filled block.
        drafter.copier.copy_apart(self.layout.context, self.scratch[:, :, 0].reshape(-1))

    def forward(self, tokens: torch.Tensor, states: torch.Tensor, entry: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the frontier's tokens, ``[R, k]`` with states ``[R, k, hidden]``, as the paths' next ``entry``."""
        rows, layout = tokens.numel(), self.layout
        metadata = CommonAttentionMetadata(
            query_start_loc=self.query_start.to(self.drafter.device, non_blocking=True),
            query_start_loc_cpu=self.query_start,
            seq_lens=layout.lengths[entry],
            num_reqs=rows,
            num_actual_tokens=rows,
            max_query_len=1,
            max_seq_len=int(layout.longest[entry]),
            block_table_tensor=layout.table,
            slot_mapping=layout.slots[entry],
            causal=True,
            positions=layout.positions[entry],
        )
        return self.drafter.forward(tokens.reshape(-1), states.reshape(rows, -1), metadata, draft_index=entry + 1)

    def follow(self, parent: torch.Tensor, entries: int) -> None:
        """Give path ``j`` of each request the content of path ``parent[:, j]``, which has ``entries`` entries."""
        scratch = self.scratch[:, :, : int(self.layout.last_block[entries - 1]) + 1]
        source = scratch.gather(1, parent[:, :, None].expand_as(scratch))
        self.drafter.copier.copy(source.reshape(-1), scratch.reshape(-1))
