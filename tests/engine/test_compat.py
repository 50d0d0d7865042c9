# SPDX-License-Identifier: Apache-2.0
"""The flag as vLLM's front end sees it: what the wrappers change, what they leave alone, and what is refused.

No engine is started: ``EngineArgs(...).create_engine_config()`` runs on tiny random models.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import DRAFT_VOCABULARY, HIDDEN, LAYERS, VOCABULARY, make_tiny_pair
from vllm import SamplingParams
from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_targetrows.engine import compat
from vllm_targetrows.engine.config import TargetRowsConfig
from vllm_targetrows.engine.plugin import register

METHOD = "method 'targetrows' does not support "


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """vLLM's configuration writes environment variables: put them back."""
    saved = dict(os.environ)
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1")
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    yield
    os.environ.clear()
    os.environ.update(saved)


class Flag:
    """Builds engine configurations of the tiny pair."""

    def __init__(self, pair: tuple[Path, Path]) -> None:
        self.target, self.drafter = pair
        self.options: dict[str, Any] = {
            "method": "targetrows",
            "model": str(self.drafter),
            "num_speculative_tokens": 8,
            "tree_topk": 4,
            "tree_depth": 3,
        }

    def args(self, speculative: dict[str, Any] | None = None, **arguments: Any) -> EngineArgs:
        defaults = {"model": str(self.target), "max_model_len": 512, "dtype": "float32", "skip_tokenizer_init": True}
        options = {**self.options, **(speculative or {})}
        return EngineArgs(**{**defaults, "speculative_config": options, **arguments})

    def config(self, speculative: dict[str, Any] | None = None, **arguments: Any) -> VllmConfig:
        return self.args(speculative, **arguments).create_engine_config()

    def refusal(self, speculative: dict[str, Any] | None = None, **arguments: Any) -> str:
        with pytest.raises(ValueError) as raised:
            self.config(speculative, **arguments)
        (line,) = str(raised.value).splitlines()
        return line


@pytest.fixture
def flag(pair: tuple[Path, Path]) -> Flag:
    return Flag(pair)


@pytest.fixture
def edited(pair: tuple[Path, Path], tmp_path: Path) -> Any:
    """A copy of the target or the drafter with other values in its config.json (None: without) or other tensors."""

    def copy(which: int, config: dict[str, Any], tensors: dict[str, torch.Tensor | None] | None = None) -> str:
        folder = tmp_path / "edited"
        shutil.copytree(pair[which], folder)
        values = {**json.loads((folder / "config.json").read_text()), **config}
        (folder / "config.json").write_text(json.dumps({key: v for key, v in values.items() if v is not None}))
        weights = {**load_file(folder / "model.safetensors"), **(tensors or {})}
        save_file({name: t for name, t in weights.items() if t is not None}, folder / "model.safetensors")
        return str(folder)

    return copy


# What the flag does.


@pytest.mark.parametrize("budget", [1, 59, 255])
def test_the_flag_becomes_a_stock_configuration_with_our_worker(flag: Flag, budget: int) -> None:
    config = flag.config({"num_speculative_tokens": budget, "selection": "root_draw"})
    assert TargetRowsConfig.from_vllm_config(config) == TargetRowsConfig(
        num_speculative_tokens=budget, selection="root_draw", tree_topk=4, tree_depth=3
    )
    assert config.speculative_config.method == "eagle3"
    assert config.speculative_config.model == str(flag.drafter)
    assert config.num_speculative_tokens == config.num_lookahead_tokens == budget
    assert config.parallel_config.worker_cls == "vllm_targetrows.engine.worker.TargetRowsWorker"
    assert config.scheduler_config.async_scheduling is False
    assert config.use_v2_model_runner is False
    config.compute_hash()  # additional_config must stay JSON


def test_stock_options_reach_vllm(flag: Flag) -> None:
    config = flag.config({"max_model_len": 256, "enforce_eager": True, "disable_eagle_block_drop": True})
    assert config.speculative_config.draft_model_config.max_model_len == 256
    assert config.speculative_config.enforce_eager is True
    assert config.speculative_config.disable_eagle_block_drop is True


