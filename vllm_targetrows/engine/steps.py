# SPDX-License-Identifier: Apache-2.0
"""The tensor steps of a round, in torch and by our Triton kernels: same inputs, same results.

``TorchSteps`` is right on any device.  ``KernelSteps`` is what a layout with kernels brings (``kernel_attention.py``);
with it no step of the round makes the host wait for the device.  What depends on the verifier's decision then gets the
shape of the longest decision possible.  ``HostSteps`` (``host_steps.py``) is for a CPU, where looking costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vllm_targetrows.engine.rows import TargetRows
from vllm_targetrows.engine.transfer import on_device
from vllm_targetrows.selection import select
from vllm_targetrows.trees import Pool, Tree
from vllm_targetrows.verification import (
    accepted_path,
    draw_exit,
    draw_token,
    edge_masses,
    edge_masses_greedy,
    exit_law,
    residual_row,
)


class Level(NamedTuple):
    """One level of the pool, ``[R, n]`` each."""

    tokens: Tensor  # int64
    parents: Tensor  # int64, pool index, -1 for a child of the root
    depth: Tensor  # int64
    score: Tensor  # float32, path score
    branch: Tensor  # int64, pool index of the ancestor in the first level


class Frontier(NamedTuple):
    """The ``k`` best nodes of a level, best first: ``[R, k]`` each."""

    token: Tensor  # int64
    score: Tensor  # float32
    node: Tensor  # int64, pool index
    branch: Tensor  # int64
    parent: Tensor  # int64, place of the node's parent in the frontier before


class Exits(NamedTuple):
    """The verifier's decision; ``D`` levels."""

    exit_node: Tensor  # int64 [R] 0 for the root, b + 1 for node b
    path: Tensor  # int64 [R, D] accepted nodes, root side first, -1 behind them
    length: Tensor  # int64 [R]
    continuation: Tensor  # int64 [R]


class StepRows(NamedTuple):
    """Where the requests' own tokens are in a step: on the host, ``[R]`` each."""

    begin: np.ndarray  # int64, a request's first row
    before: np.ndarray  # int64, its tokens up to and including the root
    computed: np.ndarray  # int64, its tokens computed before the step
    room: np.ndarray  # int64, depth of its tree: the most nodes that can be accepted
    carry: np.ndarray  # bool, the drafter also reads the position before the step's first one
    prompt_token: np.ndarray  # int64, the prompt's token behind the step's own ones; -1 when the prompt is complete


class Committed(NamedTuple):
    """What the drafter reads after a step: ``n`` positions, those of a request one after the other.

    Positions behind the newest committed one may follow; they hold anything, and the next step overwrites them.
    """

    rows: Tensor  # int64 [n], row of the target's pass (any for a carried position)
    tokens: Tensor  # int64 [n], token behind the position
    positions: Tensor  # int64 [n]
    slots: Tensor  # int64 [n], KV slot
    last: Tensor  # int64 [R], which of the ``n`` is the request's newest committed position
    counts: np.ndarray  # int64 [R], how many of the ``n`` are the request's
    end: np.ndarray  # int64 [R], position behind the request's last one


class PathLayout(NamedTuple):
    """Where the frontier's paths lie: ``k`` virtual sequences for each of ``R`` requests, with ``E`` entries each.

    The entries follow the context, in scratch blocks, which hold a copy of the context's last, partly filled block.
    """

    table: Tensor  # int32 [R * k, blocks]
    positions: Tensor  # int64 [E, R * k] of each path entry
    lengths: Tensor  # int32 [E, R * k], sequence lengths with that entry
    slots: Tensor  # int64 [E, R * k], KV slot of each path entry
    context: Tensor  # int64 [R * k], the context's last block; any where that is full
    longest: np.ndarray  # int64 [E], no sequence is longer with that entry
    last_block: np.ndarray  # int64 [E], no path uses a later one of its scratch blocks up to that entry


