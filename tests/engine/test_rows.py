# SPDX-License-Identifier: Apache-2.0
"""Rows against vLLM's plain ``Sampler``, run row by row on one request whose output ends with the row's path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    LogitsProcessors,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_targetrows.engine.rows import (
    NUCLEUS_WIDTHS,
    _truncated_softmax,
    enable_builtin_processors,
    logprobs_for,
    needs_paths,
    target_rows,
    uniforms,
)

V = 50
CONFIG: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
THINK_START, THINK_END = [7, 8], [9, 10]
MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
CPU = torch.device("cpu")
# Few distinct tokens, so that repetitions, bad words and thinking marks do occur.
TOKEN = st.sampled_from([1, 2, 3, *THINK_START, *THINK_END])


# ---------------------------------------------------------------------- batches as the runner has them


def make_batch(requests: list[tuple[SamplingParams, list[int], list[int]]], spec_tokens: int = 0) -> InputBatch:
    """An input batch of (parameters, prompt, output) with all builtin processors, refreshed as before a step."""
    batch = InputBatch(
        max_num_reqs=8,
        max_model_len=64,
        max_num_batched_tokens=64,
        device=CPU,
        vocab_size=V,
        block_sizes=[16],
        max_num_blocks_per_req=[4],
        num_spec_tokens=spec_tokens,
        logitsprocs=LogitsProcessors(build(CONFIG, CPU, False) for build in BUILTIN_LOGITS_PROCESSORS),
        reasoning_config=SimpleNamespace(reasoning_start_token_ids=THINK_START, reasoning_end_token_ids=THINK_END),
    )
    for i, (params, prompt, output) in enumerate(requests):
        batch.add_request(
            CachedRequestState(
                req_id=str(i),
                prompt_token_ids=prompt,
                mm_features=[],
                sampling_params=params,
                generator=None,
                block_ids=([],),
                num_computed_tokens=0,
                output_token_ids=output,
            )
        )
    batch.refresh_metadata()
    return batch


def plain(
    params: SamplingParams, prompt: list[int], output: list[int], logits: torch.Tensor, mode: str = "processed_logits"
) -> tuple[int, torch.Tensor]:
    """The plain sampler's token and its whole row of scores (in ``mode``) at prompt + output.

    The sampler is stepped at every output length: the thinking budget depends on having seen each.
    """
    growing: list[int] = []
    batch = make_batch([(params, prompt, growing)])
    batch.sampling_metadata.max_num_logprobs, batch.sampling_metadata.logprob_token_ids = -1, None
    sampler = Sampler(mode)
    if params.thinking_token_budget is not None:
        for token in output:
            batch.refresh_metadata()
            sampler(torch.zeros(1, V), batch.sampling_metadata)
            growing.append(token)
    else:
        growing.extend(output)
    batch.refresh_metadata()
    result = sampler(logits[None].clone(), batch.sampling_metadata)
    return int(result.sampled_token_ids), result.logprobs_tensors.logprobs[0]


def tokens(length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(TOKEN, min_size=length, max_size=length)


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    def sometimes(strategy: st.SearchStrategy[Any], otherwise: Any) -> Any:
        return draw(strategy) if draw(st.integers(0, 2)) == 0 else otherwise

    greedy = draw(st.booleans())
    params = SamplingParams(
        temperature=0.0 if greedy else draw(st.sampled_from([0.3, 1.0, 1.7])),
        top_k=sometimes(st.integers(1, V), 0),
        top_p=sometimes(st.sampled_from([0.1, 0.6, 0.95]), 1.0),
        min_p=sometimes(st.sampled_from([0.05, 0.5]), 0.0),
        repetition_penalty=sometimes(st.sampled_from([0.7, 1.4]), 1.0),
        frequency_penalty=sometimes(st.sampled_from([-0.8, 1.1]), 0.0),
        presence_penalty=sometimes(st.sampled_from([-0.8, 1.1]), 0.0),
        logit_bias=sometimes(st.dictionaries(st.integers(0, V - 1), st.floats(-5, 5), max_size=4), None),
        allowed_token_ids=sometimes(st.lists(st.integers(0, V - 1), min_size=3, max_size=30, unique=True), None),
        min_tokens=sometimes(st.integers(1, 8), 0),
        stop_token_ids=draw(st.lists(st.integers(0, V - 1), max_size=15)),
        thinking_token_budget=sometimes(st.integers(0, 5), None),
    )
    words = sometimes(st.lists(st.lists(TOKEN, min_size=1, max_size=3), max_size=6), None)
    params._bad_words_token_ids = words
    return params


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[SamplingParams, list[int], list[int], list[list[int]]]]:
    """Up to four requests: parameters, prompt, recorded output, and the paths of a random preorder tree."""
    drawn = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.integers(1, 6).flatmap(tokens))
        output = draw(st.integers(0, 6).flatmap(tokens))
        paths: list[list[int]] = [[]]
        for _ in range(draw(st.integers(0, 5))):
            # A preorder: the next node's parent is the last node or one of its ancestors.
            depth = draw(st.integers(0, len(paths[-1])))
            paths.append([*paths[-1][:depth], draw(TOKEN)])
        drawn.append((draw(parameters()), prompt, output, paths))
    return drawn


def flat(batch: list[tuple[Any, ...]]) -> tuple[torch.Tensor, list[list[int]]]:
    """The batch index and the path of every row."""
    request = torch.tensor([i for i, (_, _, _, paths) in enumerate(batch) for _ in paths])
    return request, [path for _, _, _, paths in batch for path in paths]


@settings(max_examples=150)
@given(drawn=requests(), seed=st.integers(0, 2**20))
def test_every_row_is_the_plain_samplers(drawn: Any, seed: int) -> None:
    logits = 2 * torch.randn(sum(len(paths) for *_, paths in drawn), V, generator=torch.Generator().manual_seed(seed))
    request, paths = flat(drawn)
    metadata = make_batch([(p, prompt, list(output)) for p, prompt, output, _ in drawn], 8).sampling_metadata
    rows = target_rows(logits.clone(), request, metadata, paths)

    cold = [params.temperature == 0 for params, *_ in drawn]
    assert (rows.argmax is not None) == any(cold)
    assert (rows.probs is not None) == (not all(cold))
    if any(cold) and not all(cold):
        assert rows.greedy is not None and rows.greedy.tolist() == cold
    for row, (r, path) in enumerate(zip(request.tolist(), paths, strict=True)):
        params, prompt, output, _ = drawn[r]
        token, scores = plain(params, prompt, [*output, *path], logits[row])
        if cold[r]:
            assert rows.argmax is not None and int(rows.argmax[row]) == token
        else:
            assert rows.probs is not None
            if scores.isneginf().all():  # nothing is allowed: plain sampling emits token 0
                assert token == 0
                scores[0] = 0
            torch.testing.assert_close(rows.probs[row], scores.softmax(-1), rtol=0, atol=1e-6)


def test_bad_words_end_on_the_path() -> None:
    params = SamplingParams(temperature=0.0)
    params._bad_words_token_ids = [[1, 2, 3], [20]]
    logits = torch.arange(V, 0, -1.0).repeat(5, 1)
    logits[:, 3], logits[:, 20] = 90.0, 80.0
    paths = [[], [2], [4], [1, 2], [2, 2]]
    metadata = make_batch([(params, [2], [5, 1])]).sampling_metadata
    rows = target_rows(logits, torch.zeros(5, dtype=torch.int64), metadata, paths)
    assert rows.argmax is not None and rows.argmax.tolist() == [3, 0, 3, 0, 3]


def test_nucleus_of_a_large_vocabulary() -> None:
    """Rows whose nucleus lies within each of the widths, and beyond all of them."""
    scale = torch.tensor([8.0, 3.0, 2.5, 0.5, 0.1, 3.0, 1.0])
    generator = torch.Generator().manual_seed(3)
    place = torch.stack([torch.randperm(9000, generator=generator) for _ in scale])
    logits = scale[:, None] * torch.special.ndtri((place + 0.5) / 9000)  # normal, and no two are equal
    p = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.9, 1.0, 0.001])
    k = torch.tensor([9000, 40, 9000, 9000, 3000, 9000, 9000], dtype=torch.int32)
    expected = apply_top_k_top_p_pytorch(logits.clone(), k, p).softmax(-1)
    kept = (expected > 0).sum(-1)
    assert kept[0] < NUCLEUS_WIDTHS[0] < kept[2] < NUCLEUS_WIDTHS[1] < kept[3]
    torch.testing.assert_close(_truncated_softmax(logits.clone(), k, p), expected, rtol=0, atol=1e-6)
    expected = apply_top_k_top_p_pytorch(logits.clone(), None, p).softmax(-1)
    torch.testing.assert_close(_truncated_softmax(logits.clone(), None, p), expected, rtol=0, atol=1e-6)


def test_rows_where_nothing_is_allowed() -> None:
    """Plain sampling emits token 0."""
    logits = torch.randn(2, V)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, allowed_token_ids=[3, 4], stop_token_ids=[3, 4], min_tokens=2)
        metadata = make_batch([(params, [1], [])]).sampling_metadata
        rows = target_rows(logits.clone(), torch.zeros(2, dtype=torch.int64), metadata, [[], [5, 6]])
        token, _ = plain(params, [1], [], logits[0])
        assert token == 0
        if rows.argmax is not None:
            assert int(rows.argmax[0]) == 0
        else:
            assert rows.probs is not None and rows.probs[0].tolist() == [1.0] + [0.0] * (V - 1)
            assert set(rows.probs[1].nonzero()[:, 0].tolist()) == {3, 4}


def test_structured_output_may_stop_before_min_tokens() -> None:
    """A grammar that leaves only stop tokens is not overruled by ``min_tokens``, as in plain sampling."""
    logits = torch.full((2, V), float("-inf"))
    logits[:, 3] = 1.0
    logits[1, 20] = 0.0
    params = SamplingParams(
        temperature=0.0, stop_token_ids=[3], min_tokens=2, structured_outputs=StructuredOutputsParams(json_object=True)
    )
    metadata = make_batch([(params, [1], []), (params, [1], [])]).sampling_metadata
    rows = target_rows(logits.clone(), torch.arange(2), metadata, [[], []])
    assert rows.argmax is not None
    assert rows.argmax.tolist() == [plain(params, [1], [], row)[0] for row in logits] == [3, 20]


# ---------------------------------------------------------------------- logprobs


def emitted_like_the_runner(
    mode: str, params: list[SamplingParams], dtype: torch.dtype
) -> tuple[Any, list[list[int]], list[torch.Tensor], Any]:
    """Three requests that emit 2, 1 and 3 tokens: the parsed logprobs and, per token, plain sampling's own."""
    output = [[4, 5], [], [6]]
    paths = [[[], [1], [1, 2]], [[]], [[], [3], [3, 3], [4]]]
    path_rows, emitted = [[0, 2], [0], [0, 1, 2]], [[1, 30], [7], [3, 3, 49]]
    batch = list(zip(params, [[1, 2]] * 3, output, paths, strict=True))
    request, flat_paths = flat(batch)
    logits = torch.randn(len(request), V, generator=torch.Generator().manual_seed(5)).to(dtype)
    before = logits.clone()
    metadata = make_batch([(p, prompt, list(out)) for p, prompt, out, _ in batch], 8).sampling_metadata
    rows = target_rows(logits, request, metadata, flat_paths, mode)
    if mode.startswith("raw"):
        assert torch.equal(logits, before)
    first = torch.tensor([0, 3, 4])
    row = torch.zeros(3, 4, dtype=torch.int64)
    tokens = torch.full((3, 4), -1)
    for r in range(3):
        row[r, : len(emitted[r])] = first[r] + torch.tensor(path_rows[r])
        tokens[r, : len(emitted[r])] = torch.tensor(emitted[r])
    assert rows.scored is not None
    found = logprobs_for(Sampler(mode), rows.scored, row, tokens, metadata)
    parsed, lists = RejectionSampler.parse_output(tokens, V, [], found)
    assert parsed == emitted
    expected = []
    for r in range(3):
        for path_row, token in zip(path_rows[r], emitted[r], strict=True):
            # The plain sampler's scores of the whole vocabulary, gathered at the token that was emitted here.
            flat_row = int(first[r]) + path_row
            _, scores = plain(params[r], [1, 2], [*output[r], *paths[r][path_row]], before[flat_row], mode)
            expected.append((r, token, scores))
    return lists, emitted, expected, metadata


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("greedy", [(True, True, True), (False, False, False), (True, False, True)])
@pytest.mark.parametrize("mode", MODES)
def test_logprobs_are_the_plain_samplers(mode: str, greedy: tuple[bool, ...], dtype: torch.dtype) -> None:
    params = [
        SamplingParams(
            temperature=0.0 if cold else 0.7,
            logprobs=logprobs,
            presence_penalty=0.5,
            top_k=0 if cold else 20,
            top_p=1.0 if cold else 0.8,
        )
        for cold, logprobs in zip(greedy, [3, None, 5], strict=True)
    ]
    lists, emitted, expected, metadata = emitted_like_the_runner(mode, params, dtype)
    for entry, (_, token, scores) in enumerate(expected):
        reference = Sampler.gather_logprobs(scores[None], metadata.max_num_logprobs, torch.tensor([token]))
        assert lists.logprob_token_ids[entry, 0] == token
        torch.testing.assert_close(torch.from_numpy(lists.logprobs[entry]), reference.logprobs[0], rtol=0, atol=1e-6)
        assert lists.sampled_token_ranks[entry] == reference.selected_token_ranks[0]
        finite = reference.logprobs[0].isfinite()  # which of the tokens at -inf come first is open
        ids = torch.from_numpy(lists.logprob_token_ids[entry])
        if dtype == torch.float32:
            assert torch.equal(ids[finite], reference.logprob_token_ids[0][finite])
    begin = 0
    for r, own in enumerate(emitted):
        assert lists.slice_request(r, len(own)).logprob_token_ids[:, 0].tolist() == own
        begin += len(own)
    assert len(lists.logprobs) == begin


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_of_named_tokens(mode: str) -> None:
    params = [
        SamplingParams(temperature=0.7, logprob_token_ids=[8, 2, 3]),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.7, logprob_token_ids=[9]),
    ]
    lists, _, expected, _ = emitted_like_the_runner(mode, params, torch.float32)
    named = [[8, 2, 3], [], [9]]
    for entry, (r, token, scores) in enumerate(expected):
        ids = [token, *named[r]]
        assert lists.logprob_token_ids[entry, : len(ids)].tolist() == ids
        torch.testing.assert_close(torch.from_numpy(lists.logprobs[entry, : len(ids)]), scores[ids], rtol=0, atol=1e-6)
        assert all(v == float("-inf") for v in lists.logprobs[entry, len(ids) :])
        assert lists.sampled_token_ranks[entry] == (scores >= scores[token]).sum()