def test_block_size(flag: Flag) -> None:
    assert flag.config().cache_config.block_size == 32
    assert flag.config(block_size=64).cache_config.block_size == 64


def test_tensor_parallelism_is_allowed(flag: Flag) -> None:
    config = flag.config(tensor_parallel_size=2)
    assert config.speculative_config.draft_parallel_config.tensor_parallel_size == 2


def test_the_users_additional_config_is_kept(flag: Flag) -> None:
    mine = {"mine": 1}
    assert flag.config(additional_config=mine).additional_config.keys() == {"mine", "targetrows"}
    assert mine == {"mine": 1}


def test_arguments_can_be_used_again(flag: Flag) -> None:
    args = flag.args()
    before = {name: getattr(args, name) for name in ("worker_cls", "async_scheduling", "block_size")}
    first, second = args.create_engine_config(), args.create_engine_config()
    assert args.speculative_config == flag.options
    assert {name: getattr(args, name) for name in before} == before
    assert args.additional_config == {}
    assert first.additional_config == second.additional_config


def test_arguments_are_put_back_after_a_refusal(flag: Flag) -> None:
    args = flag.args({"max_model_len": 4096})
    with pytest.raises(ValueError):
        args.create_engine_config()
    assert args.speculative_config == {**flag.options, "max_model_len": 4096}
    assert args.worker_cls == "auto"


@pytest.mark.parametrize("form", ["json", "dotted", "shorthand"])
def test_command_line(flag: Flag, form: str) -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    drafter = str(flag.drafter)
    argv = {
        "json": ["--speculative-config", json.dumps({**flag.options, "tree-depth": 2})],
        "dotted": [
            *("--speculative-config.method", "targetrows", "--speculative-config.model", drafter),
            *("--speculative-config.num_speculative_tokens", "8", "--speculative-config.tree_topk", "4"),
        ],
        "shorthand": [
            *("--speculative-config", '{"method": "targetrows"}'),
            *("--spec-model", drafter, "--spec-tokens", "8"),
        ],
    }[form]
    common = ["--model", str(flag.target), "--max-model-len", "512", "--skip-tokenizer-init"]
    args = AsyncEngineArgs.from_cli_args(parser.parse_args([*common, *argv]))
    config = TargetRowsConfig.from_vllm_config(args.create_engine_config())
    assert config.num_speculative_tokens == 8
    assert (config.tree_topk, config.tree_depth) == {"json": (4, 2), "dotted": (4, 8), "shorthand": (10, 8)}[form]


def test_min_p_and_logit_bias_are_let_through_for_our_method_only(flag: Flag) -> None:
    ours = flag.config().speculative_config
    stock = flag.config(speculative_config={**STOCK_EAGLE, "model": str(flag.drafter)}).speculative_config
    for params in (SamplingParams(min_p=0.1), SamplingParams(logit_bias={3: 1.0})):
        params._validate_spec_decode(ours)
        params._validate_spec_decode(None)
        with pytest.raises(VLLMValidationError, match="min_p and logit_bias"):
            params._validate_spec_decode(stock)


# What it leaves alone.

STOCK_EAGLE = {"method": "eagle3", "num_speculative_tokens": 3}


@pytest.mark.parametrize("method", ["none", "eagle3", "ngram"])
def test_other_methods_are_untouched(flag: Flag, method: str) -> None:
    options: dict[str, dict[str, Any] | None] = {
        "none": None,
        "eagle3": {**STOCK_EAGLE, "model": str(flag.drafter)},
        "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
    }
    wrapped = flag.config(speculative_config=options[method])
    stock = EngineArgs.create_engine_config.__wrapped__(flag.args(speculative_config=options[method]))
    assert wrapped.compute_hash() == stock.compute_hash()
    assert wrapped.additional_config == stock.additional_config == {}
    assert wrapped.parallel_config.worker_cls == stock.parallel_config.worker_cls
    assert wrapped.cache_config.block_size == stock.cache_config.block_size == 128
    assert wrapped.use_v2_model_runner == stock.use_v2_model_runner


