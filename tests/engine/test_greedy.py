# SPDX-License-Identifier: Apache-2.0
"""Greedy float32 output: token for token plain vLLM's, for every rule and budget.

``benchmarks/exactness.py`` is the full version, on 40 prompts of Spec-Bench.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import engine_process
import pytest
import scenarios

RULES = ["draft", "root", "root_draw", "pearl"]
GREEDY = {"temperature": 0.0, "max_tokens": 64}


def _prompts() -> list[list[int]]:
    """Prompts of 1 to 90 tokens; the last eight share their first 70."""
    numbers = random.Random(0)
    lengths = [1, 2, 31, 32, 33, 64, 65, 90] + [numbers.randint(1, 90) for _ in range(8)]
    prompts = [[numbers.randrange(24) for _ in range(length)] for length in lengths]
    shared = [numbers.randrange(24) for _ in range(70)]
    return prompts + [shared + [numbers.randrange(24) for _ in range(n)] for n in range(1, 9)]


PROMPTS = _prompts()
BATCHES: list[scenarios.Batch] = [
    (PROMPTS, GREEDY),  # all at once, eight at a time
    (PROMPTS, GREEDY),  # again, with the prompts in the prefix cache
    *(([prompt], GREEDY) for prompt in PROMPTS[3:6]),  # alone
]


def _tokens(result: dict[str, Any]) -> list[list[list[int]]]:
    return [[answer["sequences"][0]["tokens"] for answer in batch] for batch in result["answers"]]


@pytest.fixture(scope="module")
def plain_tokens(tiny_pair: Any) -> list[list[list[int]]]:
    tokens = _tokens(engine_process.run(scenarios.answer, tiny_pair.target, {"max_num_seqs": 8}, BATCHES))
    assert tokens[0] == tokens[1]
    return tokens


@pytest.mark.timeout(900)
@pytest.mark.parametrize("budget", [1, 8, 59])
def test_tiny_model_writes_what_plain_vllm_writes(
    tiny_pair: Any, plain_tokens: list[list[list[int]]], budget: int
) -> None:
    wide = budget > 8

    def run(rule: str) -> dict[str, Any]:
        pool = {"topk": 6, "depth": 6} if wide else {"topk": 3, "depth": 3}
        options = {
            "speculative_config": scenarios.target_rows(tiny_pair.drafter, budget, rule, **pool),
            "max_num_seqs": 8,
            # Prompts are prefilled in chunks beside the trees of the requests that came first.
            "max_num_batched_tokens": 8 * (budget + 1) + 24,
        }
        result: dict[str, Any] = engine_process.run(scenarios.answer, tiny_pair.target, options, BATCHES, timeout=800)
        return result

    with ThreadPoolExecutor(2) as pool:  # each engine has one core
        results = dict(zip(RULES, pool.map(run, RULES), strict=True))
    for rule, result in results.items():
        assert _tokens(result) == plain_tokens, rule
        (state,) = result["states"]
        assert result["cached"] > 0
        assert state["requests"] == state["trees"] == state["carried"] == 0
        if rule == "draft":
            assert state["accepted_tokens"] > 0
        else:  # under the drawing rules the drawn token comes on top
            assert state["emitted_tokens"] > state["rounds"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rule", "least"),
    [
        ("draft", {"tree_min_probability": 0.25}),
        ("root_draw", {"tree_min_probability": 0.1}),
        ("draft", {"tree_grow_probability": 0.8}),
        ("root_draw", {"tree_grow_probability": 0.8}),
    ],
)
def test_improbable_nodes_are_left_out(
    tiny_pair: Any, plain_tokens: list[list[list[int]]], rule: str, least: dict[str, float]
) -> None:
    def run(least: dict[str, float]) -> dict[str, Any]:
        options: dict[str, Any] = {"topk": 3, "depth": 6, **least}
        speculative = scenarios.target_rows(tiny_pair.drafter, 12, rule, **options)
        options = {"speculative_config": speculative, "max_num_seqs": 8}
        result: dict[str, Any] = engine_process.run(scenarios.answer, tiny_pair.target, options, BATCHES, timeout=800)
        return result

    with ThreadPoolExecutor(2) as pool:
        everything, probable = pool.map(run, ({}, least))
    assert _tokens(everything) == _tokens(probable) == plain_tokens
    (all_nodes,), (few_nodes,) = everything["states"], probable["states"]
    assert 0 < few_nodes["tree_nodes"] < all_nodes["tree_nodes"] * 0.8
    assert "improbable" not in all_nodes["no_tree"]
    # A level that is not grown takes nothing from the levels above it.
    assert ("improbable" in few_nodes["no_tree"]) is (rule == "draft" and "tree_min_probability" in least)
    assert few_nodes["requests"] == few_nodes["trees"] == few_nodes["carried"] == 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rule", "more"),
    [
        ("draft", {"frontier": 6}),
        ("draft", {"stopping": "sampled_leaf"}),
        ("root", {"frontier": 12, "root_row": "covered"}),
        ("root_draw", {"frontier": 12, "root_row": "covered"}),
        ("root_draw", {"stopping": "cap:1", "root_row": "covered"}),
        ("pearl", {"frontier": 6, "stopping": "cap:2", "root_row": "covered"}),
    ],
)
def test_frontiers_and_stopping_rules_change_no_token(
    tiny_pair: Any, plain_tokens: list[list[list[int]]], rule: str, more: dict[str, Any]
) -> None:
    speculative = scenarios.target_rows(tiny_pair.drafter, 8, rule, topk=4, depth=4, **more)
    options = {"speculative_config": speculative, "max_num_seqs": 8}
    result = engine_process.run(scenarios.answer, tiny_pair.target, options, BATCHES, timeout=800)
    assert _tokens(result) == plain_tokens
    (state,) = result["states"]
    assert state["accepted_tokens"] > 0
    assert state["requests"] == state["trees"] == state["carried"] == 0
    if "root_row" in more:
        assert result["metrics"]["coverage"]["address"] > 0
        assert state["forward_seconds"]["root_pass"] == 0


@pytest.mark.timeout(900)
def test_the_compiled_mode_writes_and_accepts_the_same(tiny_pair: Any, plain_tokens: list[list[list[int]]]) -> None:
    """vLLM's compiled graphs trust the layout of their inputs: a drafter that is misread accepts less, in silence."""

    def run(eager: bool) -> dict[str, Any]:
        options = {
            "speculative_config": scenarios.target_rows(tiny_pair.drafter, 4, "root_draw"),
            "max_num_seqs": 8,
            "enforce_eager": eager,
        }
        batches = [*BATCHES[:1], *BATCHES[2:]]  # eight at a time, and alone
        result: dict[str, Any] = engine_process.run(scenarios.answer, tiny_pair.target, options, batches, timeout=800)
        return result

    compiled, eager = run(False), run(True)
    assert _tokens(compiled) == _tokens(eager) == [*plain_tokens[:1], *plain_tokens[2:]]
    counted = ("rounds", "emitted_tokens", "accepted_tokens", "tree_nodes", "absent")
    assert [compiled["states"][0][name] for name in counted] == [eager["states"][0][name] for name in counted]


