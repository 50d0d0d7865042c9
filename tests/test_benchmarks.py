# SPDX-License-Identifier: Apache-2.0
"""The parts of the benchmark and of the demo that need no engine: options, grouping, statistics and tables."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import decode
import numpy as np
import pytest

from vllm_targetrows import demo, report
from vllm_targetrows.engine.timed import difference
from vllm_targetrows.measure import Configuration, Measurement, Settings, best_stock, matrix_dtype


def _measurement(configuration: str, unit: int = 0, tokens: int = 10, seconds: float = 1.0, **more: Any) -> Measurement:
    values: dict[str, Any] = {
        "group": 0,
        "repeat": 0,
        "questions": [unit],
        "tokens": tokens + 1,
        "seconds": seconds + 0.5,
        "decode_tokens": tokens,
        "decode_seconds": seconds,
        "decode_steps": tokens,
        "rounds": tokens,
        "round_tokens": tokens,
        "outputs": [list(range(tokens))],
        "texts": [""],
    }
    return Measurement(configuration=configuration, unit=unit, **(values | more))


# ------------------------------------------------------------------ configurations and settings


def test_a_configuration_s_short_options_become_the_flag_s_keys() -> None:
    assert Configuration.parse("draft:B=16,topk=8,depth=4,root_row=separate", "D").speculative_config == {
        "method": "targetrows",
        "model": "D",
        "selection": "draft",
        "num_speculative_tokens": 16,
        "tree_topk": 8,
        "tree_depth": 4,
        "root_row": "separate",
    }
    assert Configuration.parse("eagle3:k=3", "D").speculative_config == {
        "method": "eagle3",
        "model": "D",
        "num_speculative_tokens": 3,
    }
    assert Configuration.parse("ngram", "D").speculative_config["method"] == "ngram"  # type: ignore[index]
    assert Configuration.parse("plain", "D").speculative_config is None


@pytest.mark.parametrize("text", ["plain:k=1", "eagle", "draft:B", "draft:B=", "draft:=3", ""])
def test_a_wrong_configuration_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="configuration '"):
        Configuration.parse(text, "D")


def test_only_stock_speculation_gets_the_corrected_worker_and_no_plugin(tmp_path: Path) -> None:
    settings = Settings("T", cpus=(0, 1), stock_worker=("module.Worker", tmp_path))
    plain, stock, ours = (Configuration.parse(text, "D") for text in ("plain", "eagle3", "root"))
    assert settings.engine_arguments(stock)["worker_cls"] == "module.Worker"
    assert "worker_cls" not in settings.engine_arguments(plain)
    assert "worker_cls" not in settings.engine_arguments(ours)
    assert settings.environment(stock)["PYTHONPATH"] == str(tmp_path)
    assert settings.environment(stock)["VLLM_PLUGINS"] == ""
    assert "VLLM_PLUGINS" not in settings.environment(ours)


def test_all_engines_share_threads_and_modes() -> None:
    settings = Settings("T", cpus=(0, 2), eager=False, concurrency=4)
    environments = [settings.environment(Configuration.parse(text, "D")) for text in ("plain", "eagle3", "draft")]
    for environment in environments:
        environment.pop("VLLM_PLUGINS", None)
    assert environments[0] == environments[1] == environments[2]
    assert environments[0]["OMP_NUM_THREADS"] == "2"
    assert environments[0]["VLLM_CPU_OMP_THREADS_BIND"] == "0,2"
    arguments = settings.engine_arguments(Configuration.parse("plain", "D"))
    assert arguments["enforce_eager"] is False
    assert arguments["max_num_seqs"] == 4
    assert arguments["enable_prefix_caching"] is False


@pytest.mark.parametrize(
    ("flags", "dtype"), [("fma avx2", "float32"), ("avx2 avx512f avx512_bf16", "bfloat16"), ("asimd bf16", "bfloat16")]
)
def test_bfloat16_is_chosen_where_it_is_fast(tmp_path: Path, flags: str, dtype: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    assert matrix_dtype(tmp_path / "cpuinfo") == dtype


# ------------------------------------------------------------------ the command line


def test_the_default_command_line_is_valid() -> None:
    options = decode.parse_arguments([])
    assert options.name == "decode-eager-c1-t0"
    assert options.configs[0] == "plain"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--configs", "plain", "plain"],
        ["--configs", "draft:B"],
        ["--prompts", "0"],
        ["--prompts", "3", "--concurrency", "4"],
        ["--mode", "fast"],
    ],
)
def test_a_wrong_command_line_ends_with_a_usage_message(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit):
        decode.parse_arguments(arguments)
    assert "usage:" in capsys.readouterr().err


def test_every_beginning_of_the_prompts_is_spread_over_the_categories(tmp_path: Path) -> None:
    sizes = {"a": 10, "b": 3, "c": 10}
    questions = [
        {"question_id": f"{category}{i}", "category": category, "turns": ["?"]}
        for category, size in sizes.items()
        for i in range(size)
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in questions))
    order = list(decode.spread(file))
    assert [q["category"] for q in order[:9]] == ["a", "b", "c"] * 3
    assert sorted(q["question_id"] for q in order) == sorted(q["question_id"] for q in questions)
    assert [q["question_id"] for q in order if q["category"] == "a"][:3] == ["a0", "a7", "a1"]


def test_later_groups_leave_room_for_plain_and_the_best_stock() -> None:
    names = ["plain", "eagle3:k=1", "draft", "eagle3:k=2", "root", "pearl", "root_draw", "ngram"]
    assert decode.groups(names, 20) == [
        ["plain", "eagle3:k=1", "eagle3:k=2", "draft", "root", "pearl", "root_draw", "ngram"]
    ]
    assert decode.groups(names, 4) == [
        ["plain", "eagle3:k=1", "eagle3:k=2", "draft"],
        ["root", "pearl"],
        ["root_draw", "ngram"],
    ]
    assert decode.groups(["draft", "root"], 1) == [["draft"], ["root"]]


# ------------------------------------------------------------------ what an engine's answer means


def test_decoding_begins_when_every_request_has_its_first_token() -> None:
    replies = [
        {"tokens": [1, 2, 3, 4], "text": "x", "steps": [1, 2, 4], "arrivals": [1.0, 2.0, 4.0], "counts": [1, 2, 1]},
        {"tokens": [5, 6, 7], "text": "y", "steps": [2, 3], "arrivals": [2.25, 3.0], "counts": [2, 1]},
    ]
    measurement = Measurement.of(
        {"seconds": 4.5, "replies": replies, "state": None},
        configuration="plain",
        group=0,
        unit=0,
        repeat=0,
        questions=[1, 2],
    )
    assert measurement.tokens == 7
    assert measurement.decode_tokens == 2  # of steps 3 and 4
    assert measurement.decode_seconds == 4.0 - 2.25
    assert measurement.decode_steps == 2
    assert (measurement.rounds, measurement.round_tokens) == (3, 4)
    assert measurement.outputs == [[1, 2, 3, 4], [5, 6, 7]]


def test_the_difference_of_counters_counts_new_keys_from_zero() -> None:
    after = {"rounds": 5, "no_tree": {"a": 1, "b": 2}, "phase_seconds": {"draft": 1.5}}
    before = {"rounds": 3, "no_tree": {"a": 1}, "phase_seconds": {"draft": 1.0}}
    assert difference(after, before) == {"rounds": 2, "no_tree": {"a": 0, "b": 2}, "phase_seconds": {"draft": 0.5}}


# ------------------------------------------------------------------ statistics


def test_the_ratio_is_of_totals_not_a_mean_of_ratios() -> None:
    ratio = report.bootstrap_ratio(np.array([10, 90]), np.array([1.0, 3.0]), np.array([10, 90]), np.array([2.0, 8.0]))
    assert ratio.value == pytest.approx(2.5)
    assert (ratio.low, ratio.high) == pytest.approx((2.0, 8 / 3))


def test_the_interval_is_paired_by_prompt() -> None:
    """Prompts whose speeds differ tenfold, every one of them 1.2 times as fast: the interval has no width."""
    seconds = np.geomspace(0.1, 1.0, 12)
    tokens = np.full(12, 50)
    ratio = report.bootstrap_ratio(tokens, seconds / 1.2, tokens, seconds)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((1.2, 1.2, 1.2))


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    hits = 0
    for trial in range(300):
        tokens = generator.integers(20, 120, size=40)
        base = tokens * 0.02
        seconds = base / (1.3 * generator.lognormal(0, 0.2, size=40))
        truth = 1.3 / np.exp(0.5 * 0.2**2)  # E[1 / lognormal]
        ratio = report.bootstrap_ratio(tokens, seconds, tokens, base, resamples=400, seed=trial)
        hits += ratio.low <= truth <= ratio.high
    assert 0.89 <= hits / 300 <= 0.99


def test_the_best_stock_is_the_fastest_eagle3() -> None:
    measurements = [
        _measurement("plain", seconds=0.1),
        _measurement("ngram:k=4", seconds=0.1),
        _measurement("eagle3:k=1", seconds=0.5),
        _measurement("eagle3:k=2", seconds=0.4),
        _measurement("eagle3:k=2", unit=1, seconds=0.4),
    ]
    assert best_stock(measurements) == "eagle3:k=2"
    assert best_stock(measurements[:2]) is None


def test_a_configuration_is_compared_within_its_own_group() -> None:
    """The machine was twice as slow in the second group; the first group's plain run must not count there."""
    measurements = [
        _measurement("plain", seconds=1.0),
        _measurement("draft", seconds=0.5),
        _measurement("plain", seconds=2.0, group=1),
        _measurement("root", seconds=1.0, group=1),
    ]
    rows = {row.configuration: row for row in report.rows(measurements)}
    assert rows["draft"].to_plain is not None and rows["draft"].to_plain.value == pytest.approx(2.0)
    assert rows["root"].to_plain is not None and rows["root"].to_plain.value == pytest.approx(2.0)
    assert rows["plain"].speed == pytest.approx(20 / 3.0)


