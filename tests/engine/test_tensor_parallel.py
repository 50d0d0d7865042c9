# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel workers take the same decisions, and write what one worker writes."""

from __future__ import annotations

from typing import Any

import engine_process
import pytest
import scenarios

PROMPTS = [[2, 9, 4, 13, 5, 6], [7], [(5 * i) % 24 for i in range(45)], [3, 3, 8, 20]]
GREEDY = {"temperature": 0.0, "max_tokens": 48}
SEEDED = {"temperature": 1.0, "top_p": 0.9, "seed": 11, "max_tokens": 48, "ignore_eos": True}
UNSEEDED = {"temperature": 1.0, "max_tokens": 48, "ignore_eos": True, "logprobs": 0}
BATCHES: list[scenarios.Batch] = [(PROMPTS, GREEDY), (PROMPTS, SEEDED), (PROMPTS, SEEDED), (PROMPTS, UNSEEDED)]
TWO_WORKERS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
ONE_CORE_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def _answer(pair: Any, options: dict[str, Any], batches: list[scenarios.Batch], **environment: str) -> dict[str, Any]:
    options = {"max_num_seqs": 4, **options}
    return engine_process.run(  # type: ignore[no-any-return]
        scenarios.answer, pair.target, options, batches, timeout=500, environment=environment
    )


def _tokens(batch: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["sequences"][0]["tokens"] for answer in batch]


@pytest.fixture(scope="module")
def plain(tiny_pair: Any) -> list[list[int]]:
    return _tokens(_answer(tiny_pair, {}, BATCHES[:1])["answers"][0])


@pytest.mark.timeout(600)
def test_plain_vllm_with_two_workers_is_the_reference(tiny_pair: Any, plain: list[list[int]]) -> None:
    assert _tokens(_answer(tiny_pair, TWO_WORKERS, BATCHES[:1], **ONE_CORE_EACH)["answers"][0]) == plain


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rule", ["draft", "root_draw"])
def test_two_workers_write_what_one_writes(tiny_pair: Any, plain: list[list[int]], rule: str) -> None:
    options = {**TWO_WORKERS, "speculative_config": scenarios.target_rows(tiny_pair.drafter, 8, rule)}
    result = _answer(tiny_pair, options, BATCHES, **ONE_CORE_EACH)
    greedy, seeded, seeded_again, unseeded = result["answers"]
    assert _tokens(greedy) == plain
    assert _tokens(seeded) == _tokens(seeded_again)

    first, second = ({k: v for k, v in state.items() if not k.endswith("_seconds")} for state in result["states"])
    assert first == second
    assert first["rounds"] > 0
    assert result["metrics"]["rounds"] == {"": first["rounds"]}  # counted once
    assert first["requests"] == first["trees"] == first["carried"] == 0

    # A worker that had drawn other tokens than its neighbour would have filled its half of the KV cache with them.  The
    # log-probabilities would then not be those that one plain worker gives the same text.
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, _tokens(unseeded), strict=True)]
    scored = _answer(tiny_pair, {}, [(texts, {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0})])["answers"][
        0
    ]
    for prompt, answer, want in zip(PROMPTS, unseeded, scored, strict=True):
        sequence = answer["sequences"][0]
        for i, token in enumerate(sequence["tokens"]):
            assert sequence["logprobs"][i][token] == pytest.approx(
                want["prompt_logprobs"][len(prompt) + i][token], abs=1e-4
            )