def test_model_runner_v1_is_chosen_for_our_method_only(flag: Flag, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, stock = flag.config(), flag.config(speculative_config=None)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert stock.use_v2_model_runner is True
    assert ours.use_v2_model_runner is False


def test_registration_is_idempotent(flag: Flag) -> None:
    flag.args()  # loads the plugin
    before = (EngineArgs.create_engine_config, VllmConfig.use_v2_model_runner, SamplingParams._validate_spec_decode)
    register()
    register()
    after = (EngineArgs.create_engine_config, VllmConfig.use_v2_model_runner, SamplingParams._validate_spec_decode)
    assert before == after
    assert not hasattr(before[0].__wrapped__, "__wrapped__")
    assert not hasattr(before[1].fget.__wrapped__, "__wrapped__")
    assert not hasattr(before[2].__wrapped__, "__wrapped__")


def test_the_entry_point_costs_nothing_until_it_is_called() -> None:
    heavy = "{'torch', 'vllm', 'pydantic', 'transformers'}"
    code = f"import sys, vllm_targetrows.engine.plugin; assert not {heavy} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Versions.


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.32.0", "0.320.0", "dev"])
def test_unknown_versions_are_refused(flag: Flag, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    with pytest.raises(RuntimeError) as raised:
        flag.config()
    (line,) = str(raised.value).splitlines()
    assert line.startswith(f"vllm-targetrows supports vLLM 0.32 and 0.33, found {version}: ")
    assert flag.config(speculative_config=None).speculative_config is None  # nobody else notices


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev3+gabc", "0.33.0"])
def test_known_versions_are_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    compat.check_version()


# Refusals.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"async_scheduling": True}, "async_scheduling=True; allowed: False, or leave it unset"),
        ({"worker_cls": "a.B"}, "worker_cls='a.B'; allowed: 'auto' (the method brings its own worker)"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2; allowed: 1 (tensor_parallel_size may be larger)"),
        ({"data_parallel_size": 2}, "data_parallel_size=2; allowed: 1 (tensor_parallel_size may be larger)"),
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
            "decode_context_parallel_size=2; allowed: 1 (tensor_parallel_size may be larger)",
        ),
        (
            {"kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")},
            "a KV connector (kv_transfer_config, KV offloading); allowed: none",
        ),
        ({"kv_offloading_size": 1}, "a KV connector (kv_transfer_config, KV offloading); allowed: none"),
        ({"enable_lora": True}, "LoRA (enable_lora=True); allowed: enable_lora=False"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds=True; allowed: False"),
        ({"logits_processors": ["a:B"]}, "custom logits_processors; allowed: none"),
        ({"runner": "pooling"}, "runner 'pooling'; allowed: 'generate'"),
    ],
)
def test_unsupported_features(flag: Flag, arguments: dict[str, Any], message: str) -> None:
    assert flag.refusal(**arguments) == METHOD + message


def test_unsupported_device(flag: Flag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "device_type", "xpu")
    assert flag.refusal() == METHOD + f"device 'xpu'; allowed: {' and '.join(map(repr, compat.WORKERS))}"