class Steps(Protocol):
    """What a round computes beside the models' passes."""

    def children(self, logits: Tensor, k: int, target_token: Tensor) -> tuple[Tensor, Tensor]:
        """The ``k`` likeliest children by each drafter row ``[n, V_d]``: float32 log q and int64 tokens, ``[n, k]``."""

    def expand(self, log_q: Tensor, token: Tensor, frontier: Frontier, base: int, depth: int) -> tuple[Level, Frontier]:
        """The level below ``frontier``, whose first node gets pool index ``base``, and the next frontier.

        ``log_q`` and ``token`` are ``[R, k, k]``: of child ``j`` of frontier node ``i``.
        """

    def select(
        self,
        pool: Pool,
        budget: int,
        rule: str,
        root_log_p: Tensor | None,
        drawn: Tensor | None,
        has_row: Tensor | None,
    ) -> Tree:
        """As ``selection.select``."""

    def exits(self, rows: TargetRows, tree: Tree, row_of: Tensor, uniforms: Tensor | None, levels: int) -> Exits:
        """Draw each request's exit and continuation by the exit law.

        Args:
            rows: the step's rows.
            tree: ``[R, B]``.
            row_of: int64 ``[R, B + 1]`` row of the root and of each node.
            uniforms: float64 ``[R, 2]`` for exit and continuation, ``None`` when every request is greedy.
            levels: most levels of any tree.
        """

    def committed(
        self, step: StepRows, path: Tensor, length: Tensor, emitted: Tensor, input_ids: Tensor, table: Tensor, size: int
    ) -> Committed:
        """What the drafter reads after a step: every newly committed position and the token behind it.

        Args:
            step: where the requests' tokens are.
            path, length: of ``Exits``.
            emitted: int64 ``[R, D + 2]`` accepted tokens, then the continuation; -1 behind them.
            input_ids: int32 the step's tokens.
            table: int32 ``[R, blocks]`` block table.
            size: tokens in a block.
        """

    def paths(
        self, position: Tensor, bound: np.ndarray, table: Tensor, size: int, scratch: np.ndarray, depth: int
    ) -> PathLayout:
        """Where the paths of pools of ``depth`` levels lie (``E = max(depth - 1, 1)``).

        Args:
            position: int64 ``[R]`` the context's last position.
            bound: int64 ``[R]`` on the host: no position is larger.
            table: int32 ``[R, blocks]`` block table.
            size: tokens in a block.
            scratch: int64 ``[R, k, tail]`` numbers of each path's scratch blocks.
        """


