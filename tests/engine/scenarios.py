# SPDX-License-Identifier: Apache-2.0
"""Functions that start an engine and use it; the tests run them in processes of their own (``engine_process.run``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Tokens = list[int]


def make_engine(model: Path, **options: Any) -> Any:
    """A small float32 engine in eager mode; ``options`` are vLLM's."""
    from vllm import LLM

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "block_size": 32,
        "num_gpu_blocks_override": 1024,  # 1 GiB of zeros takes longer to write than the rest of the start-up
        "seed": 0,
        "disable_log_stats": False,
    }
    return LLM(str(model), **{**defaults, **options})


def target_rows(
    drafter: Path, budget: int, selection: str, topk: int = 3, depth: int = 3, **more: Any
) -> dict[str, Any]:
    """The value of ``speculative_config`` for our method."""
    return {
        "method": "targetrows",
        "model": str(drafter),
        "num_speculative_tokens": budget,
        "selection": selection,
        "tree_topk": topk,
        "tree_depth": depth,
        **more,
    }


def stock_eagle3(drafter: Path, tokens: int) -> dict[str, Any]:
    """The value of ``speculative_config`` for vLLM's own EAGLE-3 chain."""
    return {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": tokens}


def generate(llm: Any, prompts: Sequence[Tokens], settings: Sequence[dict[str, Any]] | dict[str, Any]) -> list[Any]:
    """vLLM's outputs for token prompts; ``settings`` are sampling parameters, one for all or one a prompt."""
    from vllm import SamplingParams

    if isinstance(settings, dict):
        settings = [settings] * len(prompts)
    return llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        [SamplingParams(**each) for each in settings],
        use_tqdm=False,
    )


def report(output: Any) -> dict[str, Any]:
    """A request's output as plain Python values, all its sequences included."""
    return {
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "sequences": [
            {
                "tokens": list(sequence.token_ids),
                "text": sequence.text,
                "finish_reason": sequence.finish_reason,
                "stop_reason": sequence.stop_reason,
                "logprobs": _logprobs(sequence.logprobs),
            }
            for sequence in output.outputs
        ],
    }


def _logprobs(positions: Any) -> list[dict[int, tuple[float, int | None]]] | None:
    """Per position, each returned token's log-probability and rank."""
    if positions is None:
        return None
    return [{token: (lp.logprob, lp.rank) for token, lp in (position or {}).items()} for position in positions]


def states(llm: Any) -> list[dict[str, Any]]:
    """What each of our workers keeps, once it has heard of the requests that are gone; empty for stock workers.

    The scheduler tells the worker of finished requests with the step that follows.
    """
    for _ in range(2):
        llm.llm_engine.step()
    if not hasattr(_worker_class(llm), "targetrows_state"):
        return []
    return llm.collective_rpc("targetrows_state")  # type: ignore[no-any-return]


def _worker_class(llm: Any) -> Any:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return resolve_obj_by_qualname(llm.llm_engine.vllm_config.parallel_config.worker_cls)


def our_metrics(llm: Any) -> dict[str, dict[str, Any]]:
    """Our metrics in ``LLM.get_metrics()``: by name and by the values of their own labels."""
    found: dict[str, dict[str, Any]] = {}
    for each in llm.get_metrics():
        if each.name.startswith("vllm:targetrows_"):
            labels = dict(each.labels)
            common = [labels.pop(name) for name in ("model_name", "engine", "selection")]
            value = (each.count, each.sum, each.buckets) if hasattr(each, "buckets") else each.value
            found.setdefault(each.name.removeprefix("vllm:targetrows_"), {})[",".join(labels.values())] = value
            found.setdefault("labels", {})[",".join(common)] = True
    return found


def metric(llm: Any, name: str) -> float:
    """Value of one of vLLM's own counters or gauges."""
    return sum(float(m.value) for m in llm.get_metrics() if m.name == name)


Batch = tuple[Sequence[Tokens], Sequence[dict[str, Any]] | dict[str, Any]]


def answer(model: Path, options: dict[str, Any], batches: Sequence[Batch]) -> dict[str, Any]:
    """Answer batches of prompts one after another on one engine.

    Returns:
        ``answers``: a list of reports per batch; ``states``: each worker's afterwards; ``preemptions``; ``cached``:
        prompt tokens found in the prefix cache; ``metrics``: ours.
    """
    llm = make_engine(model, **options)
    return {
        "answers": [[report(output) for output in generate(llm, *batch)] for batch in batches],
        "states": states(llm),
        "preemptions": metric(llm, "vllm:num_preemptions"),
        "cached": metric(llm, "vllm:prefix_cache_hits"),
        "metrics": our_metrics(llm),
    }


def record(model: Path, options: dict[str, Any], batches: Sequence[Batch]) -> dict[str, Any]:
    """``answer`` on an engine that records its rounds; the recording is finished afterwards."""
    llm = make_engine(model, **options)
    result = {"answers": [[report(output) for output in generate(llm, *batch)] for batch in batches]}
    result["states"] = states(llm)
    llm.llm_engine.engine_core.shutdown()
    return result