def test_model_runner_v2_is_refused_by_name(flag: Flag, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    expected = "Model Runner V2 (VLLM_USE_V2_MODEL_RUNNER=1); allowed: VLLM_USE_V2_MODEL_RUNNER unset or 0"
    assert flag.refusal() == METHOD + expected


DECODER = "; allowed: decoder-only text models with full attention"


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("use_mla", "multi-head latent attention (MLA) in the target" + DECODER),
        ("is_hybrid", "Mamba or linear-attention layers in the target" + DECODER),
        ("is_attention_free", "Mamba or linear-attention layers in the target" + DECODER),
        ("has_inner_state", "Mamba or linear-attention layers in the target" + DECODER),
        ("is_encoder_decoder", "encoder-decoder targets" + DECODER),
        ("is_multimodal_model", "multimodal targets" + DECODER),
        ("is_diffusion", "diffusion language models" + DECODER),
    ],
)
def test_unsupported_targets(flag: Flag, monkeypatch: pytest.MonkeyPatch, attribute: str, message: str) -> None:
    # Real models of these kinds take vLLM half a minute each to inspect, so the tiny one poses as them.
    config = flag.config()
    monkeypatch.setattr(ModelConfig, attribute, property(lambda self: True))
    with pytest.raises(ValueError) as raised:
        compat.check_supported(config, TargetRowsConfig.from_vllm_config(config))
    assert str(raised.value) == METHOD + message


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("parallel_config.enable_eplb", True, "enable_eplb=True; allowed: False"),
        ("parallel_config.prefill_context_parallel_size", 2, "prefill_context_parallel_size=2; allowed: 1 "),
        ("parallel_config.ubatch_size", 2, "dual batch overlap (enable_dbo, ubatch_size); allowed: enable_dbo=False"),
        ("cache_config.kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill=True; allowed: False"),
        ("cache_config.sliding_window", 64, "sliding-window or chunked-attention layers in the target"),
        ("ec_transfer_config", object(), "an encoder-cache connector (ec_transfer_config); allowed: none"),
        ("watermark_config", object(), "watermarking (watermark_config); allowed: none"),
        ("attention_config.hisparse_config", object(), "HiSparse (attention_config.hisparse_config); allowed: none"),
        ("scheduler_config.async_scheduling", True, "async_scheduling=True; allowed: False"),
    ],
)
def test_features_that_this_platform_cannot_turn_on(
    flag: Flag, monkeypatch: pytest.MonkeyPatch, path: str, value: Any, message: str
) -> None:
    config = flag.config()
    compat.check_supported(config, TargetRowsConfig.from_vllm_config(config))
    *owners, name = path.split(".")
    owner = config
    for part in owners:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(ValueError) as raised:
        compat.check_supported(config, TargetRowsConfig.from_vllm_config(config))
    assert str(raised.value).startswith(METHOD + message)


def test_layers_that_share_a_kv_cache(flag: Flag, edited: Any) -> None:
    model = edited(0, {"num_kv_shared_layers": 2})
    assert flag.refusal(model=model) == METHOD + "target layers that share a KV cache" + DECODER


def test_windowed_layers_need_one_block_table(flag: Flag, edited: Any) -> None:
    model = edited(0, {"layer_types": ["sliding_attention"] + ["full_attention"] * (LAYERS - 1)})
    assert flag.refusal(model=model) == METHOD + (
        "sliding-window or chunked-attention layers in the target under the hybrid KV cache manager; "
        "allowed: disable_hybrid_kv_cache_manager=True"
    )
    flag.config(model=model, disable_hybrid_kv_cache_manager=True)


# Drafters that do not fit.


def test_missing_drafter(flag: Flag, tmp_path: Path) -> None:
    line = flag.refusal({"model": str(tmp_path / "none")})
    assert line.startswith(f"speculative_config: model='{tmp_path / 'none'}' has no readable config.json: ")


@pytest.mark.parametrize("name", ["EagleLlamaForCausalLM", "MedusaModel", "PEagleDraftModel", None])
def test_a_drafter_must_be_an_eagle3_head(flag: Flag, edited: Any, name: str | None) -> None:
    model = edited(1, {"architectures": [name] if name else None})
    line = flag.refusal({"model": model})
    assert line.startswith(f"{METHOD}drafter architecture {name!r} of {model!r}; allowed: Eagle3LlamaForCausalLM, ")


def test_a_plain_name_means_the_eagle3_head_for_it(flag: Flag, edited: Any) -> None:
    flag.config({"model": edited(1, {"architectures": ["LlamaForCausalLM"]})})


def test_speculators_of_another_kind(flag: Flag, edited: Any) -> None:
    model = edited(1, {"speculators_model_type": "dflash"})
    assert (
        flag.refusal({"model": model}) == f"{METHOD}drafter {model!r} of speculators type 'dflash'; allowed: 'eagle3'"
    )


