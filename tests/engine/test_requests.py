# SPDX-License-Identifier: Apache-2.0
"""What requests may ask, on the tiny model: answers are plain vLLM's, and nothing is kept of a request that is gone."""

from __future__ import annotations

import random
from typing import Any

import engine_process
import pytest
import scenarios
import tiny

RULES = ["draft", "root", "root_draw", "pearl"]
MAX_MODEL_LEN = 128
TOPK, DEPTH, BUDGET = 4, 3, 8
ENGINE = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16}

Settings = dict[str, Any]
Sequence = dict[str, Any]


def _prompts(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(2, 24) for _ in range(numbers.randint(2, longest))] for _ in range(count)]


def _speculative(pair: Any, rule: str, **more: Any) -> dict[str, Any]:
    return {"speculative_config": scenarios.target_rows(pair.drafter, BUDGET, rule, topk=TOPK, depth=DEPTH), **more}


def _answer(pair: Any, options: dict[str, Any], *batches: scenarios.Batch) -> dict[str, Any]:
    result: dict[str, Any] = engine_process.run(scenarios.answer, pair.target, {**ENGINE, **options}, batches)
    return result


def _nothing_kept(result: dict[str, Any]) -> None:
    (state,) = result["states"]
    assert state["requests"] == state["trees"] == state["carried"] == 0


# ------------------------------------------------------------------ greedy requests: answers equal to plain vLLM's

PROMPTS = _prompts(8, seed=1)
FREE: Settings = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}


