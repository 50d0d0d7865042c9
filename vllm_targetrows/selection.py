# SPDX-License-Identifier: Apache-2.0
"""Selection rules: which ``B`` nodes of the pool are verified.  Batched over requests, device independent.

All rules take the top ``B`` nodes by a path score that never increases from parent to child, so that the choice is
prefix-closed.  Ties go to the shallower node, then to pool order.  ``c`` is the committed context, ``x1..xd`` a path:

* ``draft``: ``sum log q(xi)``.
* ``root``: ``log p(x1 | c) + sum_{i >= 2} log q(xi)``.
* ``root_draw``: draw ``x1`` from the root row, then the top nodes below ``x1`` by ``sum log q(xi)``.
* ``pearl``: ``draft`` first, then keep only what is below the drawn ``x1``.
* ``oracle``: ``sum log p(xi)``, for evaluation only: it needs every row.

Source: arXiv 2610.29210.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_targetrows.trees import Pool, Tree, deepest, depth_first_preorder

NEVER = float("-inf")


def select(
    pool: Pool,
    budget: int,
    rule: str,
    root_log_p: Tensor | None = None,
    drawn: Tensor | None = None,
    has_row: Tensor | None = None,
) -> Tree:
    """Choose each request's tree.  A request without a root row is served by ``draft`` in the same call.

    A token drawn from the root row is the new root: the tree holds the nodes below it, with depths counted from it,
    and the token itself counts as the first node of the budget.  If it is absent from the pool's first level, the tree
    is empty.

    Args:
        pool: ``[R, N]``.
        budget: node budget ``B``, at least 1.
        rule: ``draft``, ``root``, ``root_draw`` or ``pearl``.
        root_log_p: float ``[R, width]``, for ``root``: log of the root row at the first level's tokens.
        drawn: int64 ``[R]``, for ``root_draw`` and ``pearl``: token drawn from the root row, ``-1`` without a row.
        has_row: bool ``[R]``, for ``root``: which requests have a root row; all of them when ``None``.

    Returns:
        Trees of ``min(B, N)`` columns.

    Raises:
        ValueError: the rule is unknown or lacks its root row.
    """
    if rule == "draft":
        return top_nodes(pool, pool.score, budget)
    if rule == "root":
        if root_log_p is None:
            raise ValueError("selection rule 'root' needs root_log_p")
        return top_nodes(pool, root_scores(pool, root_log_p, has_row), budget)
    if rule in ("root_draw", "pearl"):
        if drawn is None:
            raise ValueError(f"selection rule {rule!r} needs the drawn tokens")
        return _below_drawn(pool, budget, drawn, select_first=rule == "pearl")
    raise ValueError(f"unknown selection rule {rule!r}; allowed: draft, root, root_draw, pearl")


def oracle(pool: Pool, log_p: Tensor, budget: int) -> Tree:
    """The tree with the largest expected accepted length; ``log_p`` is ``[R, N]``, ``log p(node | its prefix)``."""
    return top_nodes(pool, path_scores(pool, log_p), budget)


def root_scores(pool: Pool, root_log_p: Tensor, has_row: Tensor | None = None) -> Tensor:
    """The ``root`` rule's path scores, float64 ``[R, N]``; ``pool.score`` where ``has_row`` is false.

    In float64 the subtraction keeps two different float32 scores different, so that each branch keeps its order.
    """
    draft = pool.score.double()
    below = draft - draft.gather(1, pool.branch)
    score = root_log_p.double().gather(1, pool.branch) + below
    score = torch.where(draft == NEVER, draft, score)  # -inf - -inf is no number
    return score if has_row is None else torch.where(has_row[:, None], score, draft)


def path_scores(pool: Pool, log_p: Tensor) -> Tensor:
    """Sum of ``log_p`` (``[R, N]``, one value per edge) along each node's path."""
    score = log_p.new_zeros((log_p.shape[0], log_p.shape[1] + 1))
    for _ in range(deepest(pool.depth)):  # after d passes right for depth d; summed root side first, so monotone
        score[:, 1:] = log_p + score.gather(1, pool.parents + 1)
    return score[:, 1:].masked_fill(pool.score == NEVER, NEVER)


def top_nodes(pool: Pool, score: Tensor, budget: int) -> Tree:
    """The top ``budget`` nodes by ``score`` (``[R, N]``, never larger than the parent's) as trees."""
    best, node = score.sort(dim=1, descending=True, stable=True)  # pool order is shallower first
    best, node = best[:, :budget], node[:, :budget]
    return _compact(pool, node, best > NEVER)


def _below_drawn(pool: Pool, budget: int, drawn: Tensor, select_first: bool) -> Tree:
    """Trees below the drawn tokens; ``select_first`` cuts the ``draft`` tree (``pearl``) instead of the pool."""
    match = (pool.tokens[:, : pool.width] == drawn[:, None]) & (pool.score[:, : pool.width] > NEVER)
    has_row = drawn >= 0
    # The drawn node; -1 where it is absent, which is no node's branch.
    first = torch.where(match.any(dim=1), match.byte().argmax(dim=1), -1)[:, None]
    below = (pool.branch == first) & (pool.parents >= 0)
    eligible = below | ~has_row[:, None]
    score = pool.score if select_first else pool.score.masked_fill(~eligible, NEVER)
    best, node = score.sort(dim=1, descending=True, stable=True)
    best, node = best[:, :budget], node[:, :budget]
    if select_first:
        best = best.masked_fill(~eligible.gather(1, node), NEVER)
        best, kept = best.sort(dim=1, descending=True, stable=True)
        node = node.gather(1, kept)
        return _compact(pool, node, best > NEVER, has_row)
    # The drawn token takes one node of the budget.
    limit = budget - has_row.long()
    within = torch.arange(node.shape[1], device=node.device) < limit[:, None]
    return _compact(pool, node, (best > NEVER) & within, has_row)


def _compact(pool: Pool, node: Tensor, real: Tensor, rerooted: Tensor | None = None) -> Tree:
    """Selected pool nodes as trees in preorder.

    Args:
        node: int64 ``[R, B]`` pool indices, best first.
        real: bool ``[R, B]``, a prefix of each row; the rest is padding.
        rerooted: bool ``[R]``: the root is a node of the first level, which is not selected.
    """
    requests, columns = node.shape
    device = node.device
    # rank[:, n + 1] is the place of pool node n among the selected ones, -1 for the others and for the root.
    rank = torch.full((requests, pool.tokens.shape[1] + 1), -1, dtype=torch.int64, device=device)
    rank.scatter_(1, node + 1, torch.where(real, torch.arange(columns, device=device), -1))
    padding = ~real
    parents = rank.gather(1, pool.parents.gather(1, node) + 1).masked_fill_(padding, -1)
    depth = pool.depth.gather(1, node)
    if rerooted is not None:
        depth = depth - rerooted.long()[:, None]
    depth = depth.masked_fill(padding, 0)
    tokens = pool.tokens.gather(1, node).masked_fill_(padding, -1)
    place = depth_first_preorder(parents, depth)
    moved = torch.cat((place.new_full((requests, 1), -1), place), dim=1).gather(1, parents + 1)
    return Tree(
        tokens=torch.empty_like(tokens).scatter_(1, place, tokens),
        parents=torch.empty_like(parents).scatter_(1, place, moved),
        depth=torch.empty_like(depth).scatter_(1, place, depth),
        size=real.sum(dim=1),
    )
