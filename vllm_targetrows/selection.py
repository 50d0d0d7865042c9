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

from typing import NamedTuple

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
    return _compact(pool, _choice(pool, budget, rule, root_log_p, drawn, has_row))[0]


def select_with_frontier(
    pool: Pool,
    budget: int,
    frontier: int,
    rule: str,
    root_log_p: Tensor | None = None,
    drawn: Tensor | None = None,
    has_row: Tensor | None = None,
    levels: int | None = None,
) -> tuple[Tree, Tensor]:
    """``select``, and behind each tree its scored frontier.

    The frontier are the ``frontier`` best nodes by the rule's score outside the tree whose parent is in it or is its
    root.  They are scored with the tree and never accepted.  A request without a tree has no frontier.

    Args:
        frontier: at least 0; the other arguments are those of ``select``.
        levels: no pool is deeper; looked up where not given.

    Returns:
        scored: trees of ``min(B, N) + min(frontier, N)`` columns: the nodes of ``select`` in preorder, then the
            frontier, best first.
        size: int64 ``[R]`` how many of the nodes are the tree's.
    """
    choice = _choice(pool, budget, rule, root_log_p, drawn, has_row)
    tree, place = _compact(pool, choice, levels)
    above = place.gather(1, pool.parents + 1)  # -1 for the pool's root and for nodes outside the tree
    top = pool.parents == choice.top
    outside = (place[:, 1:] < 0) & (top | (above >= 0)) & (tree.size > 0)[:, None]
    best, node = choice.score.masked_fill(~outside, NEVER).sort(dim=1, descending=True, stable=True)
    best, node = best[:, :frontier], node[:, :frontier]
    absent = best == NEVER
    parents = above.gather(1, node)
    tail = Tree(
        tokens=pool.tokens.gather(1, node).masked_fill_(absent, -1),
        parents=parents.masked_fill(absent, -1),
        depth=(tree_depth(tree, parents) + 1).masked_fill_(absent, 0),
        size=(~absent).sum(dim=1),
    )
    return _behind(tree, tail), tree.size


def tree_depth(tree: Tree, node: Tensor) -> Tensor:
    """Depth of each ``node`` (int64 ``[R, n]``, ``-1`` = the root, whose depth is 0)."""
    return torch.cat((torch.zeros_like(tree.size)[:, None], tree.depth), dim=1).gather(1, node + 1)


def _behind(tree: Tree, tail: Tree) -> Tree:
    """Each request's nodes of ``tail`` behind those of ``tree``; their parents are places in ``tree``."""
    both = [torch.cat(parts, dim=1) for parts in zip(_fields(tree), _fields(tail), strict=True)]
    columns = tree.tokens.shape[1]
    column = torch.arange(both[0].shape[1], device=tree.size.device).expand_as(both[0])
    first = torch.where(column < columns, column, column - columns + tree.size[:, None])
    padding = both[2] == 0
    # Padding goes last, in any order.
    order = torch.where(padding, column + both[0].shape[1], first).argsort(dim=1)
    tokens, parents, depth = (part.gather(1, order) for part in both)
    return Tree(tokens, parents, depth, tree.size + tail.size)