@pytest.mark.parametrize(
    "transform",
    [
        {"allowed_token_ids": [1, 2]},
        {"logit_bias": {3: 9.0}},
        {"min_tokens": 2, "stop_token_ids": [4]},
        {"repetition_penalty": 1.5},
        {"thinking_token_budget": 0},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_raw_logprobs_see_the_models_own_logits(transform: dict[str, Any], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, logprobs=1, **transform)
    metadata = make_batch([(params, THINK_START, [])]).sampling_metadata
    logits = torch.randn(2, V)
    before = logits.clone()
    rows = target_rows(logits, torch.zeros(2, dtype=torch.int64), metadata, [[], [1]])
    assert rows.scored is not None and torch.equal(rows.scored, before)


def test_no_logprobs_wanted() -> None:
    metadata = make_batch([(SamplingParams(temperature=0.0), [1], [])]).sampling_metadata
    rows = target_rows(torch.randn(1, V), torch.zeros(1, dtype=torch.int64), metadata)
    assert rows.scored is None
    tokens = torch.tensor([[4, -1]])
    assert logprobs_for(Sampler(), torch.randn(1, V), torch.zeros_like(tokens), tokens, metadata) is None


# ---------------------------------------------------------------------- state and fast paths


def test_state_follows_the_requests() -> None:
    """Rows stay right while the output grows by several tokens a step and the request changes its place."""
    prompt = [*THINK_START, 11]
    params = SamplingParams(
        temperature=0.0, min_tokens=8, stop_token_ids=[5], logit_bias={5: 50.0}, thinking_token_budget=4
    )
    output: list[int] = []
    batch = make_batch([(SamplingParams(temperature=0.0, presence_penalty=1.9), [1], [2]), (params, prompt, output)], 8)
    logits = torch.zeros(V)
    logits[20] = 5.0

    def greedy_tokens(path: list[int]) -> list[int]:
        """The tokens of the request's root row and of the row at ``path``."""
        batch.refresh_metadata()
        place = batch.req_id_to_index["1"]
        paths: list[list[int]] = [[]] * place + [[], path]
        request = torch.tensor([*range(place), place, place])
        rows = target_rows(logits.repeat(len(paths), 1), request, batch.sampling_metadata, paths)
        assert rows.argmax is not None
        found = rows.argmax[place:].tolist()
        assert found == [plain(params, prompt, [*output, *p], logits)[0] for p in ([], path)]
        return found

    assert greedy_tokens([20, 21, 22, 23]) == [20, THINK_END[0]]
    assert greedy_tokens([20, 21, 22, 23, THINK_END[0]]) == [20, THINK_END[1]]
    output.extend([20, 21])
    assert greedy_tokens([20, 20]) == [20, THINK_END[0]]
    batch.remove_request("0")
    batch.condense()
    output.extend([20, 20, THINK_END[0]])
    assert greedy_tokens([THINK_END[1], 20]) == [THINK_END[1], 20]
    output.extend([THINK_END[1], 20])
    assert greedy_tokens([20]) == [20, 5]


def test_committed_output_is_stepped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thinking budget's cost per step does not grow with the output."""
    output = [20] * 5
    batch = make_batch([(SamplingParams(temperature=0.0, thinking_token_budget=50), THINK_START, output)])
    holder = batch.sampling_metadata.thinking_budget_state_holder
    assert holder is not None
    lengths: list[int] = []
    step = holder._update_think_state

    def counted(state: dict[str, Any]) -> None:
        lengths.append(len(state["output_tok_ids"]))
        step(state)

    monkeypatch.setattr(holder, "_update_think_state", counted)
    for new in ([20], []):
        target_rows(torch.randn(1, V), torch.zeros(1, dtype=torch.int64), batch.sampling_metadata, [[30, 31]])
        output.extend(new)
    assert lengths == [0, 1, 2, 3, 4, 5, 6, 7, 6, 7, 8]


def test_paths_are_asked_for_when_they_matter() -> None:
    for params, needed in [
        (SamplingParams(temperature=0.0), False),
        (SamplingParams(top_p=0.5, min_p=0.1, logit_bias={1: 1.0}, allowed_token_ids=[1, 2]), False),
        (SamplingParams(frequency_penalty=0.1), True),
        (SamplingParams(min_tokens=3), True),
        (SamplingParams(thinking_token_budget=3), True),
    ]:
        metadata = make_batch([(params, [1], [])]).sampling_metadata
        assert needs_paths(metadata) == needed
        if needed:
            with pytest.raises(ValueError, match="one path per row"):
                target_rows(torch.randn(1, V), torch.zeros(1, dtype=torch.int64), metadata)
    params = SamplingParams()
    params._bad_words_token_ids = [[1, 2]]
    assert needs_paths(make_batch([(params, [1], [])]).sampling_metadata)


def test_greedy_rows_take_one_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain greedy decoding neither copies nor changes the logits, and makes no softmax."""
    metadata = make_batch([(SamplingParams(temperature=0.0, logprobs=1), [1], [])]).sampling_metadata
    logits = torch.randn(3, V)
    seen: list[int] = []
    original = Sampler.greedy_sample

    def greedy_sample(given: torch.Tensor) -> torch.Tensor:
        seen.append(given.data_ptr())
        return original(given)

    monkeypatch.setattr(Sampler, "greedy_sample", staticmethod(greedy_sample))
    monkeypatch.setattr(torch.Tensor, "softmax", None)
    rows = target_rows(logits, torch.zeros(3, dtype=torch.int64), metadata)
    assert seen == [logits.data_ptr()] and rows.probs is None
    assert rows.argmax is not None and torch.equal(rows.argmax, logits.argmax(-1))


def test_temperature_alone_needs_no_truncation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "sort", None)
    monkeypatch.setattr(torch.Tensor, "topk", None)
    metadata = make_batch([(SamplingParams(temperature=0.5), [1], [])]).sampling_metadata
    logits = torch.randn(3, V)
    rows = target_rows(logits.clone(), torch.zeros(3, dtype=torch.int64), metadata)
    assert rows.argmax is None and rows.greedy is None and rows.probs is not None
    torch.testing.assert_close(rows.probs, (logits / 0.5).softmax(-1))


def test_unknown_processors_are_refused() -> None:
    class Foreign(LogitsProcessor):
        def __init__(self, invariant: bool) -> None:
            self.invariant = invariant

        def is_argmax_invariant(self) -> bool:
            return self.invariant

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits

        def update_state(self, batch_update: Any) -> None: ...

    for invariant in (True, False):
        metadata = make_batch([(SamplingParams(), [1], [])]).sampling_metadata
        metadata.logitsprocs = LogitsProcessors([Foreign(invariant)])
        with pytest.raises(ValueError, match="Foreign"):
            target_rows(torch.randn(1, V), torch.zeros(1, dtype=torch.int64), metadata)


def test_all_builtin_processors_are_enabled() -> None:
    batch = make_batch([])
    batch.logitsprocs = LogitsProcessors([MinTokensLogitsProcessor(CONFIG, CPU, False)])
    enable_builtin_processors(SimpleNamespace(input_batch=batch, vllm_config=CONFIG, device=CPU))
    assert {type(p) for p in batch.logitsprocs.all} == set(BUILTIN_LOGITS_PROCESSORS)
    assert batch.sampling_metadata.logitsprocs is batch.logitsprocs


# ---------------------------------------------------------------------- random numbers


def test_seeded_numbers_do_not_depend_on_the_batch() -> None:
    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(11)

    alone = uniforms({0: seeded()}, 1, 3, "cpu")
    torch.manual_seed(1)
    among = uniforms({2: seeded(), 0: torch.Generator().manual_seed(5)}, 4, 3, "cpu")
    assert torch.equal(among[2], alone[0])
    assert alone.dtype == torch.float64 and len(set(among.flatten().tolist())) == 12
    torch.manual_seed(1)
    state = torch.get_rng_state()
    uniforms({0: seeded()}, 1, 3, "cpu")
    assert torch.equal(torch.get_rng_state(), state)  # a batch of seeded requests leaves the others' numbers alone
    many = uniforms({}, 1000, 3, "cpu")
    assert ((many >= 0) & (many < 1)).all() and abs(float(many.mean()) - 0.5) < 0.03
