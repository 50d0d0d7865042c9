# SPDX-License-Identifier: Apache-2.0
"""The tensor steps of a round by our Triton kernels."""

from __future__ import annotations

from torch import Tensor

from vllm_targetrows.engine.rows import TargetRows
from vllm_targetrows.engine.steps import Exits, Frontier, Level, TorchSteps
from vllm_targetrows.trees import Pool, Tree
from vllm_targetrows.triton_kernels import exit_law, frontier


class KernelSteps(TorchSteps):
    """``Steps`` by kernels; torch where ``tree_topk`` is above what the frontier's kernels take."""

    def children(self, logits: Tensor, k: int, target_token: Tensor) -> tuple[Tensor, Tensor]:
        if k > frontier.MAX_K:
            return super().children(logits, k, target_token)
        return frontier.topk_log_softmax(logits, k, target_token)

    def expand(self, log_q: Tensor, token: Tensor, front: Frontier, base: int, depth: int) -> tuple[Level, Frontier]:
        if log_q.shape[1] > frontier.MAX_K:
            return super().expand(log_q, token, front, base, depth)
        scores = (front.score.contiguous(), front.node, front.branch)
        level, chosen = frontier.expand(log_q.contiguous(), token.contiguous(), *scores, base, depth)
        return Level(*level), Frontier(*chosen)

    def select(
        self,
        pool: Pool,
        budget: int,
        rule: str,
        root_log_p: Tensor | None,
        drawn: Tensor | None,
        has_row: Tensor | None,
    ) -> Tree:
        nodes = (pool.tokens, pool.parents, pool.depth, pool.score, pool.branch)
        return Tree(*frontier.select(*nodes, pool.width, budget, rule, root_log_p, drawn, has_row))

    def exits(self, rows: TargetRows, tree: Tree, row_of: Tensor, uniforms: Tensor | None, levels: int) -> Exits:
        decided = exit_law.exit_law(
            rows.probs,
            tree.tokens,
            tree.parents,
            tree.size,
            row_of,
            None if uniforms is None else uniforms.contiguous(),
            levels,
            argmax=rows.argmax,
            greedy=rows.greedy if rows.probs is not None else None,
        )
        return Exits(decided.exit_node, decided.path, decided.length, decided.continuation)