def rows_at(model: Path, prefixes: Sequence[Tokens]) -> list[list[float]]:
    """Plain vLLM's log-probabilities of the whole vocabulary at each prefix."""
    llm = make_engine(model, max_logprobs=-1)
    outputs = generate(llm, prefixes, {"temperature": 0.0, "max_tokens": 1, "logprobs": -1})
    found = [output.outputs[0].logprobs[0] for output in outputs]
    return [[each[token].logprob for token in range(len(each))] for each in found]


def without_statistics(model: Path, options: dict[str, Any], prompts: Sequence[Tokens]) -> tuple[bool, list[str]]:
    """Whether an engine decodes with trees, and the names of our metrics in its process."""
    from prometheus_client import REGISTRY

    llm = make_engine(model, **options)
    generate(llm, prompts, {"temperature": 0.0, "max_tokens": 8})
    names = [each.name for each in REGISTRY.collect() if each.name.startswith("vllm:targetrows")]
    return llm.collective_rpc("targetrows_state")[0]["rounds"] > 0, names


def answer_with_kernels(model: Path, options: dict[str, Any], batches: Sequence[Batch]) -> dict[str, Any]:
    """``answer`` with the GPU's wiring of steps with trees, its kernels interpreted on the CPU.

    Returns:
        What ``answer`` returns; ``layers``: how many layers' passes had trees and how many had none; ``looks``: the
        places where a round would have made the host wait for a GPU, and how often.
    """
    import kernel_backend
    import no_look

    from vllm_targetrows.engine import compat, runner, transfer

    compat.ATTENTION_BACKENDS["cpu"]["CPU_ATTN"] = "kernel_backend.KernelBackend"
    transfer.looking_is_free = lambda device: False
    looks = no_look.watch(runner.TreeRounds, "_sample")
    return {**answer(model, options, batches), "layers": dict(kernel_backend.LAUNCHES), "looks": looks.found}


def stream_and_abort(
    model: Path, options: dict[str, Any], prompts: Sequence[Tokens], settings: dict[str, Any], steps: int
) -> dict[str, Any]:
    """Stream all prompts at once and abort every second request after ``steps`` steps, mid-sequence.

    Returns:
        ``pieces``: per request, the token lists as they came; ``finished``: the requests that ended by themselves;
        ``states``: each worker's afterwards; ``usage``: share of the KV cache in use afterwards.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = make_engine(model, **options)
    engine = llm.llm_engine
    params = SamplingParams(**settings, output_kind=RequestOutputKind.DELTA)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, params)
    pieces: list[list[Tokens]] = [[] for _ in prompts]
    finished = []
    step = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            pieces[int(output.request_id)].append(list(output.outputs[0].token_ids))
            if output.finished:
                finished.append(int(output.request_id))
        step += 1
        if step == steps:
            engine.abort_request([str(i) for i in range(0, len(prompts), 2)])
    return {
        "pieces": pieces,
        "finished": sorted(finished),
        "states": states(llm),
        "usage": metric(llm, "vllm:kv_cache_usage_perc"),
    }


def draw(model: Path, options: dict[str, Any], prompt: Tokens, settings: Sequence[dict[str, Any]]) -> list[Tokens]:
    """The tokens of one request for each of ``settings``, all with the same prompt, 64 at a time."""
    if fault := os.environ.get(FAULT):
        plant(fault)
    llm = make_engine(model, max_num_seqs=64, max_model_len=128, **options)
    outputs = generate(
        llm, [prompt] * len(settings), [{"detokenize": False, "ignore_eos": True, **s} for s in settings]
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


# ------------------------------------------------------------------ planted faults

FAULT = "TARGETROWS_TEST_FAULT"
"""Variable that names a fault for ``draw`` to plant in its own process."""


def plant(fault: str) -> None:
    """Break the verifier of this process in a way that the law test has to see."""
    import torch

    from vllm_targetrows.engine import runner, steps

    if fault == "continuation_from_the_whole_row":

        def whole_row(probs: Any, tree: Any, exit_node: Any, row_of: Any) -> Any:
            return probs[row_of.gather(1, exit_node[:, None])[:, 0]]

        _replace(steps, "residual_row", whole_row)
    elif fault == "redraw_when_absent":
        select = runner.TreeRounds._select

        def redrawing_select(
            self: Any, batch: Any, verified: Any, growing: Any, pool: Any, root: Any, chance: Any
        ) -> Any:
            if root is None:
                return select(self, batch, verified, growing, pool, root, chance)
            place = torch.from_numpy(growing.searchsorted(root.request))
            first = pool.tokens[place, : pool.width]
            draw_once = self._draw

            def draw_until_present(rows: Any, uniform: Any) -> Any:
                token = draw_once(rows, uniform)
                for _ in range(20):
                    absent = ~(first == token[:, None]).any(1)
                    token = torch.where(absent, draw_once(rows, torch.rand_like(uniform)), token)
                return token

            self._draw = draw_until_present
            try:
                return select(self, batch, verified, growing, pool, root, chance)
            finally:
                del self._draw

        _replace(runner.TreeRounds, "_select", redrawing_select)
    else:
        raise ValueError(f"unknown fault {fault!r}")


def _replace(owner: Any, name: str, value: Any) -> None:
    assert hasattr(owner, name), f"the fault's place {name} is gone: plant it where its code went"
    setattr(owner, name, value)
