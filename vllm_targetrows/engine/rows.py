# SPDX-License-Identifier: Apache-2.0
"""Rows of the requests: raw logits at prefixes become next-token distributions after the sampling transforms.

The *prefix* of a row is the request's prompt, its ``output_token_ids`` as vLLM has recorded them (they end with the
root of the step's tree), and the row's *path*: the tokens after that.  A root row has an empty path, a tree node's
path ends with the node's own token, and at a continuation the path is all the tokens emitted in this step.  Every row
is what vLLM's plain ``Sampler`` computes at the same prefix, in the same order of operations:

==================  ===========================================  =================================================
transform           state                                        what it takes from the prefix
==================  ===========================================  =================================================
allowed tokens      ``metadata.allowed_token_ids_mask``          nothing
bad words           ``metadata.bad_words_token_ids``             last tokens of recorded output + path
min tokens          ``MinTokensLogitsProcessor.min_toks``        number of recorded output tokens + length of path
logit bias          ``LogitBiasLogitsProcessor.logits_slice``    nothing
penalties           ``metadata.*_penalties``                     tokens of prompt, recorded output and path
thinking budget     ``metadata.thinking_budget_state_holder``    vLLM's state machine, stepped through output and path
temperature         ``metadata.temperature``                     nothing
min-p               ``MinPLogitsProcessor.min_p``                nothing
top-k, top-p        ``metadata.top_k``, ``metadata.top_p``       nothing
==================  ===========================================  =================================================

A greedy request's row is the point mass at the argmax after the transforms above the temperature.

vLLM's own speculation does not build the min-p and logit-bias processors: ``enable_builtin_processors`` does.  Its
per-token expansion of sampling parameters is not used here, because it is wrong on the CPU in vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES, LogprobsMode
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    LogitBiasLogitsProcessor,
    LogitsProcessors,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import _SAMPLING_EPS, Sampler

from vllm_targetrows.engine import transfer

NEVER = float("-inf")
FORCED = 1e9  # the logit that vLLM's thinking budget gives a forced token

Paths = Sequence[Sequence[int]]


@dataclass(frozen=True)
class TargetRows:
    """``T`` rows of ``n`` requests; a request's rows follow each other."""

    argmax: torch.Tensor | None  # int64 [T]; None when no request of the batch is greedy
    probs: torch.Tensor | None  # float32 [T, V]; None when every request of the batch is greedy
    greedy: torch.Tensor | None  # bool [n] in row order; None unless the batch has both kinds
    scored: torch.Tensor | None  # [T, V] the logits that ``logprobs_for`` reads; None when no request wants logprobs


def needs_paths(metadata: SamplingMetadata) -> bool:
    """Whether a request of the batch has a transform that depends on the prefix."""
    holder = metadata.thinking_budget_state_holder
    return (
        not metadata.no_penalties
        or bool(metadata.bad_words_token_ids)
        or (holder is not None and holder.has_tracked_requests())
        or any(isinstance(p, MinTokensLogitsProcessor) and p.min_toks for p in metadata.logitsprocs.all)
    )


def target_rows(
    logits: torch.Tensor,
    request: torch.Tensor,
    metadata: SamplingMetadata,
    paths: Paths | None = None,
    logprobs_mode: LogprobsMode = "raw_logprobs",
    first: torch.Tensor | None = None,
) -> TargetRows:
    """Apply the requests' sampling transforms to raw logits.

    Args:
        logits: ``[T, V]`` as the model gave them.  Float32 ones are changed in place, unless raw
            logprobs are wanted.
        request: int64 ``[T]`` batch index of each row's request, not decreasing, on the device of the logits.
        metadata: of the whole batch.
        paths: ``[T]`` path of each row; may be ``None`` when ``needs_paths`` is false.
        logprobs_mode: vLLM's option; decides what ``scored`` holds.
        first: int64 ``[n]`` each request's first row, on the device of the logits.  Without it the host has to look for
            them when the batch has greedy and other requests.

    Raises:
        ValueError: for a logits processor other than vLLM's builtin ones, and for missing paths.
    """
    scored = None
    wanted = metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)
    processed = logprobs_mode in PROCESSED_LOGPROBS_MODES
    if wanted and not processed:
        scored = logits
    work = logits.to(torch.float32)
    if work is scored and (not metadata.all_greedy or _changes_argmax(metadata)):
        work = work.clone()
    _argmax_transforms(work, request, metadata, paths)
    argmax = None if metadata.all_random else Sampler.greedy_sample(work)
    if metadata.all_greedy:
        return TargetRows(argmax, None, None, work if wanted and processed else scored)

    temperature = metadata.temperature
    assert temperature is not None
    temperature = temperature[request]
    greedy = None
    if argmax is not None:
        cold = temperature < _SAMPLING_EPS
        temperature = temperature.masked_fill(cold, 1.0)
        if first is None:
            first = request.diff(prepend=request.new_full((1,), -1)).nonzero()[:, 0]
        greedy = cold[first]
    work.div_(temperature[:, None])
    for processor in metadata.logitsprocs.argmax_invariant:
        if not isinstance(processor, MinPLogitsProcessor):
            raise _unknown(processor)
        if processor.min_p_count:
            whole = work.softmax(dim=-1)
            least = whole.amax(dim=-1, keepdim=True).mul_(processor.min_p[request])
            work.masked_fill_(whole < least, NEVER)
    top_k = None if metadata.top_k is None else metadata.top_k[request]
    top_p = None if metadata.top_p is None else metadata.top_p[request]
    probs = _truncated_softmax(work, top_k, top_p)
    if wanted and processed:
        scored = work.masked_fill_(probs == 0, NEVER)
    return TargetRows(argmax, probs, greedy, scored)