def _cases(free: list[list[int]]) -> dict[str, tuple[list[int], Settings]]:
    """Requests by name; ``free`` are the tokens that the prompts get without any wish."""
    text = ["".join(tiny.TOKENS[token] for token in tokens) for tokens in free]
    cases: dict[str, tuple[list[int], Settings]] = {f"free {i}": (p, FREE) for i, p in enumerate(PROMPTS)}
    for i, prompt in enumerate(PROMPTS):
        cases |= {
            f"eos {i}": (prompt, {**FREE, "ignore_eos": False, "logit_bias": {tiny.END_OF_TEXT: 2.5}}),
            # Somewhere in the text, so that trees hold it at every depth.
            f"stop token {i}": (prompt, {**FREE, "stop_token_ids": [free[i][7 + 3 * i]]}),
            f"stop string {i}": (prompt, {**FREE, "stop": [text[i][6 + 3 * i : 9 + 3 * i]]}),
        }
    p = PROMPTS
    cases |= {
        "stop string kept": (p[0], {**FREE, "stop": [text[0][10:12]], "include_stop_str_in_output": True}),
        "presence": (p[0], {**FREE, "presence_penalty": 1.1}),
        "frequency": (p[1], {**FREE, "frequency_penalty": 0.7}),
        "repetition": (p[2], {**FREE, "repetition_penalty": 1.4}),
        "all penalties": (p[3], {**FREE, "presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2}),
        "logit bias": (p[4], {**FREE, "logit_bias": {3: 3.0, 11: 2.5, free[4][0]: -4.0}}),
        "bad words": (p[5], {**FREE, "bad_words": [text[5][2], text[5][4:6], text[5][8:11]]}),
        "allowed tokens": (p[6], {**FREE, "allowed_token_ids": [2, 3, 5, 8, 13, 17, 20]}),
        "min tokens": (p[0], {**FREE, "min_tokens": 25, "stop_token_ids": list(free[0][3:9])}),
        "min tokens and eos": (p[1], {**FREE, "ignore_eos": False, "min_tokens": 30, "logit_bias": {1: 3.0}}),
        "one token": (p[2], {**FREE, "max_tokens": 1}),
        "two tokens": (p[3], {**FREE, "max_tokens": 2}),
        "three tokens": (p[4], {**FREE, "max_tokens": 3}),
        "logprobs": (p[5], {**FREE, "logprobs": 3}),
        "logprob of the token alone": (p[5], {**FREE, "logprobs": 0}),
        "logprobs under penalties": (p[6], {**FREE, "logprobs": 4, "frequency_penalty": 0.6}),
        "prompt logprobs": (p[7], {**FREE, "logprobs": 2, "prompt_logprobs": 2}),
        "several of one prompt": (p[7], {**FREE, "n": 1, "temperature": 0.0}),
    }
    numbers = random.Random(5)
    for length in (MAX_MODEL_LEN - 1, MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 9, MAX_MODEL_LEN - 30):
        prompt = [numbers.randrange(2, 24) for _ in range(length)]
        cases[f"up to max_model_len, prompt {length}"] = (prompt, {**FREE, "max_tokens": 100})
    return cases


def _run_cases(pair: Any, options: dict[str, Any], cases: dict[str, tuple[list[int], Settings]]) -> dict[str, Any]:
    prompts, settings = zip(*cases.values(), strict=True)
    return _answer(pair, options, (prompts, settings))


@pytest.fixture(scope="module")
def cases(tiny_pair: Any) -> dict[str, tuple[list[int], Settings]]:
    result = _answer(tiny_pair, {}, (PROMPTS, FREE))
    return _cases([answer["sequences"][0]["tokens"] for answer in result["answers"][0]])


@pytest.fixture(scope="module")
def plain(tiny_pair: Any, cases: dict[str, tuple[list[int], Settings]]) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = _run_cases(tiny_pair, {}, cases)["answers"][0]
    by_name = dict(zip(cases, answers, strict=True))
    reasons = {name: answer["sequences"][0]["finish_reason"] for name, answer in by_name.items()}
    # The cases do what they are named for.
    assert all(reasons[f"stop token {i}"] == reasons[f"stop string {i}"] == "stop" for i in range(len(PROMPTS)))
    assert "stop" in {reasons[f"eos {i}"] for i in range(len(PROMPTS))}
    assert len(by_name["min tokens and eos"]["sequences"][0]["tokens"]) >= 30
    for name, like in {
        "presence": 0, "frequency": 1, "repetition": 2, "all penalties": 3, "logit bias": 4, "bad words": 5,
        "allowed tokens": 6,
    }.items():  # fmt: skip
        assert by_name[name]["sequences"][0]["tokens"] != by_name[f"free {like}"]["sequences"][0]["tokens"], name
    return answers


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        *((rule, {}) for rule in RULES),
        ("root_draw", {"enable_prefix_caching": False}),
        ("draft", {"max_num_batched_tokens": 256, "max_num_seqs": 8}),
        ("root", {"max_num_seqs": 1}),
    ],
    ids=[*RULES, "no prefix caching", "chunked prefill", "one at a time"],
)
def test_greedy_answers_are_plain_vllms(
    tiny_pair: Any,
    cases: dict[str, tuple[list[int], Settings]],
    plain: list[dict[str, Any]],
    rule: str,
    options: dict[str, Any],
) -> None:
    result = _run_cases(tiny_pair, _speculative(tiny_pair, rule, **options), cases)
    for name, answer, want in zip(cases, result["answers"][0], plain, strict=True):
        _same(name, answer, want)
    _nothing_kept(result)
    (state,) = result["states"]
    assert state["rounds"] > 100
    assert rule in ("root_draw", "pearl") or state["accepted_tokens"] > 100


def _same(name: str, answer: dict[str, Any], want: dict[str, Any]) -> None:
    assert len(answer["sequences"]) == len(want["sequences"]), name
    for ours, theirs in zip(answer["sequences"], want["sequences"], strict=True):
        for field in ("tokens", "text", "finish_reason", "stop_reason"):
            assert ours[field] == theirs[field], (name, field)
        _close(name, ours["logprobs"], theirs["logprobs"])
    _close(name, answer["prompt_logprobs"], want["prompt_logprobs"])


def _close(name: str, ours: Any, theirs: Any) -> None:
    """The same tokens with the same ranks at every position, log-probabilities within 1e-4."""
    if theirs is None:
        assert ours is None, name
        return
    assert len(ours) == len(theirs), name
    for position, (got, want) in enumerate(zip(ours, theirs, strict=True)):
        assert got.keys() == want.keys(), (name, position)
        for token in want:
            assert got[token][0] == pytest.approx(want[token][0], abs=1e-4), (name, position, token)
            assert got[token][1] == want[token][1], (name, position, token)


# ------------------------------------------------------------------ sampled requests