def test_repeats_of_a_prompt_are_one_unit_of_the_bootstrap() -> None:
    measurements = [
        _measurement(name, unit=unit, repeat=repeat, seconds=seconds)
        for unit in (0, 1)
        for repeat, factor in ((0, 0.5), (1, 1.5))
        for name, seconds in (("plain", 1.0), ("draft", factor))
    ]
    ratio = next(row for row in report.rows(measurements) if row.configuration == "draft").to_plain
    assert ratio is not None
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((1.0, 1.0, 1.0))


def test_identical_answers_are_counted_prompt_by_prompt() -> None:
    measurements = [
        _measurement("plain", questions=[1, 2], outputs=[[1, 2], [3]]),
        _measurement("draft", questions=[1, 2], outputs=[[1, 2], [4]]),
    ]
    rows = {row.configuration: row for row in report.rows(measurements)}
    assert rows["draft"].identical == 0.5
    assert rows["plain"].identical == 1.0
    assert report.rows(measurements[1:])[0].identical is None


def test_phases_and_counts_come_from_the_plugin_s_counters() -> None:
    state = {
        "rounds": 8,
        "no_tree": {"absent": 2},
        "absent": 2,
        "tree_nodes": 60,
        "phase_seconds": {"draft": 0.2, "root_pass": 0.0, "select": 0.1, "verify": 0.6, "commit": 0.1},
        "forward_seconds": {"draft": 0.15, "verify": 0.55},
    }
    row = report.rows([_measurement("root_draw", seconds=1.1, state=state, round_tokens=25)])[0]
    assert row.phase_ms == pytest.approx({"draft": 20, "root_pass": 0, "select": 10, "verify": 60, "commit": 10})
    assert row.own_share == pytest.approx(0.3)
    assert (row.nodes, row.absent, row.emitted) == (6.0, 0.2, 2.5)
    assert row.round_ms == pytest.approx(110)