def logprobs_for(
    sampler: Sampler,
    scored: torch.Tensor,
    row: torch.Tensor,
    tokens: torch.Tensor,
    metadata: SamplingMetadata,
) -> LogprobsTensors | None:
    """Logprobs of the emitted tokens, as vLLM's plain ``Sampler`` returns them.

    Args:
        sampler: the runner's; its ``logprobs_mode`` must be the one given to ``target_rows``.
        scored: ``[T, V]`` ``TargetRows.scored``; concatenated when the tokens come from several passes.
        row: int64 ``[R, W]`` the row of ``scored`` that emitted each token; ignored where there is none.
        tokens: int64 ``[R, W]`` emitted tokens of every request of the batch, -1 where there is none.

    Returns:
        ``R * W`` entries in the order of ``tokens.flatten()``, which is what ``RejectionSampler.parse_output`` expects
        for the same ``[R, W]`` tokens (it drops the entries of the -1); ``None`` when no request wants logprobs.
    """
    if metadata.max_num_logprobs is None and not metadata.logprob_token_ids:
        return None
    emitted = tokens >= 0
    entry_request = emitted.nonzero()[:, 0]
    token = tokens[emitted].to(torch.int64)
    picked = scored[row[emitted]]
    if sampler.logprobs_mode in ("raw_logprobs", "processed_logprobs"):
        values = sampler.compute_logprobs(picked)
    else:
        values = picked.to(torch.float32)
    if metadata.logprob_token_ids:
        # vLLM prefers these to the best tokens when a batch has both.
        ids = metadata.logprob_token_ids
        by_entry = {i: ids[r] for i, r in enumerate(entry_request.tolist()) if r in ids}
        if by_entry:
            found = sampler.gather_specific_token_logprobs(values, by_entry, token)
        else:
            found = sampler.gather_logprobs(values, 0, token)
    else:
        assert metadata.max_num_logprobs is not None
        found = sampler.gather_logprobs(values, metadata.max_num_logprobs, token)
    assert found is not None
    place = emitted.flatten()
    columns = found.logprobs.shape[1]
    spread = LogprobsTensors(
        found.logprob_token_ids.new_zeros((place.numel(), columns)),
        found.logprobs.new_zeros((place.numel(), columns)),
        found.selected_token_ranks.new_zeros(place.numel()),
    )
    for whole, part in zip(spread[:3], found[:3], strict=True):
        whole[place] = part
    return spread