class TorchSteps:
    """``Steps`` in torch."""

    def children(self, logits: Tensor, k: int, target_token: Tensor) -> tuple[Tensor, Tensor]:
        log_q, child = logits.float().log_softmax(dim=-1).topk(k, dim=-1)
        return log_q, target_token[child]

    def expand(self, log_q: Tensor, token: Tensor, frontier: Frontier, base: int, depth: int) -> tuple[Level, Frontier]:
        requests, k, _ = log_q.shape
        score = (frontier.score[:, :, None] + log_q).view(requests, k * k)
        level = Level(
            tokens=token.view(requests, k * k),
            parents=frontier.node.repeat_interleave(k, dim=1),
            depth=torch.full((requests, k * k), depth, device=score.device),
            score=score,
            branch=frontier.branch.repeat_interleave(k, dim=1),
        )
        best_score, best = score.topk(k, dim=1)
        chosen = Frontier(
            level.tokens.gather(1, best), best_score, base + best, level.branch.gather(1, best), best // k
        )
        return level, chosen

    def select(
        self,
        pool: Pool,
        budget: int,
        rule: str,
        root_log_p: Tensor | None,
        drawn: Tensor | None,
        has_row: Tensor | None,
    ) -> Tree:
        return select(pool, budget, rule, root_log_p, drawn, has_row)

    def exits(self, rows: TargetRows, tree: Tree, row_of: Tensor, uniforms: Tensor | None, levels: int) -> Exits:
        child_p, residual = self._masses(rows, tree, row_of)
        half = torch.full((len(row_of),), 0.5, dtype=torch.float64, device=row_of.device)
        exit_node = draw_exit(exit_law(child_p, residual, tree), half if uniforms is None else uniforms[:, 0])
        path, length = accepted_path(tree, exit_node)
        exit_row = row_of.gather(1, exit_node[:, None])[:, 0]
        if rows.probs is None:
            assert rows.argmax is not None
            continuation = rows.argmax[exit_row]
        else:
            assert uniforms is not None
            continuation = draw_token(residual_row(rows.probs, tree, exit_node, row_of), uniforms[:, 1])
            if rows.argmax is not None:
                assert rows.greedy is not None
                continuation = torch.where(rows.greedy, rows.argmax[exit_row], continuation)
        return Exits(exit_node, path, length, continuation)

    def committed(
        self, step: StepRows, path: Tensor, length: Tensor, emitted: Tensor, input_ids: Tensor, table: Tensor, size: int
    ) -> Committed:
        counts = step.carry + step.before + step.room
        start = np.cumsum(counts) - counts
        request = np.repeat(np.arange(len(counts)), counts)
        offset = np.arange(len(request)) - start[request] - step.carry[request]
        behind = offset - step.before[request] + 1  # the token behind the position: its place among the emitted ones
        position = step.computed[request] + offset
        first = step.begin[request]
        # Of the step's own positions rows and tokens are known, of the accepted path's where to look.
        known_row = np.where(behind <= 0, first + np.maximum(offset, 0), -1)
        known_token = np.where(behind == 0, step.prompt_token[request], -1)
        (q, level, at, base, row, known, own, next_row, p, column, newest) = on_device(
            path.device,
            *(request, np.maximum(behind - 1, 0), np.maximum(behind, 0), first + step.before[request]),
            *(known_row, known_token, behind < 0, np.where(behind < 0, first + offset + 1, 0)),
            *(position, position // size, start + step.carry + step.before - 1),
        )
        rows = torch.where(row >= 0, row, base + path[q, level].clamp(min=0))
        drawn = torch.where(known >= 0, known, emitted[q, at].clamp(min=0))
        tokens = torch.where(own, input_ids[next_row].to(torch.int64), drawn)
        slots = table[q, column].to(torch.int64) * size + p % size
        return Committed(rows, tokens, p, slots, newest + length, counts, step.computed + step.before + step.room)

    def paths(
        self, position: Tensor, bound: np.ndarray, table: Tensor, size: int, scratch: np.ndarray, depth: int
    ) -> PathLayout:
        requests, k, tail = scratch.shape
        device, own = position.device, table.shape[1]
        entries = np.arange(max(depth - 1, 1))
        width = max(int(bound.max() + 1) // size + tail, own)
        blocks, entry = on_device(device, scratch, entries)
        start = position + 1  # position of the first entry
        column = start // size  # the scratch blocks replace the request's own from here on
        columns = column[:, None] + torch.arange(tail, device=device)
        paths = torch.zeros((requests, k, width), dtype=table.dtype, device=device)
        paths[:, :, :own] = table[:, None]
        paths.scatter_(2, columns[:, None].expand(-1, k, -1), blocks.to(table.dtype))
        context = table.gather(1, column.clamp(max=own - 1)[:, None]).to(torch.int64)
        at = (start[:, None] + entry)[:, None].expand(-1, k, -1)  # [R, k, E]
        slots = blocks.gather(2, at // size - column[:, None, None]) * size + at % size
        at, slots = (part.permute(2, 0, 1).reshape(len(entries), requests * k) for part in (at, slots))
        return PathLayout(
            table=paths.view(requests * k, width),
            positions=at,
            lengths=(at + 1).int(),
            slots=slots,
            context=context.expand(-1, k).reshape(-1),
            longest=bound.max() + 2 + entries,
            last_block=(size - 1 + entries) // size,
        )

    @staticmethod
    def _masses(rows: TargetRows, tree: Tree, row_of: Tensor) -> tuple[Tensor, Tensor]:
        """What the exit law needs of greedy rows, sampled rows or both."""
        if rows.argmax is None:
            assert rows.probs is not None
            return edge_masses(rows.probs, tree, row_of)
        child_p, residual = edge_masses_greedy(rows.argmax, tree, row_of)
        if rows.probs is not None:
            assert rows.greedy is not None
            greedy = rows.greedy[:, None]
            sampled_child_p, sampled_residual = edge_masses(rows.probs, tree, row_of)
            child_p = torch.where(greedy, child_p, sampled_child_p)
            residual = torch.where(greedy, residual, sampled_residual)
        return child_p, residual
