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

from vllm_targetrows.engine.compiled import njit
from vllm_targetrows.engine.config import TargetRowsConfig
from vllm_targetrows.engine.scratch import BlockCopier, tail_blocks
from vllm_targetrows.engine.statistics import RoundStatistics
from vllm_targetrows.engine.steps import Frontier, Level, Steps
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

        self._compile()

    def _compile(self) -> None:
        """Compile the loops now: the first request shall not wait for it."""
        one, table = np.ones(1, dtype=np.int64), np.ones((1, 1), dtype=np.int32)
        steps = (one, one, one, one > 1, one[None], one - 1, one[None], one, table[0])
        committed_tokens(*steps, np.ones((1, 2), dtype=np.int32), 2)
        _path_layout(one, table, self.block_size, self.scratch[:1], self.depth)

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
        self,
        features: torch.Tensor,
        tokens: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        counts: np.ndarray,
        block_table: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the committed tokens' features: one causal pass over the requests' newest positions.

        Args:
            features: ``[rows, hidden]`` the target's feature at each position.
            tokens: int64 ``[rows]`` the token *after* each position.
            positions: int64 ``[rows]``.
            slots: int64 ``[rows]`` KV slot of each position.
            counts: int64 ``[R]`` rows of each request, at least 1; a request's rows follow each other.
            block_table: int32 ``[R, blocks]``.

        Returns:
            The last row of each request, ``([R, hidden], [R, hidden])``: the state for the output head and the one to
            feed on.
        """
        end = np.cumsum(counts)
        query_start = torch.from_numpy(np.append(0, end).astype(np.int32))
        metadata = CommonAttentionMetadata(
            query_start_loc=query_start.to(self.device),
            query_start_loc_cpu=query_start,
            seq_lens=self.to_device((positions[end - 1] + 1).astype(np.int32)),
            num_reqs=len(counts),
            num_actual_tokens=len(tokens),
            max_query_len=int(counts.max()),
            max_seq_len=int(positions.max()) + 1,
            block_table_tensor=block_table,
            slot_mapping=self.to_device(slots),
            causal=True,
            positions=self.to_device(positions),
        )
        head_state, state = self.forward(self.to_device(tokens), features, metadata, draft_index=0)
        last = self.to_device(end - 1)
        return head_state[last], state[last]

    def grow(
        self, head_state: torch.Tensor, state: torch.Tensor, position: np.ndarray, block_table: np.ndarray
    ) -> Pool:
        """Grow one pool per request below its continuation.

        Args:
            head_state, state: ``[R, hidden]`` from ``catch_up``.
            position: int64 ``[R]`` the position that ``catch_up`` read last (the continuation's minus one).
            block_table: int32 ``[R, blocks]`` on the host.

        Returns:
            Pools of ``k + (depth - 1) * k ** 2`` nodes, or of fewer levels where deeper ones would not be selected.
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
        return concatenated(parts)

    def _grow(self, head_state: torch.Tensor, state: torch.Tensor, position: np.ndarray, table: np.ndarray) -> Pool:
        requests, k = len(position), self.topk
        log_q, token = self._children(head_state)  # [R, k]
        index = torch.arange(k, device=self.device).repeat(requests, 1)
        levels = [Level(token, torch.full_like(token, -1), torch.ones_like(token), log_q, index)]
        frontier, states = Frontier(token, log_q, index, index, index), state[:, None].expand(-1, k, -1)
        for depth in range(2, self.depth + 1):
            if not self._worth_growing(levels, frontier):
                break
            if depth == 2:
                paths = _Paths(self, position, table)
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
        if self.device.type != "cpu":
            return True  # the look would make the host wait for the device
        budget = self.options.num_speculative_tokens
        # Of equal scores the shallower node wins, so B nodes as good as the frontier's best leave no room.
        full = self.options.selection in ("draft", "pearl") and self.topk + (len(levels) - 1) * self.topk**2 >= budget
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

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _log(probability: float) -> float:
    return math.log(probability) if probability else NEVER


@njit(cache=True)
def committed_tokens(
    begin, before, computed, carry, path, length, emitted, next_token, input_ids, block_table, block_size
):
    """What the drafter reads after a step: every newly committed position and the token behind it.

    Args:
        begin, before, computed: int64 ``[R]`` first row of each request in the step, its tokens up to the root, and its
            tokens computed before the step.
        carry: bool ``[R]`` whether the position before the step's first one is read as well.
        path, length: int64 ``[R, D]`` and ``[R]`` the accepted nodes.
        emitted: int64 ``[R, D + 2]`` accepted tokens, then the continuation.
        next_token: int64 ``[R]`` the token behind the step's own ones.
        input_ids: int32 the step's tokens.
        block_table: int32 ``[R, blocks]``.
        block_size: tokens in a block.

    Returns:
        int64 ``[n]`` each: row of the target's pass (any row for a carried position), token behind the position,
        position, KV slot; and int64 ``[R]`` how many of them each request has.
    """
    counts = carry + before + length
    rows, tokens, positions, slots = np.empty((4, counts.sum()), np.int64)
    at = 0
    for r in range(len(counts)):
        own = before[r]
        for i in range(-1 if carry[r] else 0, own + length[r]):  # -1: the carried position
            accepted = i - own
            rows[at] = begin[r] + (max(i, 0) if accepted < 0 else own + path[r, accepted])
            if accepted < -1:
                tokens[at] = input_ids[begin[r] + i + 1]
            else:
                tokens[at] = next_token[r] if accepted == -1 else emitted[r, accepted + 1]
            position = computed[r] + i
            positions[at] = position
            slots[at] = block_table[r, position // block_size] * block_size + position % block_size
            at += 1
    return rows, tokens, positions, slots, counts


@njit(cache=True)
def _path_layout(position, block_table, block_size, scratch, depth):
    """Where the frontier's paths lie: ``k`` virtual sequences for each of ``R`` requests, whose entries follow the
    context.

    Returns:
        block tables ``[R * k, blocks]``; positions, lengths and KV slots of each path entry ``[depth - 1, R * k]``; of
        each entry the longest sequence and the last scratch block in use; the context's last block, for each path.
    """
    requests, k, tail = scratch.shape
    entries = max(depth - 1, 1)
    widest = (position.max() + 1) // block_size + tail
    table = np.zeros((requests * k, max(widest, block_table.shape[1])), block_table.dtype)
    positions, slots = np.empty((2, entries, requests * k), np.int64)
    longest, last_block = np.zeros((2, entries), np.int64)
    context = np.zeros(requests * k, np.int64)
    for r in range(requests):
        start = position[r] + 1  # position of the first entry
        column = start // block_size  # the scratch blocks replace the request's own from here on
        for path in range(r * k, r * k + k):
            table[path, : block_table.shape[1]] = block_table[r]
            table[path, column : column + tail] = scratch[r, path - r * k]
            if column < block_table.shape[1]:
                context[path] = block_table[r, column]
            for entry in range(entries):
                at = start + entry
                block = at // block_size - column
                positions[entry, path] = at
                slots[entry, path] = scratch[r, path - r * k, block] * block_size + at % block_size
                longest[entry] = max(longest[entry], at + 1)
                last_block[entry] = max(last_block[entry], block)
    return table, positions, (positions + 1).astype(np.int32), slots, longest, last_block, context


class _Paths:
    """The frontier's paths in scratch blocks while one group of requests grows its pools."""

    def __init__(self, drafter: Eagle3Drafter, position: np.ndarray, table: np.ndarray) -> None:
        scratch = drafter.scratch[: len(position)]  # [R, k, tail]
        table, positions, seq_lens, slots, self.longest, self.last_block, context = _path_layout(
            position, table, drafter.block_size, scratch, drafter.depth
        )
        self.drafter = drafter
        self.table, self.positions, self.seq_lens, self.slots, self.scratch = map(
            drafter.to_device, (table, positions, seq_lens, slots, scratch)
        )
        self.query_start = torch.arange(len(table) + 1, dtype=torch.int32)
        # Each path starts with a copy of the context's last, partly filled block.
        drafter.copier.copy_apart(context, scratch[:, :, 0].ravel())

    def forward(self, tokens: torch.Tensor, states: torch.Tensor, entry: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the frontier's tokens, ``[R, k]`` with states ``[R, k, hidden]``, as the paths' next ``entry``."""
        rows = tokens.numel()
        metadata = CommonAttentionMetadata(
            query_start_loc=self.query_start.to(self.drafter.device),
            query_start_loc_cpu=self.query_start,
            seq_lens=self.seq_lens[entry],
            num_reqs=rows,
            num_actual_tokens=rows,
            max_query_len=1,
            max_seq_len=int(self.longest[entry]),
            block_table_tensor=self.table,
            slot_mapping=self.slots[entry],
            causal=True,
            positions=self.positions[entry],
        )
        return self.drafter.forward(tokens.reshape(-1), states.reshape(rows, -1), metadata, draft_index=entry + 1)

    def follow(self, parent: torch.Tensor, entries: int) -> None:
        """Give path ``j`` of each request the content of path ``parent[:, j]``, which has ``entries`` entries."""
        scratch = self.scratch[:, :, : int(self.last_block[entries - 1]) + 1]
        source = scratch.gather(1, parent[:, :, None].expand_as(scratch))
        self.drafter.copier.copy(source.reshape(-1), scratch.reshape(-1))