SAMPLED: list[Settings] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 4},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 6, "min_p": 0.05, "frequency_penalty": 0.5},
    {"temperature": 1.0, "allowed_token_ids": [4, 5, 6, 7, 9, 12]},
    {"temperature": 1.0, "logit_bias": {3: 2.0, 9: -5.0}},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", RULES)
def test_sampled_requests(
    tiny_pair: Any, cases: dict[str, tuple[list[int], Settings]], plain: list[dict[str, Any]], rule: str
) -> None:
    common = {"max_tokens": 40, "ignore_eos": True, "logprobs": 0}
    unseeded = [{**settings, **common} for settings in SAMPLED]
    seeded = [{**settings, **common, "seed": i} for i, settings in enumerate(unseeded)]
    several = {"temperature": 1.0, "seed": 3, "n": 4, **common}
    mixed = [s if i % 2 else {**FREE, "logprobs": 0} for i, s in enumerate(seeded)]
    result = _answer(
        tiny_pair,
        _speculative(tiny_pair, rule),
        (PROMPTS, seeded),
        (PROMPTS, seeded),
        (PROMPTS, unseeded),
        (PROMPTS[:2], several),
        (PROMPTS, mixed),
    )
    first, second, free, many, beside_greedy = result["answers"]
    _nothing_kept(result)

    tokens = [[sequence["tokens"] for sequence in answer["sequences"]] for answer in first]
    assert tokens == [[sequence["tokens"] for sequence in answer["sequences"]] for answer in second]
    assert all(len({tuple(sequence["tokens"]) for sequence in answer["sequences"]}) == 4 for answer in many)
    assert set(first[5]["sequences"][0]["tokens"]) <= {4, 5, 6, 7, 9, 12}

    # A token's log-probability is the one that plain vLLM gives it at the same place in the same text.
    answers = [
        *zip(PROMPTS, first, strict=True),
        *zip(PROMPTS, free, strict=True),
        *zip(PROMPTS[:2], many, strict=True),
    ]
    answers += zip(PROMPTS, beside_greedy, strict=True)
    texts = [(prompt, sequence) for prompt, answer in answers for sequence in answer["sequences"]]
    whole = [[*prompt, *sequence["tokens"]] for prompt, sequence in texts]
    scored = _answer(tiny_pair, {}, (whole, {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}))["answers"][0]
    for (prompt, sequence), want in zip(texts, scored, strict=True):
        for i, token in enumerate(sequence["tokens"]):
            place = (len(prompt), i, token)
            assert sequence["logprobs"][i][token] == pytest.approx(
                want["prompt_logprobs"][len(prompt) + i][token], abs=1e-4
            ), place
    for i in range(0, len(PROMPTS), 2):
        assert (
            beside_greedy[i]["sequences"][0]["tokens"]
            == plain[list(cases).index(f"free {i}")]["sequences"][0]["tokens"]
        )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", ["draft", "root_draw"])
def test_seeded_requests_with_prompts_in_chunks(tiny_pair: Any, rule: str) -> None:
    """They end plain vLLM's engine on the CPU; see ``TreeRounds._bookkeeping_sync``."""
    prompts = [[(7 * i + j) % 24 for j in range(100)] for i in range(6)]
    settings = [{"temperature": 1.0, "seed": i, "max_tokens": 20, "ignore_eos": True} for i in range(6)]
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_prefix_caching": False}
    result = _answer(tiny_pair, _speculative(tiny_pair, rule, **options), (prompts, settings), (prompts, settings))
    first, second = result["answers"]
    assert all(len(answer["sequences"][0]["tokens"]) == 20 for answer in first)
    assert [a["sequences"] for a in first] == [a["sequences"] for a in second]
    _nothing_kept(result)