@pytest.mark.parametrize(
    ("answer", "reference", "position"),
    [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([], [], None), ([2], [1], 0)],
)
def test_first_difference(answer: list[int], reference: list[int], position: int | None) -> None:
    assert report.first_difference(answer, reference) == position


# ------------------------------------------------------------------ what is printed


def test_the_tables_show_every_configuration_aligned() -> None:
    rows = report.rows([_measurement("plain"), _measurement("eagle3:k=2", seconds=0.8), _measurement("draft")])
    table = report.speed_table(rows, mark=" *").splitlines()
    assert [line.split("  ")[0] for line in table[2:]] == ["plain", "eagle3:k=2 *", "draft"]
    assert len({len(line) for line in table}) == 1
    assert "1.250 [1.250, 1.250]" in table[3]
    assert report.phase_table(rows) is None
    with_phases = [dataclasses.replace(rows[2], phase_ms=dict.fromkeys(report.PHASES, 1.0), nodes=8.0, absent=0.0)]
    phases = report.phase_table(with_phases)
    assert phases is not None and "root pass" in phases and "95.00" in phases  # 100 ms a round less five phases


def test_at_temperature_above_0_no_texts_are_compared() -> None:
    rows = report.rows([_measurement("plain")])
    assert "same as plain" in report.speed_table(rows)
    assert "same as plain" not in report.speed_table(rows, greedy=False)


def test_the_results_hold_no_path_of_the_machine(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", ["decode.py", "--prompts", "3"])
    folder = tmp_path / "models" / "target"
    settings = Settings(str(folder), cpus=(0,), stock_worker=("module.Worker", tmp_path))
    run = decode.Run(measurements=[_measurement("plain"), _measurement("draft", outputs=[[0, 5]])])
    run.idle_cpu.append(0.0)
    rows = report.rows(run.measurements)
    results = decode.results(settings, run, rows, None, decode.LawCheck(True, "fine"))
    text = json.dumps(results)
    assert str(tmp_path) not in text and str(decode.ROOT) not in text
    assert results["measurements"][1]["first_difference_from_plain"] == [1]
    decode.chart(results, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 5_000


def test_the_demo_says_how_many_texts_agree(capsys: Any) -> None:
    measurements = []
    for number in range(len(demo.QUESTIONS)):
        measurements.append(_measurement("plain", unit=number, texts=["A text."]))
        changed = {"outputs": [[7]]} if number == 0 else {}
        measurements.append(_measurement(demo.TREE, unit=number, texts=["A text."], seconds=0.5, **changed))
    text = demo.speeds(measurements, "bfloat16")
    assert f"{len(demo.QUESTIONS) - 1} of {len(demo.QUESTIONS)} answers" in text
    assert "2.000 [2.000, 2.000]" in text
    assert demo.answers(measurements).count("A text.") == demo.SHOWN


def test_a_demo_without_a_model_fails_with_one_line(monkeypatch: Any, capsys: Any) -> None:
    def missing() -> Path:
        raise demo.EmbeddedModelError("no model")

    monkeypatch.setattr(demo, "target_folder", missing)
    assert demo.main([]) == 1
    assert capsys.readouterr().err == "error: no model\n"