def uniforms(
    generators: dict[int, torch.Generator], num_reqs: int, count: int, device: torch.device | str
) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64 ``[num_reqs, count]``.

    A request with a seed draws from its own generator, so its numbers do not depend on the rest of the batch.  The
    others draw from the device's default generator.
    """
    drawn = torch.empty((num_reqs, count), dtype=torch.float64, device=device)
    if len(generators) < num_reqs:
        drawn.uniform_()
    for index, generator in generators.items():
        drawn[index].uniform_(generator=generator)
    return drawn


def enable_builtin_processors(runner: Any) -> None:
    """Give the runner's batch all of vLLM's builtin logits processors.

    vLLM leaves out min-p and logit bias when speculation is on.  Call once, when the runner has been constructed; the
    batch that ``initialize_kv_cache`` makes takes them over.
    """
    batch = runner.input_batch
    batch.logitsprocs = LogitsProcessors(
        build(runner.vllm_config, runner.device, PIN_MEMORY) for build in BUILTIN_LOGITS_PROCESSORS
    )
    batch.sampling_metadata.logitsprocs = batch.logitsprocs


# ---------------------------------------------------------------------- top-k and top-p

NUCLEUS_WIDTHS = (128, 2048)


def _truncated_softmax(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """Softmax after top-k and top-p, ``[T, V]``.

    vLLM's top-p on the CPU sorts the whole vocabulary, 5 ms a row at 49,152 tokens: more than a tree's whole
    verification pass.  Most nuclei lie within the best few tokens, which cost a tenth; only the other rows are sorted.
    Which of several equal logits stay when they straddle the nucleus' edge is as open as under vLLM's unstable sort.
    """
    if top_p is None or not transfer.looking_is_free(logits.device):
        return apply_top_k_top_p(logits, top_k, top_p).softmax(dim=-1)
    if top_k is not None:
        logits = apply_top_k_top_p(logits, top_k, None)
    probs = logits.softmax(dim=-1)
    left = (top_p < 1).nonzero()[:, 0]
    for width in NUCLEUS_WIDTHS:
        if not len(left):
            return probs
        best, token = probs[left].topk(min(width, logits.shape[1]))
        mass = best.cumsum(dim=-1)
        # A token is in the nucleus when those before it hold less than top-p; the first one always is.
        best[:, 1:].masked_fill_(mass[:, :-1] >= top_p[left, None], 0.0)
        complete = mass[:, -1] >= top_p[left]
        rows, best, left = left[complete], best[complete], left[~complete]
        probs.index_fill_(0, rows, 0.0)
        probs[rows[:, None], token[complete]] = best / best.sum(dim=-1, keepdim=True)
    if len(left):
        probs[left] = apply_top_k_top_p(logits[left], None, top_p[left]).softmax(dim=-1)
    return probs


# ---------------------------------------------------------------------- transforms that can change the argmax


def _changes_argmax(metadata: SamplingMetadata) -> bool:
    return (
        needs_paths(metadata)
        or metadata.allowed_token_ids_mask is not None
        or any(isinstance(p, LogitBiasLogitsProcessor) and p.biases for p in metadata.logitsprocs.all)
    )


def _argmax_transforms(
    logits: torch.Tensor, request: torch.Tensor, metadata: SamplingMetadata, paths: Paths | None
) -> None:
    """Everything above the temperature, in place, in the order of ``Sampler.apply_logits_processors``."""
    if metadata.allowed_token_ids_mask is not None:
        logits.masked_fill_(metadata.allowed_token_ids_mask[request], NEVER)
    prefixes = None
    if needs_paths(metadata):
        if paths is None or len(paths) != len(logits):
            raise ValueError("a request's sampling parameters depend on the prefix: one path per row is needed")
        prefixes = _Prefixes(request.tolist(), paths, metadata)
    if metadata.bad_words_token_ids and prefixes is not None:
        _put(logits, _bad_words(metadata.bad_words_token_ids, prefixes), NEVER)
    for processor in metadata.logitsprocs.non_argmax_invariant:
        if isinstance(processor, MinTokensLogitsProcessor):
            if processor.min_toks and prefixes is not None:
                _min_tokens(logits, processor, prefixes)
        elif isinstance(processor, LogitBiasLogitsProcessor):
            if processor.biases:
                _logit_bias(logits, processor, request)
        else:
            raise _unknown(processor)
    if not metadata.no_penalties and prefixes is not None:
        _penalties(logits, metadata, prefixes)
    holder = metadata.thinking_budget_state_holder
    if holder is not None and holder.has_tracked_requests() and prefixes is not None:
        _put(logits, _forced_by_thinking_budget(holder, prefixes), FORCED)
    if prefixes is not None or metadata.allowed_token_ids_mask is not None:
        # Where nothing is allowed at all, plain sampling emits token 0.
        nothing = torch.isneginf(logits.amax(dim=-1))
        logits[:, 0].masked_fill_(nothing, 0.0)


def _unknown(processor: object) -> ValueError:
    return ValueError(f"logits processor {type(processor).__name__} cannot be applied to the rows of a tree")


def _put(logits: torch.Tensor, places: Iterable[tuple[int, int]], value: float) -> None:
    """Set the logits at (row, token) pairs."""
    index = torch.tensor(list(places), dtype=torch.int64, device=logits.device)
    if len(index):
        logits[index[:, 0], index[:, 1]] = value


@dataclass(frozen=True)
class _Prefixes:
    request: list[int]  # [T]
    paths: Paths  # [T]
    metadata: SamplingMetadata


def _bad_words(bad_words: dict[int, list[list[int]]], prefixes: _Prefixes) -> Iterable[tuple[int, int]]:
    outputs = prefixes.metadata.output_token_ids
    for row, r in enumerate(prefixes.request):
        words = bad_words.get(r)
        if not words:
            continue
        longest = max(map(len, words)) - 1
        recent = [*outputs[r][max(0, len(outputs[r]) - longest) :], *prefixes.paths[row]]
        for word in words:
            start = len(recent) - (len(word) - 1)
            if start >= 0 and recent[start:] == word[:-1]:
                yield row, word[-1]


def _min_tokens(logits: torch.Tensor, processor: MinTokensLogitsProcessor, prefixes: _Prefixes) -> None:
    banned: list[tuple[int, int]] = []
    restorable: list[int] = []
    for row, r in enumerate(prefixes.request):
        if r not in processor.min_toks:
            continue
        least, output, stop_tokens, structured = processor.min_toks[r]
        if len(output) + len(prefixes.paths[row]) < least and stop_tokens:
            banned.extend((row, token) for token in stop_tokens)
            if structured:
                restorable.append(row)
    # A grammar may leave nothing but stop tokens: vLLM then lets the request stop.
    before = logits[restorable].clone() if restorable else None
    _put(logits, banned, NEVER)
    if before is not None:
        stuck = torch.isneginf(logits[restorable]).all(dim=-1, keepdim=True)
        logits[restorable] = torch.where(stuck, before, logits[restorable])


def _logit_bias(logits: torch.Tensor, processor: LogitBiasLogitsProcessor, request: torch.Tensor) -> None:
    of_request, token = processor.logits_slice
    row, entry = (request[:, None] == of_request[None, :]).nonzero(as_tuple=True)
    logits[row, token[entry]] += processor.bias_tensor[entry]


def _penalties(logits: torch.Tensor, metadata: SamplingMetadata, prefixes: _Prefixes) -> None:
    """Repetition, frequency and presence penalties: they move only the logits of tokens in a prefix."""
    repetition, frequency, presence = (
        values.tolist()
        for values in (metadata.repetition_penalties, metadata.frequency_penalties, metadata.presence_penalties)
    )
    assert metadata.prompt_token_ids is not None
    begin = 0
    for r, group in groupby(prefixes.request):
        rows = slice(begin, begin + len(list(group)))
        begin = rows.stop
        if (repetition[r], frequency[r], presence[r]) == (1.0, 0.0, 0.0):
            continue
        paths = prefixes.paths[rows]
        prompt = metadata.prompt_token_ids[r].cpu().numpy()
        output = np.array(metadata.output_token_ids[r], dtype=np.int64)
        prompt = prompt[prompt < logits.shape[1]]  # prompts are padded with V
        path = np.fromiter(chain.from_iterable(paths), dtype=np.int64)
        path_row = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
        token, place = np.unique(np.concatenate((prompt, output, path)), return_inverse=True)
        in_prompt, in_output, in_path = np.split(place, np.cumsum((len(prompt), len(output))))
        counted = np.zeros((len(paths), len(token)), dtype=np.float32)
        counted += np.bincount(in_output, minlength=len(token))
        np.add.at(counted, (path_row, in_path), 1)
        prompted = np.zeros(len(token), dtype=bool)
        prompted[in_prompt] = True

        count, where = torch.from_numpy(counted).to(logits.device), torch.from_numpy(token).to(logits.device)
        repeated = (count > 0) | torch.from_numpy(prompted).to(logits.device)
        penalty = torch.where(repeated, repetition[r], 1.0)
        value = logits[rows, where]
        value *= torch.where(value > 0, 1.0 / penalty, penalty)
        value -= frequency[r] * count
        value -= presence[r] * (count > 0)
        logits[rows, where] = value


_STEPPED = "targetrows_stepped"  # output lengths at which a request's committed state has been stepped


def _forced_by_thinking_budget(holder: Any, prefixes: _Prefixes) -> Iterable[tuple[int, int]]:
    """The (row, token) pairs at which vLLM's thinking budget forces the end-of-thinking tokens.

    Plain sampling steps a request's state once at every output length.  The committed output is stepped in the
    holder's own state, which moves and dies with the request; each row's path in a copy.
    """
    outputs = prefixes.metadata.output_token_ids
    for row, r in enumerate(prefixes.request):
        state = holder._state.get(r)
        if state is None:
            continue
        output, path = outputs[r], prefixes.paths[row]
        for length in range(state.get(_STEPPED, 0), len(output) + 1):
            _step_thinking(holder, state, output[:length])
        state[_STEPPED] = len(output) + 1
        state = dict(state)  # the state machine replaces values and never changes one in place
        for length in range(1, len(path) + 1):
            _step_thinking(holder, state, [*output, *path[:length]])
        if state["in_end"] and state["force_index"] and state["end_count"] < len(holder.think_end_token_ids):
            yield row, holder.think_end_token_ids[state["end_count"]]


def _step_thinking(holder: Any, state: dict[str, Any], output: list[int]) -> None:
    state.update(output_tok_ids=output, spec_token_ids=[], in_spec_mode=False, force_index=[])
    holder._update_think_state(state)