@pytest.fixture(scope="module")
def chat_prompts(shared_folder: Path, target_folder: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    first_of: dict[str, str] = {}
    for line in (shared_folder / "data" / "spec_bench.jsonl").read_text().splitlines():
        question = json.loads(line)
        first_of.setdefault(question["category"], question["turns"][0])
    texts = [first_of[category] for category in ("writing", "coding", "math_reasoning", "translation")]
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True, return_dict=False)
        for t in texts
    ]


@pytest.fixture(scope="module")
def chat_answers(target_folder: Path, chat_prompts: list[list[int]]) -> list[list[list[int]]]:
    return _chat(target_folder, chat_prompts, {})


def _chat(target: Path, prompts: list[list[int]], options: dict[str, Any]) -> list[list[list[int]]]:
    result = engine_process.run(
        scenarios.answer,
        target,
        {"max_num_seqs": 4, "max_model_len": 1024, **options},
        [(prompts, {"temperature": 0.0, "max_tokens": 48})],
        timeout=500,
        environment=engine_process.ALL_CORES,
    )
    return _tokens(result)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("rule", "budget"), [("draft", 8), ("root", 8), ("root_draw", 59), ("pearl", 8)])
def test_smollm2_writes_what_plain_vllm_writes(
    target_folder: Path,
    drafter_folder: Path,
    chat_prompts: list[list[int]],
    chat_answers: list[list[list[int]]],
    rule: str,
    budget: int,
) -> None:
    speculative = scenarios.target_rows(drafter_folder, budget, rule, topk=6, depth=4)
    assert _chat(target_folder, chat_prompts, {"speculative_config": speculative}) == chat_answers
