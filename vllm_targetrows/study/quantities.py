# SPDX-License-Identifier: Apache-2.0
"""Each round's own numbers: what every rule's tree would have accepted, covered and cost.  Batched over rounds.

``P(v)`` is the product of the target's probabilities along the path to ``v``.  Exhaustive verification of a tree ``T``
accepts ``sum of P(v) over T`` tokens on average, so a rule's nodes in the order of its score give the expectation for
every node budget by one cumulative sum.  Source: arXiv 2610.29210.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_targetrows.selection import NEVER, path_scores, root_scores
from vllm_targetrows.study.rounds import Batch, with_root
from vllm_targetrows.trees import Pool

BUDGETS = 64
"""Curves are for B = 1 … 64."""
LONG = 512
"""Nodes up to which ``draft`` is followed when it is to match another rule."""
REPORTED = (8, 59)
"""The node budgets of the paper's tables."""
CUTS = (8, 16, 32, 64, 128, 256)
"""Pool sizes of the truncated pools."""
FRONTIERS = (8, 16, 32, 51, 64, 128, 256)
"""Numbers of frontier nodes that are scored besides the tree.  8 + 51 is the 59 of the candidate set."""
CANDIDATES = 59
ROW_DEPTHS = {"rows_to_1": 1, "rows_to_2": 2}
"""Rules for the oracle's advantage: the deepest nodes whose rows score their children.  ``root`` is depth 0."""
STOPPING = ("cap:1", "cap:2", "sampled_leaf")

Numbers = dict[str, NDArray[np.float64]]


def best_first(score: Tensor) -> Tensor:
    """Nodes by score, int64 ``[R, N]``; ties in pool order, which is shallower first, as in ``selection``."""
    return score.sort(dim=1, descending=True, stable=True).indices


def cumulative(order: Tensor, values: Tensor, length: int) -> Tensor:
    """``[R, length]``: sums of ``values`` over the first 1, 2, … nodes of ``order``."""
    sums = values.gather(1, order[:, :length]).cumsum(dim=1)
    return torch.cat((sums, sums[:, -1:].expand(-1, length - sums.shape[1])), dim=1)


def accepted_by_score(score: Tensor, reach: Tensor, length: int = BUDGETS) -> Tensor:
    """Expected accepted tokens of the top 1 … ``length`` nodes: float64 ``[R, length]``.

    Args:
        score: ``[R, N]``, never larger than the parent's; ``-inf`` is never selected.
        reach: ``[R, N]`` ``P(v)``.
    """
    return cumulative(best_first(score), torch.where(score > NEVER, reach, 0.0), length)


def branch_ranks(pool: Pool) -> Tensor:
    """Each node's place among the nodes of its first-level branch by draft score, from 0: int64 ``[R, N]``."""
    order = best_first(pool.score)
    # A stable sort by branch leaves each branch best first.
    order = order.gather(1, pool.branch.gather(1, order).sort(dim=1, stable=True).indices)
    branch = pool.branch.gather(1, order)
    place = torch.arange(order.shape[1]).expand_as(order)
    is_start = torch.cat((torch.ones_like(branch[:, :1], dtype=torch.bool), branch[:, 1:] != branch[:, :-1]), dim=1)
    start = torch.where(is_start, place, 0).cummax(dim=1).values
    return torch.empty_like(order).scatter_(1, order, place - start)


def quantities(batch: Batch) -> Numbers:
    """All numbers of a batch's rounds by name, float64 ``[R]`` or ``[R, …]``."""
    return {
        name: value.double().numpy()
        for part in (_curves(batch), _truncated(batch), _coverage(batch), _root(batch), _engine(batch))
        for name, value in part.items()
    }


def _curves(batch: Batch) -> dict[str, Tensor]:
    """Expected accepted tokens (``accepted/RULE``) and mean verified nodes (``nodes/RULE``) for B = 1 … 64.

    ``root_draw`` and ``pearl`` count the drawn token as accepted and as a node; it is drawn from the root row, so the
    expectation over it is a sum over the first level.  Absent from there, it has no tree: 0 accepted, 0 nodes.
    """
    pool, reach, exists = batch.pool, batch.reach, batch.exists
    first_reach = torch.where(exists, reach.gather(1, pool.branch), 0.0)  # probability that the node's branch is drawn
    rank = branch_ranks(pool)

    def over_ranks(values: Tensor) -> Tensor:
        by_rank = values.new_zeros((values.shape[0], BUDGETS + 1))
        return by_rank.scatter_add(1, rank.clamp(max=BUDGETS), values)[:, :BUDGETS].cumsum(dim=1)

    # Edges below at most so many levels of target rows are scored by the target.
    known = {name: torch.where(pool.depth <= 1 + rows, batch.log_p, batch.log_q) for name, rows in ROW_DEPTHS.items()}
    return {
        "accepted/draft": accepted_by_score(pool.score, reach, LONG),
        "accepted/root": accepted_by_score(root_scores(pool, batch.log_p), reach),
        "accepted/root_draw": over_ranks(reach),
        "accepted/top_first": over_ranks(torch.where(pool.branch == 0, reach, 0.0)),
        "accepted/oracle": accepted_by_score(path_scores(pool, batch.log_p), reach),
        "nodes/root_draw": over_ranks(first_reach),
        "nodes/pearl": cumulative(best_first(pool.score), first_reach, BUDGETS),
        **{f"accepted/{name}": accepted_by_score(path_scores(pool, edge), reach) for name, edge in known.items()},
    }


