# SPDX-License-Identifier: Apache-2.0
"""The rounds among vLLM's metrics: what is counted, in whole engines, and how it travels between processes."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import engine_process
import pytest
import scenarios
from prometheus_client import REGISTRY

from vllm_targetrows.engine import metrics
from vllm_targetrows.engine.metrics import DIRECTORY, SHARED, Round, RoundMetrics

LABELS = {"model_name": "m", "engine": "0", "selection": "root"}
ROUND = Round(nodes=4, accepted=1, emitted=2, expected=0.75, match="token_only")
PROMPTS = [[(7 * i + j) % 24 for j in range(3 + i)] for i in range(12)]
SAMPLED = [{"temperature": 1.0, "max_tokens": 120, "ignore_eos": True, "seed": i} for i in range(12)]
MIXED = [{**settings, "temperature": float(i % 2)} for i, settings in enumerate(SAMPLED)]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(SHARED, raising=False)
    monkeypatch.setenv(DIRECTORY, "")
    yield
    metrics.withdraw()


def _value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"vllm:targetrows_{name}", {**LABELS, **labels})


def test_a_workers_counts_reach_the_front_ends_registry() -> None:
    metrics.publish()
    worker = RoundMetrics(LABELS, os.environ[DIRECTORY], row_rate=0.5, log_seconds=60)
    assert _value("rounds_total") == 0 == _value("no_tree_total", reason="absent")
    worker.round(ROUND)
    worker.round(Round(nodes=8, accepted=3, emitted=5, expected=2.5, match="none"))
    worker.no_tree("absent")
    worker.first_token(2, agree=False)
    worker.first_token(None, agree=True)
    worker.variation("token_only", 0.3)
    worker.step(dict.fromkeys(("draft", "root_pass", "select", "verify", "commit"), 0.004))
    assert _value("rounds_total") == 2
    assert (_value("tree_nodes_sum"), _value("tree_nodes_count")) == (12, 2)
    assert (_value("accepted_tokens_sum"), _value("emitted_tokens_sum")) == (4, 7)
    assert _value("expected_accepted_tokens_sum") == 3.25
    assert (_value("accepted_tokens_bucket", le="1.0"), _value("accepted_tokens_bucket", le="3.0")) == (1, 2)
    assert [_value("coverage_total", match=match) for match in metrics.MATCHES] == [0, 1, 1]
    assert [_value("no_tree_total", reason=reason) for reason in metrics.REASONS] == [1, 0, 0, 0, 0]
    assert (_value("root_rank_sum"), _value("root_rank_count"), _value("root_absent_total")) == (2, 1, 1)
    assert [_value("first_token_agreement_total", agree=agree) for agree in ("true", "false")] == [1, 1]
    assert _value("row_total_variation_sum", match="token_only") == 0.3
    assert _value("phase_seconds_sum", phase="verify") == 0.004
    assert 0.3 < sum(worker.samples_a_row() for _ in range(1000)) / 1000 < 0.7


def test_a_new_engine_starts_at_zero_and_an_old_ones_counts_are_gone() -> None:
    metrics.publish()
    old = os.environ[DIRECTORY]
    worker = RoundMetrics(LABELS, old, row_rate=0, log_seconds=60)
    worker.round(ROUND)
    metrics.publish()
    assert os.environ[DIRECTORY] != old and not Path(old).exists()
    worker.round(ROUND)  # an engine that is still there may go on counting
    assert _value("rounds_total") is None
    RoundMetrics(LABELS, os.environ[DIRECTORY], row_rate=0, log_seconds=60)
    assert _value("rounds_total") == 0
    metrics.withdraw()
    assert _value("rounds_total") is None and DIRECTORY not in os.environ


def test_several_api_servers_share_vllms_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    monkeypatch.setenv(SHARED, str(tmp_path))
    metrics.publish()
    worker = RoundMetrics(LABELS, os.environ[DIRECTORY], row_rate=0, log_seconds=60)
    worker.round(ROUND)
    assert get_prometheus_registry().get_sample_value("vllm:targetrows_rounds_total", LABELS) == 1
    assert _value("rounds_total") == 1


def test_the_log_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(metrics.logger, "info", lambda form, *args: lines.append(form % args))
    metrics.publish()
    worker = RoundMetrics(LABELS, os.environ[DIRECTORY], row_rate=0, log_seconds=0)
    for observed in (ROUND, Round(8, 3, 4, 1.25, "address")):
        worker.round(observed)
        worker.first_token(1, agree=observed is ROUND)
    worker.no_tree("absent")
    worker.no_tree("absent")
    worker.step({})
    assert (
        "Without a tree: 50.0%, Mean emitted tokens: 3.00, Mean tree nodes: 6.0, Expected accepted tokens: 1.00, "
        "First tokens agree: 50.0%, Next root rows covered: 50.0%" in lines[0]
    )
    worker.step({})
    assert "Rounds: 0.0/s" in lines[1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", ["draft", "root", "root_draw", "pearl"])
def test_an_engines_metrics_are_what_it_did(tiny_pair: Any, rule: str) -> None:
    options = {"speculative_config": scenarios.target_rows(tiny_pair.drafter, 6, rule, metrics_row_rate=1.0)}
    result = engine_process.run(scenarios.answer, tiny_pair.target, options, [(PROMPTS, SAMPLED), (PROMPTS, MIXED)])
    (state,), found = result["states"], result["metrics"]
    rounds = state["rounds"]
    assert rounds > 300
    assert list(found["labels"]) == [f"{tiny_pair.target},0,{rule}"]
    assert found["rounds"] == {"": rounds}
    assert {reason: count for reason, count in found["no_tree"].items() if count} == state["no_tree"]
    tree_tokens = {name: found[name][""][:2] for name in ("tree_nodes", "accepted_tokens", "emitted_tokens")}
    assert tree_tokens["tree_nodes"] == (rounds, state["tree_nodes"])
    assert tree_tokens["accepted_tokens"] == (rounds, state["accepted_tokens"])
    # A decoding step without a tree emits one token, and the drawn one.
    without = sum(state["no_tree"].values())
    assert 0 <= state["emitted_tokens"] - tree_tokens["emitted_tokens"][1] - without <= without

    # The rows' own expectation and what the verifier then drew.
    count, mean, _ = found["expected_accepted_tokens"][""]
    assert count == rounds
    assert mean == pytest.approx(state["accepted_tokens"], abs=4 * math.sqrt(state["accepted_tokens"]))

    # The exhaustive walk never ends on a scored node; its tokens come again elsewhere in the tree.
    assert found["coverage"]["address"] == 0
    assert found["coverage"]["token_only"] > 0
    assert sum(found["coverage"].values()) == rounds
    count, distance, buckets = found["row_total_variation"]["token_only"]
    assert 0 < count <= found["coverage"]["token_only"]
    assert 0 < distance < count and buckets["1.0"] == count
    assert found["row_total_variation"]["address"][0] == 0

    ranks, _, buckets = found["root_rank"][""]
    absent = found["root_absent"][""]
    assert buckets["3.0"] == ranks > 0 and absent > 0  # three nodes in the first level
    assert sum(found["first_token_agreement"].values()) == ranks + absent
    if rule in ("draft", "root"):
        assert ranks + absent <= rounds
    elif rule == "root_draw":  # under pearl a drawn token of the pool may have nothing below it in the tree
        assert state["no_tree"]["absent"] <= absent
    for phase, (count, seconds, _) in found["phase_seconds"].items():
        assert count > 0 and (seconds > 0 or phase == "root_pass")
    assert state["retained"] == 0


@pytest.mark.timeout(300)
def test_greedy_requests_expect_what_they_accept(tiny_pair: Any) -> None:
    options = {"speculative_config": scenarios.target_rows(tiny_pair.drafter, 6, "draft", metrics_row_rate=1.0)}
    batches: list[scenarios.Batch] = [(PROMPTS, {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True})]
    found = engine_process.run(scenarios.answer, tiny_pair.target, options, batches)["metrics"]
    assert found["expected_accepted_tokens"] == {"": found["accepted_tokens"][""]}
    count, distance, buckets = found["row_total_variation"]["token_only"]
    assert count > 0 and distance == count - buckets["0.0"]  # point masses


@pytest.mark.timeout(300)
def test_an_engine_without_statistics_keeps_no_metrics(tiny_pair: Any) -> None:
    options = {
        "speculative_config": scenarios.target_rows(tiny_pair.drafter, 6, "draft"),
        "disable_log_stats": True,
    }
    assert engine_process.run(scenarios.without_statistics, tiny_pair.target, options, PROMPTS[:2]) == (True, [])
