# SPDX-License-Identifier: Apache-2.0
"""The tensor steps of a round, in torch and by our Triton kernels: same inputs, same results.

``TorchSteps`` is right on any device.  ``KernelSteps`` is what a layout with kernels brings (``kernel_attention.py``).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vllm_targetrows.engine.rows import TargetRows
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