def _truncated(batch: Batch) -> dict[str, Tensor]:
    """``cut/M/RULE``: expected accepted tokens ``[R, len(REPORTED)]`` from the pool's best ``M`` nodes by ``draft``."""
    pool, reach = batch.pool, batch.reach
    order = best_first(pool.score)
    root, at = root_scores(pool, batch.log_p), torch.tensor(REPORTED) - 1
    parts = {}
    for cut in CUTS:
        kept = torch.zeros_like(batch.exists).scatter_(1, order[:, :cut], True)
        for rule, score in (("draft", pool.score), ("root", root)):
            parts[f"cut/{cut}/{rule}"] = accepted_by_score(score.masked_fill(~kept, NEVER), reach)[:, at]
    return parts


def _coverage(batch: Batch) -> dict[str, Tensor]:
    """Probability that the exit prefix was scored (``covered/B/SET``), and the sizes of the scored sets (``scored/…``).

    The tree ``T`` is ``draft``'s.  An exhaustive walk leaves ``T`` at a prefix whose parent is in ``T`` or the root, so
    of a scored set only those nodes count.  The stopping rules score ``T`` alone: ``cap:k`` emits a node of depth
    ``k + 1`` as its continuation, ``sampled_leaf`` a leaf.
    """
    pool, reach, exists = batch.pool, batch.reach, batch.exists
    order = best_first(pool.score)
    parts: dict[str, Tensor] = {}
    for budget in REPORTED:
        tree = torch.zeros_like(exists).scatter_(1, order[:, :budget], True) & exists
        behind_tree = with_root(tree, True).gather(1, pool.parents + 1)
        frontier = exists & ~tree & behind_tree
        candidates = torch.zeros_like(exists).scatter_(1, order[:, :CANDIDATES], True) & exists
        place = frontier.gather(1, order).cumsum(dim=1)  # of the frontier's nodes, best first, from 1
        place = torch.zeros_like(place).scatter_(1, order, place)
        sets = {"tree": tree, "candidates": candidates | tree, "frontier": tree | frontier, "pool": exists}
        sets |= {f"best {count}": tree | (frontier & (place <= count)) for count in FRONTIERS}
        for name, scored in sets.items():
            parts[f"covered/{budget}/{name}"] = _sum(reach, scored & ~tree & behind_tree)
            parts[f"scored/{budget}/{name}"] = scored.sum(dim=1)
        inner = torch.zeros_like(tree, dtype=torch.int64)
        inner = with_root(inner, 0).scatter_add(1, pool.parents + 1, tree.long())[:, 1:] > 0
        for rule in STOPPING:
            leaves = tree & ~inner if rule == "sampled_leaf" else tree & (pool.depth == 1 + int(rule[4:]))
            passed = tree & inner if rule == "sampled_leaf" else tree & (pool.depth <= int(rule[4:]))
            parts[f"covered/{budget}/{rule}"] = _sum(reach, leaves)
            parts[f"stopped/{budget}/{rule}"] = _sum(reach, passed)
    return parts


def _root(batch: Batch) -> dict[str, Tensor]:
    """What is known of the root: the drafter's agreement, the row's entropy, and what the first level lacks."""
    first = batch.exists & (batch.pool.parents < 0)
    return {
        "agree": (batch.pool.tokens[:, 0] == batch.root_top) & batch.exists[:, 0],
        "entropy": torch.from_numpy(batch.root_entropy),
        "absent": (1 - _sum(batch.reach, first)).clamp(min=0.0),
        "address_variation": torch.from_numpy(batch.address_variation),
        "token_variation": torch.from_numpy(batch.token_variation),
    }


def _engine(batch: Batch) -> dict[str, Tensor]:
    """What the verified tree was expected to accept, given the drawn token, and what it did; NaN without a tree."""
    verified = batch.verified.any(dim=1)
    expected = _sum(batch.reach, batch.verified) / batch.drawn_reach
    known = verified & (batch.drawn_reach > 0)
    return {
        "engine/expected": torch.where(known, expected, float("nan")),
        "engine/accepted": torch.where(known, torch.from_numpy(batch.accepted).double(), float("nan")),
    }


def _sum(reach: Tensor, nodes: Tensor) -> Tensor:
    return torch.where(nodes, reach, 0.0).sum(dim=1)
