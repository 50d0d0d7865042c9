# SPDX-License-Identifier: Apache-2.0
"""The method's options: what is accepted, what is refused, and in which words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from vllm_targetrows.engine.config import STOCK_OPTIONS, TargetRowsConfig, split_options

OPTIONS = {"method": "targetrows", "model": "drafter", "num_speculative_tokens": 8}


def test_defaults() -> None:
    config, stock = split_options(OPTIONS)
    assert config.model_dump() == {
        "num_speculative_tokens": 8,
        "selection": "draft",
        "tree_topk": 10,
        "tree_depth": 8,
        "tree_min_probability": 0.0,
        "tree_grow_probability": 0.0,
        "metrics_row_rate": 0.01,
        "record": None,
        "record_rate": 1.0,
        "frontier": 0,
        "stopping": "exhaustive",
        "root_row": "separate",
    }
    assert config.pool_size == 710
    assert stock == {"method": "eagle3", "model": "drafter", "num_speculative_tokens": 8}


def test_every_option_is_taken_and_dashes_count_as_underscores() -> None:
    config, stock = split_options(
        {
            **OPTIONS,
            "selection": "root_draw",
            "tree-topk": 4,
            "tree-depth": 3,
            "tree-min-probability": 0.25,
            "tree-grow-probability": 0.5,
            "metrics-row-rate": 1.0,
            "record-rate": 0.5,
            "frontier": 5,
            "stopping": "cap:12",
            "root-row": "covered",
        }
    )
    assert (config.selection, config.tree_topk, config.tree_depth, config.root_row) == ("root_draw", 4, 3, "covered")
    assert (config.frontier, config.stopping, config.scored_nodes, config.record_rate) == (5, "cap:12", 13, 0.5)
    assert stock["num_speculative_tokens"] == 13
    assert (config.tree_min_probability, config.tree_grow_probability) == (0.25, 0.5)
    assert config.pool_size == 4 + 2 * 16


@pytest.mark.parametrize("budget", [1, 255])
@pytest.mark.parametrize("selection", ["draft", "root", "root_draw", "pearl"])
def test_limits_and_rules(budget: int, selection: str) -> None:
    config, stock = split_options({**OPTIONS, "num_speculative_tokens": budget, "selection": selection})
    assert (config.num_speculative_tokens, config.selection) == (budget, selection)
    assert stock["num_speculative_tokens"] == budget


@pytest.mark.parametrize(("topk", "depth"), [(4096, 1), (64, 1), (63, 2), (1, 4096)])
def test_largest_pools(topk: int, depth: int) -> None:
    assert TargetRowsConfig(num_speculative_tokens=8, tree_topk=topk, tree_depth=depth).pool_size <= 4096


def test_stock_options_pass_through() -> None:
    values: dict[str, Any] = {name: f"value of {name}" for name in STOCK_OPTIONS}
    _, stock = split_options({**OPTIONS, **values})
    assert stock == {**values, "method": "eagle3", "num_speculative_tokens": 8}


PROBABILITY = "a number from 0 to below 1"
BUDGET = "an integer from 1 to 255"
RULES = "'draft', 'root', 'root_draw' or 'pearl'"
STOPPING = "'exhaustive', 'sampled_leaf' or 'cap:k' with an integer k of at least 1"
POOL = "allowed: tree_topk + (tree_depth - 1) * tree_topk**2 of at most 4096"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_speculative_tokens": 0}, f"num_speculative_tokens=0 is not allowed; allowed: {BUDGET}"),
        ({"num_speculative_tokens": 256}, f"num_speculative_tokens=256 is not allowed; allowed: {BUDGET}"),
        ({"num_speculative_tokens": "8"}, f"num_speculative_tokens='8' is not allowed; allowed: {BUDGET}"),
        ({"num_speculative_tokens": True}, f"num_speculative_tokens=True is not allowed; allowed: {BUDGET}"),
        ({"num_speculative_tokens": 8.5}, f"num_speculative_tokens=8.5 is not allowed; allowed: {BUDGET}"),
        ({"selection": "oracle"}, f"selection='oracle' is not allowed; allowed: {RULES}"),
        ({"selection": None}, f"selection=None is not allowed; allowed: {RULES}"),
        ({"tree_topk": 0}, "tree_topk=0 is not allowed; allowed: an integer of at least 1"),
        ({"tree_depth": 0}, "tree_depth=0 is not allowed; allowed: an integer of at least 1"),
        ({"tree_depth": 50}, f"tree_topk=10 with tree_depth=50 grows a pool of 4910 nodes; {POOL}"),
        ({"tree_topk": 64, "tree_depth": 2}, f"tree_topk=64 with tree_depth=2 grows a pool of 4160 nodes; {POOL}"),
        ({"tree_min_probability": 1}, f"tree_min_probability=1 is not allowed; allowed: {PROBABILITY}"),
        (
            {"tree_min_probability": -0.1},
            f"tree_min_probability=-0.1 is not allowed; allowed: {PROBABILITY}",
        ),
        ({"tree_grow_probability": 1.5}, f"tree_grow_probability=1.5 is not allowed; allowed: {PROBABILITY}"),
        ({"root_row": "early"}, "root_row='early' is not allowed; allowed: 'separate' or 'covered'"),
        (
            {"root_row": "covered"},
            "root_row='covered' with selection='draft' is not allowed; "
            "allowed with it: selection 'root', 'root_draw' or 'pearl'",
        ),
        (
            {"root_row": "covered", "selection": "root"},
            "root_row='covered' with frontier=0 and stopping='exhaustive' never finds a root row; "
            "allowed: a frontier of at least 1, or stopping 'sampled_leaf' or 'cap:k'",
        ),
        ({"frontier": 255}, "frontier=255 is not allowed; allowed: an integer from 0 to 254"),
        (
            {"frontier": 248},
            "num_speculative_tokens=8 with frontier=248 scores 256 nodes; allowed: at most 255 together",
        ),
        ({"stopping": "cap:0"}, f"stopping='cap:0' is not allowed; allowed: {STOPPING}"),
        ({"stopping": "leaf"}, f"stopping='leaf' is not allowed; allowed: {STOPPING}"),
        ({"record": ""}, "record='' is not allowed; allowed: the path of a file to write"),
        ({"record_rate": 0.0}, "record_rate=0.0 is not allowed; allowed: a number above 0, at most 1"),
        (
            {"record": "a", "stopping": "cap:1"},
            "record with stopping='cap:1' is not allowed; allowed with it: 'exhaustive'",
        ),
        ({"model": ""}, "model='' is not allowed; allowed: name or folder of an EAGLE-3 drafter"),
        ({"model": 3}, "model=3 is not allowed; allowed: name or folder of an EAGLE-3 drafter"),
    ],
)
def test_bad_values_give_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        split_options({**OPTIONS, **change})
    assert str(raised.value) == f"speculative_config: {message}"
    assert not isinstance(raised.value, ValidationError)


@pytest.mark.parametrize("missing", ["num_speculative_tokens", "model"])
def test_missing_options(missing: str) -> None:
    options = {key: value for key, value in OPTIONS.items() if key != missing}
    with pytest.raises(ValueError, match=rf"^speculative_config: {missing}.*; allowed: .*$"):
        split_options(options)


@pytest.mark.parametrize(
    "option",
    [
        "tree_width",  # unknown to everyone
        "attention_backend",
        "disable_padded_drafter_batch",
        "draft_sample_method",
        "enable_adaptive_verification",
        "kv_cache_dtype",
        "num_speculative_tokens_per_batch_size",
        "parallel_drafting",
        "prompt_lookup_max",
        "rejection_sample_method",
        "suffix_decoding_max_tree_depth",
        "synthetic_acceptance_length",
        "target_model_config",
        "tensor_parallel_size",
        "use_heterogeneous_vocab",
        "use_local_argmax_reduction",
    ],
)
def test_options_that_do_not_apply_are_refused_by_name(option: str) -> None:
    with pytest.raises(ValueError) as raised:
        split_options({**OPTIONS, option: 1})
    (line,) = str(raised.value).splitlines()
    assert line.startswith(f"speculative_config: option '{option}' does not apply to method 'targetrows'; allowed: ")
    assert {*STOCK_OPTIONS, "selection", "tree_topk", "num_speculative_tokens"} <= set(line.split(": ")[2].split(", "))


def test_travels_in_additional_config() -> None:
    config, _ = split_options({**OPTIONS, "selection": "pearl", "tree_topk": 3})
    vllm_config = SimpleNamespace(additional_config={"targetrows": config.model_dump()})
    assert TargetRowsConfig.from_vllm_config(vllm_config) == config
    with pytest.raises(ValueError, match="not configured with speculative_config method 'targetrows'"):
        TargetRowsConfig.from_vllm_config(SimpleNamespace(additional_config={}))


def test_is_frozen() -> None:
    config, _ = split_options(OPTIONS)
    with pytest.raises(ValidationError):
        config.tree_topk = 3  # type: ignore[misc]