def _fields(tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    return tree.tokens, tree.parents, tree.depth


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
    return _compact(pool, _top(pool, score, budget))[0]


class _Choice(NamedTuple):
    """Selected pool nodes, not yet a tree."""

    node: Tensor  # int64 [R, B] pool indices, best first
    real: Tensor  # bool [R, B], a prefix of each row; the rest is padding
    top: Tensor  # int64 [R, 1] the tree's root: -1, or a node of the first level; -2 = absent, there is no tree
    score: Tensor  # float [R, N] the rule's


def _choice(
    pool: Pool, budget: int, rule: str, root_log_p: Tensor | None, drawn: Tensor | None, has_row: Tensor | None
) -> _Choice:
    """The nodes of ``select``."""
    if rule == "draft":
        return _top(pool, pool.score, budget)
    if rule == "root":
        if root_log_p is None:
            raise ValueError("selection rule 'root' needs root_log_p")
        return _top(pool, root_scores(pool, root_log_p, has_row), budget)
    if rule in ("root_draw", "pearl"):
        if drawn is None:
            raise ValueError(f"selection rule {rule!r} needs the drawn tokens")
        return _below_drawn(pool, budget, drawn, select_first=rule == "pearl")
    raise ValueError(f"unknown selection rule {rule!r}; allowed: draft, root, root_draw, pearl")


def _top(pool: Pool, score: Tensor, budget: int) -> _Choice:
    best, node = score.sort(dim=1, descending=True, stable=True)  # pool order is shallower first
    root = torch.full((len(node), 1), -1, dtype=torch.int64, device=node.device)
    return _Choice(node[:, :budget], best[:, :budget] > NEVER, root, score)


def _below_drawn(pool: Pool, budget: int, drawn: Tensor, select_first: bool) -> _Choice:
    """Nodes below the drawn tokens; ``select_first`` cuts the ``draft`` tree (``pearl``) instead of the pool."""
    match = (pool.tokens[:, : pool.width] == drawn[:, None]) & (pool.score[:, : pool.width] > NEVER)
    has_row = drawn >= 0
    # The drawn node; -2 where it is absent, which is no node's branch.
    first = torch.where(match.any(dim=1), match.byte().argmax(dim=1), -2)[:, None]
    below = (pool.branch == first) & (pool.parents >= 0)
    eligible = below | ~has_row[:, None]
    top = torch.where(has_row[:, None], first, -1)
    score = pool.score.masked_fill(~eligible, NEVER)
    best, node = (pool.score if select_first else score).sort(dim=1, descending=True, stable=True)
    best, node = best[:, :budget], node[:, :budget]
    if select_first:
        best = best.masked_fill(~eligible.gather(1, node), NEVER)
        best, kept = best.sort(dim=1, descending=True, stable=True)
        return _Choice(node.gather(1, kept), best > NEVER, top, score)
    # The drawn token takes one node of the budget.
    limit = budget - has_row.long()
    within = torch.arange(node.shape[1], device=node.device) < limit[:, None]
    return _Choice(node, (best > NEVER) & within, top, score)


def _compact(pool: Pool, choice: _Choice, levels: int | None = None) -> tuple[Tree, Tensor]:
    """Selected pool nodes as trees in preorder, and the place of each pool node in its tree.

    Returns:
        The trees, and int64 ``[R, N + 1]`` with the place of pool node ``n`` at ``n + 1``, ``-1`` outside the tree.
    """
    node, real = choice.node, choice.real
    requests, columns = node.shape
    device = node.device
    # rank[:, n + 1] is the place of pool node n among the selected ones, -1 for the others and for the root.
    rank = torch.full((requests, pool.tokens.shape[1] + 1), -1, dtype=torch.int64, device=device)
    rank.scatter_(1, node + 1, torch.where(real, torch.arange(columns, device=device), -1))
    padding = ~real
    parents = rank.gather(1, pool.parents.gather(1, node) + 1).masked_fill_(padding, -1)
    depth = pool.depth.gather(1, node) - (choice.top != -1).long()
    depth = depth.masked_fill(padding, 0)
    tokens = pool.tokens.gather(1, node).masked_fill_(padding, -1)
    place = depth_first_preorder(parents, depth, levels)
    moved = torch.cat((place.new_full((requests, 1), -1), place), dim=1)
    tree = Tree(
        tokens=torch.empty_like(tokens).scatter_(1, place, tokens),
        parents=torch.empty_like(parents).scatter_(1, place, moved.gather(1, parents + 1)),
        depth=torch.empty_like(depth).scatter_(1, place, depth),
        size=real.sum(dim=1),
    )
    return tree, moved.gather(1, rank + 1)
