# SPDX-License-Identifier: Apache-2.0
"""From rounds' numbers to the study's: means over prompts, ratios, and what follows from them, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_targetrows.study.bootstrap import Estimate, Floats, Prompts, divide, estimate, estimates
from vllm_targetrows.study.quantities import (
    BUDGETS,
    CANDIDATES,
    CUTS,
    FRONTIERS,
    REPORTED,
    ROW_DEPTHS,
    STOPPING,
    Numbers,
)

RULES = ("draft", "root", "pearl", "root_draw", "top_first", "oracle")
RATIOS = (
    ("root", "draft"),
    ("root_draw", "draft"),
    ("root_draw", "pearl"),
    ("top_first", "pearl"),
    ("oracle", "draft"),
)
TO_DRAFT = ("root", "root_draw")
QUINTILES = 5
HISTOGRAM_BINS = 40
SAME = 1e-5
"""Expected and accepted tokens closer than this are equal: the probabilities were recorded in float32."""

Mask = NDArray[np.bool_]


def study(requests: Sequence[str], numbers: Numbers, resamples: int, seed: int) -> dict[str, Any]:
    """Everything but the reranker, with :class:`Estimate` leaves.

    Args:
        requests: ``[R]`` each round's request.
        numbers: the rounds' ``quantities``, concatenated.
    """
    prompts = Prompts(requests, resamples, seed)
    accepted = {rule: prompts.sample(numbers[f"accepted/{'draft' if rule == 'pearl' else rule}"]) for rule in RULES}
    nodes = {rule: prompts.sample(numbers[f"nodes/{rule}"]) for rule in ("pearl", "root_draw")}
    return {
        "prompts": len(prompts.names),
        "rounds": len(requests),
        "accepted": {rule: estimates(sample[:, :BUDGETS]) for rule, sample in accepted.items()},
        "nodes": {rule: estimates(sample) for rule, sample in nodes.items()},
        "ratio": {
            f"{rule}/{base}": estimates(divide(accepted[rule][:, :BUDGETS], accepted[base][:, :BUDGETS]))
            for rule, base in RATIOS
        },
        "matching": {str(budget): _matching(accepted, budget) for budget in REPORTED},
        "equal_nodes": {str(budget): _equal_nodes(accepted, nodes, budget) for budget in REPORTED},
        "truncation": _truncation(prompts, numbers, accepted),
        "first_token": _first_token(prompts, numbers),
        "entropy": _entropy(prompts, numbers),
        "coverage": {str(budget): _coverage(prompts, numbers, budget) for budget in REPORTED},
        "variation": {match: _variation(prompts, numbers[f"{match}_variation"]) for match in ("address", "token")},
        "recovered": {str(budget): _recovered(prompts, numbers, accepted, budget) for budget in REPORTED},
        "absent": estimate(prompts.sample(numbers["absent"])),
        "tasks": _tasks(prompts, requests, numbers),
        "engine": _engine(prompts, numbers),
    }


def _matching(accepted: dict[str, Floats], budget: int) -> dict[str, Estimate]:
    """Nodes that one rule needs to accept what the other does with ``budget``; infinite = not with all of its curve."""

    def needed(rule: str, other: str) -> Estimate:
        reached = accepted[rule] >= accepted[other][:, budget - 1 : budget] - 1e-9
        first = np.where(reached.any(axis=1), reached.argmax(axis=1) + 1.0, np.inf)
        return estimate(first, whole=True)

    return {"draft_for_root": needed("draft", "root"), "root_for_draft": needed("root", "draft")}


def _equal_nodes(accepted: dict[str, Floats], nodes: dict[str, Floats], budget: int) -> dict[str, Estimate]:
    """``root_draw`` against ``pearl`` at one cap, and at the mean tree size that ``pearl`` has with it.

    In accepted tokens, and in emitted ones, which are one more a round.  ``root_draw``'s curve over its mean size is
    interpolated linearly, which is what mixing two caps would reach.
    """
    pearl, size = accepted["pearl"][:, budget - 1], nodes["pearl"][:, budget - 1]
    at_cap = accepted["root_draw"][:, budget - 1]
    at_size = np.array(
        [
            np.interp(at, np.concatenate(([0.0], xs)), np.concatenate(([0.0], ys)))
            for at, xs, ys in zip(size, nodes["root_draw"], accepted["root_draw"], strict=True)
        ]
    )
    return {
        "pearl_nodes": estimate(size),
        "root_draw_nodes": estimate(nodes["root_draw"][:, budget - 1]),
        "equal_cap": estimate(divide(at_cap, pearl)),
        "equal_nodes": estimate(divide(at_size, pearl)),
        "emitted_equal_cap": estimate((1 + at_cap) / (1 + pearl)),
        "emitted_equal_nodes": estimate((1 + at_size) / (1 + pearl)),
    }


def _truncation(prompts: Prompts, numbers: Numbers, accepted: dict[str, Floats]) -> dict[str, Any]:
    table: dict[str, Any] = {str(budget): {} for budget in REPORTED}
    for cut in (*CUTS, None):
        for at, budget in enumerate(REPORTED):
            draft, root = (
                accepted[rule][:, budget - 1] if cut is None else prompts.sample(numbers[f"cut/{cut}/{rule}"][:, at])
                for rule in ("draft", "root")
            )
            table[str(budget)]["all" if cut is None else str(cut)] = {
                "draft": estimate(draft),
                "root": estimate(root),
                "root/draft": estimate(divide(root, draft)),
            }
    return table


def gains(prompts: Prompts, numbers: Numbers, where: Mask) -> dict[str, Any]:
    """``root`` and ``root_draw`` over ``draft`` in some of the rounds, at the reported budgets."""
    table: dict[str, Any] = {"rounds": int(where.sum()), "share": estimate(prompts.sample(where.astype(np.float64)))}
    for budget in REPORTED:
        draft = prompts.sample(numbers["accepted/draft"][:, budget - 1], where)
        table[str(budget)] = {"draft": estimate(draft)}
        for rule in TO_DRAFT:
            own = prompts.sample(numbers[f"accepted/{rule}"][:, budget - 1], where)
            table[str(budget)][f"{rule}/draft"] = estimate(divide(own, draft))
            table[str(budget)][f"{rule}-draft"] = estimate(own - draft)
    return table


def _first_token(prompts: Prompts, numbers: Numbers) -> dict[str, Any]:
    agree = numbers["agree"] > 0
    return {"agree": gains(prompts, numbers, agree), "differ": gains(prompts, numbers, ~agree)}


def quintiles(entropy: Floats) -> NDArray[np.int64]:
    """Which fifth of the rounds by entropy each is in, 0 … 4.  Equal entropies are in one."""
    edges = np.quantile(entropy, np.arange(1, QUINTILES) / QUINTILES)
    return np.searchsorted(edges, entropy, side="left")


def _entropy(prompts: Prompts, numbers: Numbers) -> dict[str, Any]:
    fifth = quintiles(numbers["entropy"])
    table: dict[str, Any] = {
        "quintiles": [
            {
                "entropy": float(numbers["entropy"][fifth == each].mean()) if (fifth == each).any() else float("nan"),
                **gains(prompts, numbers, fifth == each),
            }
            for each in range(QUINTILES)
        ],
        "upper_to_lower": {},
    }
    for budget in REPORTED:
        for rule in TO_DRAFT:
            upper, lower = (
                divide(*(prompts.sample(numbers[f"accepted/{each}"][:, budget - 1], where) for each in (rule, "draft")))
                - 1
                for where in (fifth >= 3, fifth <= 1)
            )
            # A share of a gain that is not there says nothing.
            share = np.where(lower > 1e-6, divide(upper, lower), np.nan)
            table["upper_to_lower"].setdefault(str(budget), {})[rule] = estimate(share)
    return table


def _coverage(prompts: Prompts, numbers: Numbers, budget: int) -> dict[str, Any]:
    assert not numbers[f"covered/{budget}/tree"].any(), "an exhaustive walk cannot end inside its tree"
    sets = ["tree", *(f"best {count}" for count in FRONTIERS), "candidates", "frontier", "pool"]
    return {
        "sets": {
            name: {
                "coverage": estimate(prompts.sample(numbers[f"covered/{budget}/{name}"])),
                "scored": estimate(prompts.sample(numbers[f"scored/{budget}/{name}"])),
            }
            for name in sets
        },
        "stopping": {
            "exhaustive": {
                "coverage": estimate(prompts.sample(numbers[f"covered/{budget}/tree"])),
                "accepted": estimate(prompts.sample(numbers["accepted/draft"][:, budget - 1])),
            }
        }
        | {
            rule: {
                "coverage": estimate(prompts.sample(numbers[f"covered/{budget}/{rule}"])),
                "accepted": estimate(prompts.sample(numbers[f"stopped/{budget}/{rule}"])),
            }
            for rule in STOPPING
        },
    }


def telling_sets(numbers: dict[str, Any], budget: int) -> dict[str, Any]:
    """The scored sets worth showing: no part of the frontier that is all of it, no candidate set that is the tree."""
    sets = numbers["coverage"][str(budget)]["sets"]
    left_out = {name for name in sets if name.startswith("best") and sets[name]["scored"] == sets["frontier"]["scored"]}
    if budget >= CANDIDATES:
        left_out.add("candidates")
    return {name: each for name, each in sets.items() if name not in left_out}


def _variation(prompts: Prompts, values: Floats) -> dict[str, Any]:
    known = ~np.isnan(values)
    # Matched addresses differ by rounding only: their distances would all be in the first of bins up to 1.
    counts, edges = np.histogram(values[known], HISTOGRAM_BINS, (0.0, max(float(values[known].max(initial=0.0)), 0.01)))
    return {
        "rounds": int(known.sum()),
        "exists": estimate(prompts.sample(known.astype(np.float64))),
        "mean": estimate(prompts.sample(values)),
        "histogram": {"edges": edges.tolist(), "rounds": counts.tolist()},
    }


def _recovered(prompts: Prompts, numbers: Numbers, accepted: dict[str, Floats], budget: int) -> dict[str, Estimate]:
    """Shares of the oracle's advantage over ``draft``."""
    at = budget - 1
    advantage = accepted["oracle"][:, at] - accepted["draft"][:, at]
    advantage = np.where(advantage > 1e-9, advantage, np.nan)
    own = {"root": accepted["root"]} | {name: prompts.sample(numbers[f"accepted/{name}"]) for name in ROW_DEPTHS}
    return {name: estimate((sample[:, at] - accepted["draft"][:, at]) / advantage) for name, sample in own.items()}


def task_of(request: str) -> str:
    """What stands before the first ``/``; ``-`` where there is none."""
    task, slash, _ = request.partition("/")
    return task if slash else "-"


def _tasks(prompts: Prompts, requests: Sequence[str], numbers: Numbers) -> dict[str, Any]:
    task = np.array([task_of(request) for request in requests])
    names = {name: [prompt for prompt in prompts.names if task_of(prompt) == name] for name in sorted(set(task))}
    return {str(name): {"prompts": len(own), **gains(prompts, numbers, task == name)} for name, own in names.items()}


def _engine(prompts: Prompts, numbers: Numbers) -> dict[str, Any]:
    """Accepted tokens of the trees that were really verified against their expectation."""
    expected, accepted = numbers["engine/expected"], numbers["engine/accepted"]
    rounds = int((~np.isnan(expected)).sum())
    difference = estimate(prompts.sample(accepted - expected))
    return {
        "rounds": rounds,
        "expected": estimate(prompts.sample(expected)),
        "accepted": estimate(prompts.sample(accepted)),
        "difference": difference,
        "agrees": bool(difference.low <= SAME and difference.high >= -SAME) if rounds else None,
    }
