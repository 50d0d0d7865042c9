# SPDX-License-Identifier: Apache-2.0
"""Scored frontiers, stopping rules and covered root rows in whole engines.

The coverage figures are the exact oracles of ``tests/algorithms/test_coverage.py``, here by drawing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_process
import pytest
import scenarios
import tiny

A, B = tiny.FORCED
PROMPTS = [[A, B][: 1 + i % 2] * (1 + i // 2) for i in range(16)]
SAMPLED = {"temperature": 1.0, "max_tokens": 400, "ignore_eos": True}
SIX = [[(7 * i + j) % 24 for j in range(3 + 5 * i)] for i in range(6)]
WATCHED = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True, "logprobs": 2}
Forced = Callable[[float, float], tuple[Path, Path]]


@pytest.fixture(scope="module")
def forced(tmp_path_factory: pytest.TempPathFactory) -> Forced:
    """``tiny.make_forced_pair`` in a folder of its own."""
    return lambda first, below: tiny.make_forced_pair(tmp_path_factory.mktemp("forced"), first, below)


def _drawn(pair: tuple[Path, Path], budget: int, depth: int, **more: Any) -> dict[str, Any]:
    target, drafter = pair
    config = scenarios.target_rows(drafter, budget, more.pop("rule", "draft"), topk=2, depth=depth, **more)
    result: dict[str, Any] = engine_process.run(
        scenarios.answer, target, {"speculative_config": config}, [(PROMPTS, SAMPLED)]
    )
    written = {token for each in result["answers"][0] for token in each["sequences"][0]["tokens"]}
    assert written == {A, B}
    return result


def _mean_within_error(total: float, rounds: int, mean: float, most: float) -> None:
    """``total`` of ``rounds`` numbers from 0 to ``most`` is what ``mean`` lets expect, to five standard errors."""
    error = math.sqrt(mean * (most - mean) / rounds) if 0 < mean < most else 0.0
    assert total / rounds == pytest.approx(mean, abs=5 * error + 1e-9)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stopping", "coverage", "accepted"),
    [("exhaustive", 0, 2), ("cap:1", 3 / 4, 1), ("sampled_leaf", 3 / 4, 5 / 4), ("cap:2", 1 / 4, 7 / 4)],
)
def test_stopping_rules_on_the_uniform_target(forced: Forced, stopping: str, coverage: float, accepted: float) -> None:
    """Oracle 1: the tree {a, b, aa, ab, ba, aaa, aab}."""
    found = _drawn(forced(0.75, 0.68), 7, 3, stopping=stopping)["metrics"]
    rounds = found["rounds"][""]
    assert rounds > 1500
    assert found["tree_nodes"][""][:2] == (rounds, 7 * rounds)
    _mean_within_error(found["coverage"]["address"], rounds, coverage, 1)
    _mean_within_error(found["accepted_tokens"][""][1], rounds, accepted, 3)
    # What the rows let expect is the same in every round but those that vLLM's scheduler cut short.
    assert found["expected_accepted_tokens"][""][1] / rounds == pytest.approx(accepted, abs=0.02)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("frontier", "coverage"), [(0, 0), (1, 1 / 2)])
def test_a_scored_frontier_on_the_uniform_target(forced: Forced, frontier: int, coverage: float) -> None:
    """Oracle 2: the tree {a, aa, ab} with the frontier {b}."""
    found = _drawn(forced(0.9, 0.6), 3, 2, frontier=frontier)["metrics"]
    rounds = found["rounds"][""]
    assert found["tree_nodes"][""][1] == 3 * rounds
    _mean_within_error(found["coverage"]["address"], rounds, coverage, 1)
    _mean_within_error(found["accepted_tokens"][""][1], rounds, 1, 2)


@pytest.mark.timeout(300)
def test_adding_the_frontier_to_the_tree_accepts_one_more_token_on_the_covered_rounds(forced: Forced) -> None:
    found = _drawn(forced(0.6, 0.6), 4, 2)["metrics"]  # {a, b, aa} and one of {ab, ba}
    rounds = found["rounds"][""]
    _mean_within_error(found["accepted_tokens"][""][1], rounds, 3 / 2, 2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", ["root", "root_draw", "pearl"])
def test_covered_rounds_have_a_root_row_and_the_others_none(forced: Forced, rule: str) -> None:
    """A drawn token is one more token of a covered round; no round has a root pass."""
    result = _drawn(forced(0.65, 0.65), 7, 3, rule=rule, stopping="cap:1", root_row="covered")
    (state,) = result["states"]
    assert state["forward_seconds"]["root_pass"] == 0
    drawn = state["emitted_tokens"] - state["accepted_tokens"] - state["rounds"] - sum(state["no_tree"].values())
    if rule == "root":
        assert drawn == 0
        assert result["metrics"]["coverage"]["address"] > state["rounds"] / 2
    else:
        assert drawn > state["rounds"] / 4
    assert state["requests"] == state["trees"] == state["carried"] == state["retained"] == 0


COVERED = [
    ("root", {"frontier": 8, "root_row": "covered"}),
    ("root_draw", {"frontier": 8, "root_row": "covered"}),
    ("pearl", {"frontier": 3, "stopping": "cap:1", "root_row": "covered"}),
    ("root_draw", {"stopping": "sampled_leaf", "root_row": "covered"}),
    ("draft", {"frontier": 40, "stopping": "cap:2"}),
    ("root_draw", {"frontier": 5}),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("rule", "more"), COVERED)
def test_logprobs_are_those_of_the_rows_that_drew(tiny_pair: Any, rule: str, more: dict[str, Any]) -> None:
    """Every emitted token's logprob is plain vLLM's at the same prefix, drawn and covered ones included."""
    options = {"speculative_config": scenarios.target_rows(tiny_pair.drafter, 6, rule, depth=4, **more)}
    result = engine_process.run(scenarios.answer, tiny_pair.target, options, [(SIX, WATCHED)])
    answers = [each["sequences"][0] for each in result["answers"][0]]
    assert result["states"][0]["rounds"] > 40
    prefixes = [[*prompt, *each["tokens"][:n]] for prompt, each in zip(SIX, answers, strict=True) for n in range(60)]
    rows = engine_process.run(scenarios.rows_at, tiny_pair.target, prefixes)
    logprobs = [(token, each["logprobs"][n][token][0]) for each in answers for n, token in enumerate(each["tokens"])]
    for (token, logprob), row in zip(logprobs, rows, strict=True):
        assert logprob == pytest.approx(row[token], abs=2e-4)