def test_a_plain_model_is_no_drafter(flag: Flag) -> None:
    assert flag.refusal({"model": str(flag.target)}) == METHOD + (
        "a drafter without the tensor 'fc.weight', which every EAGLE-3 head has; "
        f"allowed: 'fc.weight' of shape [{HIDDEN}, {3 * HIDDEN}]"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 32}, f"a drafter with vocab_size=32; allowed: the target's vocabulary ({VOCABULARY})"),
        (
            {"draft_vocab_size": 25},
            f"a drafter with draft_vocab_size=25; allowed: at most the target's vocabulary ({VOCABULARY})",
        ),
        (
            {"hidden_size": 128},
            f"a drafter made for targets of hidden size 128; allowed: the target's hidden size ({HIDDEN})",
        ),
        (
            {"target_hidden_size": 96},
            f"a drafter made for targets of hidden size 96; allowed: the target's hidden size ({HIDDEN})",
        ),
        (
            {"hidden_size": 128, "target_hidden_size": HIDDEN},
            "a drafter of hidden size 128 without embeddings of its own; "
            f"allowed: a checkpoint with 'embed_tokens.weight', or the target's hidden size ({HIDDEN})",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 4, 9]},
            "aux layers (1, 4, 9) (EAGLE-3's default is 2, n/2 and n - 3); "
            f"allowed: distinct layers from 0 to {LAYERS}, the target's number of layers",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 5]}},
            "aux layers (1, 1, 5) (EAGLE-3's default is 2, n/2 and n - 3); "
            f"allowed: distinct layers from 0 to {LAYERS}, the target's number of layers",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 5]},
            f"a drafter with 'fc.weight' of shape [{HIDDEN}, {3 * HIDDEN}]; "
            f"allowed: [{HIDDEN}, {2 * HIDDEN}] (2 aux layers of the target's hidden size {HIDDEN})",
        ),
    ],
)
def test_drafters_that_do_not_fit(flag: Flag, edited: Any, config: dict[str, Any], message: str) -> None:
    assert flag.refusal({"model": edited(1, config)}) == METHOD + message


def test_default_aux_layers_that_coincide(flag: Flag, edited: Any) -> None:
    line = flag.refusal(model=edited(0, {"num_hidden_layers": 6}))
    assert line.startswith(METHOD + "aux layers (2, 3, 3) ")


def test_aux_layers_that_fit(flag: Flag, edited: Any) -> None:
    flag.config({"model": edited(1, {"eagle_aux_hidden_state_layer_ids": [0, 3, LAYERS]})})


def test_a_smaller_draft_vocabulary_needs_its_map(flag: Flag, edited: Any) -> None:
    assert flag.refusal({"model": edited(1, {}, {"d2t": None})}) == METHOD + (
        f"a drafter with draft_vocab_size={DRAFT_VOCABULARY} and no tensor 'd2t'; "
        f"allowed: a checkpoint with 'd2t', or the target's vocabulary ({VOCABULARY})"
    )


def test_tree_topk_is_at_most_the_draft_vocabulary(flag: Flag) -> None:
    flag.config({"tree_topk": DRAFT_VOCABULARY})
    assert flag.refusal({"tree_topk": DRAFT_VOCABULARY + 1}) == METHOD + (
        f"tree_topk={DRAFT_VOCABULARY + 1}; allowed: at most the drafter's draft_vocab_size ({DRAFT_VOCABULARY})"
    )


def test_the_drafter_runs_on_the_targets_ranks(flag: Flag) -> None:
    line = flag.refusal({"draft_tensor_parallel_size": 1}, tensor_parallel_size=2)
    assert line == METHOD + "draft_tensor_parallel_size=1; allowed: tensor_parallel_size (2)"


def test_vllms_own_refusals_are_one_line_too(flag: Flag) -> None:
    assert flag.refusal({"quantization": "fp9"}).startswith("SpeculativeConfig: Unknown quantization method: fp9.")


def test_bad_options_reach_the_user(flag: Flag) -> None:
    line = flag.refusal({"selection": "oracle"})
    assert line.startswith("speculative_config: selection='oracle' is not allowed; allowed: 'draft'")