@pytest.mark.timeout(600)
def test_bfloat16_rows_are_plain_vllms_up_to_rounding(tiny_pair: Any) -> None:
    common = {"max_tokens": 40, "ignore_eos": True, "logprobs": 0, "temperature": 1.0}
    options = _speculative(tiny_pair, "root_draw", dtype="bfloat16")
    answers = _answer(tiny_pair, options, (PROMPTS, common))["answers"][0]
    texts = [[*prompt, *answer["sequences"][0]["tokens"]] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    ask = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
    scored = _answer(tiny_pair, {"dtype": "bfloat16"}, (texts, ask))["answers"][0]
    errors = [
        abs(answer["sequences"][0]["logprobs"][i][token][0] - want["prompt_logprobs"][len(prompt) + i][token][0])
        for prompt, answer, want in zip(PROMPTS, answers, scored, strict=True)
        for i, token in enumerate(answer["sequences"][0]["tokens"])
    ]
    assert sum(errors) / len(errors) < 0.05  # rows of other prefixes differ by about 1


# ------------------------------------------------------------------ structured output


@pytest.fixture(scope="module")
def structured_case(tiny_pair: Any) -> tuple[list[list[int]], list[Settings], list[dict[str, Any]]]:
    """Prompts, settings and plain vLLM's answers."""
    from vllm.sampling_params import StructuredOutputsParams

    prompts = PROMPTS[:4]
    settings = [
        {**FREE, "ignore_eos": False, "structured_outputs": StructuredOutputsParams(regex="[abc]{5}0{3}")},
        {**FREE, "ignore_eos": False, "structured_outputs": StructuredOutputsParams(choice=["abcabc", "fedfed"])},
        FREE,
        {**FREE, "max_tokens": 12},
    ]
    return prompts, settings, _answer(tiny_pair, {}, (prompts, settings))["answers"][0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", RULES)
def test_structured_output_decodes_without_a_tree_in_the_same_batch(
    tiny_pair: Any, structured_case: tuple[list[list[int]], list[Settings], list[dict[str, Any]]], rule: str
) -> None:
    prompts, settings, plain = structured_case
    result = _answer(tiny_pair, _speculative(tiny_pair, rule), (prompts, settings))
    for name, (ours, theirs) in enumerate(zip(result["answers"][0], plain, strict=True)):
        _same(str(name), ours, theirs)
    (state,) = result["states"]
    assert state["no_tree"]["structured_output"] > 5
    assert state["rounds"] > 2  # the other two requests
    _nothing_kept(result)


# ------------------------------------------------------------------ streams, aborts, preemption

STREAMED = _prompts(24, seed=9)
LONG = _prompts(16, seed=4, longest=30)
LONG_SETTINGS = [
    {**FREE, "max_tokens": 80} if i % 4 else {**FREE, "max_tokens": 80, "frequency_penalty": 0.5} for i in range(16)
]


@pytest.fixture(scope="module")
def undisturbed(tiny_pair: Any) -> list[list[dict[str, Any]]]:
    """Plain vLLM's answers to ``STREAMED`` and to ``LONG``."""
    answers: list[list[dict[str, Any]]] = _answer(tiny_pair, {}, (STREAMED, FREE), (LONG, LONG_SETTINGS))["answers"]
    return answers


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", RULES)
def test_streams_and_aborts(tiny_pair: Any, undisturbed: list[list[dict[str, Any]]], rule: str) -> None:
    options = {**ENGINE, **_speculative(tiny_pair, rule)}
    result = engine_process.run(scenarios.stream_and_abort, tiny_pair.target, options, STREAMED, FREE, 5)
    assert result["finished"] == list(range(1, 24, 2))
    for i, pieces in enumerate(result["pieces"]):
        tokens = [token for piece in pieces for token in piece]
        whole = undisturbed[0][i]["sequences"][0]["tokens"]
        assert tokens == (whole if i % 2 else whole[: len(tokens)])
    assert any(0 < sum(map(len, pieces)) < 40 for pieces in result["pieces"][::2])  # aborted mid-sequence
    assert result["usage"] == 0
    _nothing_kept(result)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", RULES)
def test_preempted_requests_write_the_same(tiny_pair: Any, undisturbed: list[list[dict[str, Any]]], rule: str) -> None:
    options = _speculative(tiny_pair, rule, num_gpu_blocks_override=24)
    result = _answer(tiny_pair, options, (LONG, LONG_SETTINGS))
    assert result["preemptions"] > 0
    for name, (ours, theirs) in enumerate(zip(result["answers"][0], undisturbed[1], strict=True)):
        _same(str(name), ours, theirs)
    _nothing_kept(result)
