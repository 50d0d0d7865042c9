# SPDX-License-Identifier: Apache-2.0
"""Recorded rounds of whole engines against what the target says of the same prefixes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import engine_process
import numpy as np
import pytest
import scenarios
import torch
from vllm.engine.arg_utils import EngineArgs

from vllm_targetrows.recording import parts, read
from vllm_targetrows.reranker import Reranker, features, load

PROMPTS = [[(7 * i + j) % 24 for j in range(3 + 5 * i)] for i in range(6)]
SAMPLED = [{"temperature": 1.0, "max_tokens": 60, "ignore_eos": True, "seed": i} for i in range(6)]
MIXED = [{**settings, "temperature": [0.0, 1.0, 0.5][i % 3], "top_k": 5} for i, settings in enumerate(SAMPLED)]


def _recorded(tiny_pair: Any, path: Path, rule: str, batches: list[scenarios.Batch], **more: Any) -> dict[str, Any]:
    more = {"record": str(path), **more}
    options = {"speculative_config": scenarios.target_rows(tiny_pair.drafter, 6, rule, depth=4, **more)}
    return engine_process.run(scenarios.record, tiny_pair.target, options, batches)


def _paths(rounds: dict[str, Any]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(rounds["pool_token"], rounds["pool_parent"], strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", ["draft", "root", "root_draw", "pearl"])
def test_rounds_are_what_the_engine_did(tiny_pair: Any, tmp_path: Path, rule: str) -> None:
    path = tmp_path / "rounds.parquet"
    result = _recorded(tiny_pair, path, rule, [(PROMPTS, SAMPLED)])
    recording = read(path)
    assert recording.settings["selection"] == rule and recording.settings["model"] == str(tiny_pair.target)
    assert parts(path) == []
    rows = recording.rounds.to_pylist()
    (state,) = result["states"]
    assert len(rows) > 100
    verified = [row for row in rows if row["tree"]]
    assert sum(len(row["tree"]) for row in verified) <= state["tree_nodes"]
    assert len(verified) <= state["rounds"] <= len(verified) + 2 * len(PROMPTS)  # a request's last round may be lost

    answers = {
        tuple(prompt): each["sequences"][0]["tokens"]
        for prompt, each in zip(PROMPTS, result["answers"][0], strict=True)
    }
    assert len({row["request"] for row in rows}) == len(PROMPTS)
    for row in rows:
        assert len(row["pool_token"]) == 3 + 3 * 9
        paths = _paths(row)
        start = (row["drawn"],) if row["drawn"] >= 0 else ()
        tree = {paths[node] for node in row["tree"]}
        assert all(path[:-1] in {*tree, start} for path in tree)
        emitted = (*start, *row["emitted"])
        accepted = row["accepted"]
        assert len(row["emitted"]) == accepted + 1
        for n in range(1, accepted + 1):
            assert emitted[: len(start) + n] in tree
        assert emitted not in tree  # exhaustive traversal leaves the tree
        # What was emitted is at this place of one of the answers, or behind its end.
        place = [tokens[row["position"] - len(prompt) :] for prompt, tokens in answers.items()]
        assert any(there and there[: len(emitted)] == list(emitted)[: len(there)] for there in place)

    # The recorded probabilities are those by which the engine drew.
    expected = variance = 0.0
    for row in verified:
        product: list[float] = []
        for p, parent in zip(row["pool_p"], row["pool_parent"], strict=True):
            product.append(p * (product[parent] if parent >= 0 else 1))
        drawn = [i for i, p in enumerate(row["pool_parent"]) if p < 0 and row["pool_token"][i] == row["drawn"]]
        scale = product[drawn[0]] if drawn else 1.0
        expected += sum(product[node] for node in row["tree"]) / scale
        variance += 4
    assert sum(row["accepted"] for row in verified) == pytest.approx(expected, abs=4 * math.sqrt(variance))


@pytest.mark.timeout(300)
def test_probabilities_are_the_targets_own(tiny_pair: Any, tmp_path: Path) -> None:
    """Every recorded number, against plain vLLM's logprobs at the same prefixes."""
    path = tmp_path / "rounds.parquet"
    result = _recorded(tiny_pair, path, "root", [(PROMPTS, MIXED)], record_rate=0.5)
    rows = read(path).rounds.to_pylist()
    settings = {}
    for prompt, setting, each in zip(PROMPTS, MIXED, result["answers"][0], strict=True):
        settings[tuple(prompt)] = (setting, each["sequences"][0]["tokens"])
    contexts = []
    for row in rows:
        found = [
            (prompt, setting, tokens)
            for prompt, (setting, tokens) in settings.items()
            if math.isclose(setting["temperature"], row["temperature"], abs_tol=1e-6)
            and row["emitted"] == tokens[row["position"] - len(prompt) :][: len(row["emitted"])]
            and row["position"] > len(prompt)
        ]
        contexts.append(found)
    unique = [(row, *found[0]) for row, found in zip(rows, contexts, strict=True) if len(found) == 1]
    assert len(unique) > 20
    prefixes, wanted = [], []
    for row, prompt, setting, tokens in unique[:24]:
        context = [*prompt, *tokens[: row["position"] - len(prompt)]]
        paths = [(), *_paths(row)]
        for parent in sorted(set(row["pool_parent"])):
            prefixes.append([*context, *paths[parent + 1]])
            wanted.append((row, parent, setting))
    found_rows = engine_process.run(scenarios.rows_at, tiny_pair.target, prefixes)
    for prefix_row, (row, parent, setting) in zip(found_rows, wanted, strict=True):
        log_p = np.array(prefix_row)
        if parent == -1:
            p = np.exp(log_p)
            assert row["root_entropy"] == pytest.approx(-(p * log_p).sum(), abs=1e-3)
            assert row["root_top_token"][0] == log_p.argmax()
            assert row["root_top_p"] == pytest.approx(np.sort(p)[::-1][:10], abs=1e-4)
        if setting["temperature"] == 0:
            p = (np.arange(24) == log_p.argmax()).astype(float)
        else:
            kept = np.argsort(log_p)[-5:]
            p = np.zeros(24)
            p[kept] = np.exp(log_p[kept] / setting["temperature"])
            p /= p.sum()
        for token, above, value in zip(row["pool_token"], row["pool_parent"], row["pool_p"], strict=True):
            if above == parent:
                assert value == pytest.approx(p[token], abs=1e-3)


@pytest.mark.timeout(300)
def test_a_row_at_the_same_address_is_the_next_root_row(tiny_pair: Any, tmp_path: Path) -> None:
    path = tmp_path / "rounds.parquet"
    _recorded(tiny_pair, path, "draft", [(PROMPTS, SAMPLED)])
    rounds = read(path).rounds.to_pandas()
    same, other = rounds["address_variation"].dropna(), rounds["token_variation"].dropna()
    assert len(same) > 5 and same.max() < 1e-4
    assert len(other) > 20 and other.mean() > 0.1
    # Rows of the last verification at other addresses: some last token is the same, but not the whole context.
    matched = np.concatenate(rounds["token_match_p"].to_list())
    assert 0.05 < np.isfinite(matched).mean() < 1
    assert np.isfinite(np.concatenate(rounds["ancestor_p"].to_list())).all()


@pytest.mark.timeout(300)
def test_recording_changes_no_answer(tiny_pair: Any, tmp_path: Path) -> None:
    batches: list[scenarios.Batch] = [(PROMPTS, MIXED), (PROMPTS, SAMPLED)]
    plain = {"speculative_config": scenarios.target_rows(tiny_pair.drafter, 6, "root_draw", depth=4)}
    expected = engine_process.run(scenarios.answer, tiny_pair.target, plain, batches)
    path = tmp_path / "rounds.parquet"
    recorded = _recorded(tiny_pair, path, "root_draw", batches, record_rate=0.5)
    assert recorded["answers"] == expected["answers"]
    (state,), (other,) = recorded["states"], expected["states"]
    assert state["rounds"] == other["rounds"]
    share = len(read(path).rounds) / (state["rounds"] + sum(state["no_tree"].values()))
    assert 0.3 < share < 0.7


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reranker that was never trained: it chooses other trees than the drafter does."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("reranker") / "reranker.safetensors"
    made = Reranker()
    made.normalise_by(torch.tensor([[-3.0, -4.0, 2.0, -2.0, 0.5, -2.0, 1.0], [-1.0, -1.0, 1.0, -1.0, 0.0, -1.0, 0.0]]))
    for weight in made.layers.parameters():
        weight.data.mul_(3)
    made.save(path)
    return path


@pytest.mark.timeout(300)
def test_the_engine_reranks_as_the_study_does(tiny_pair: Any, tmp_path: Path, reranker: Path) -> None:
    path, model, budget = tmp_path / "rounds.parquet", load(reranker), 6
    _recorded(tiny_pair, path, "rerank", [(PROMPTS, MIXED)], reranker=str(reranker))
    rows = [row for row in read(path).rounds.to_pylist() if row["tree"]]
    assert len(rows) > 60
    others = 0
    for row in rows:
        parents, log_q = row["pool_parent"], row["pool_log_q"]
        above, score, depth = [], [], []
        for node in range(len(parents)):
            above.append(sum(log_q[n] for n in _ancestors(parents, node)[:-1]))
            depth.append(len(_ancestors(parents, node)))
        columns = (torch.tensor(each) for each in (log_q, above, depth, row["token_match_p"], row["ancestor_p"]))
        edges = model.log_p(features(*columns)).tolist()
        score = [sum(edges[n] for n in _ancestors(parents, node)) for node in range(len(parents))]
        best = sorted(range(len(parents)), key=lambda n: -score[n])
        # Two nodes on the border may be as good as equal.
        if score[best[budget - 1]] - score[best[budget]] > 1e-4:
            assert set(row["tree"]) == set(best[:budget])
        draft = [a + q for a, q in zip(above, log_q, strict=True)]
        others += set(row["tree"]) != set(sorted(range(len(parents)), key=lambda n: -draft[n])[:budget])
    assert others > len(rows) / 4


def _ancestors(parents: list[int], node: int) -> list[int]:
    """The node and those above it, root side first."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@pytest.mark.timeout(300)
def test_reranked_trees_change_no_answer(tiny_pair: Any, reranker: Path) -> None:
    greedy: list[scenarios.Batch] = [(PROMPTS, {"temperature": 0.0, "max_tokens": 64})]
    plain = engine_process.run(scenarios.answer, tiny_pair.target, {}, greedy)
    options = {"reranker": str(reranker), "frontier": 3}
    speculative = {"speculative_config": scenarios.target_rows(tiny_pair.drafter, 6, "rerank", **options)}
    reranked = engine_process.run(scenarios.answer, tiny_pair.target, speculative, greedy)
    assert reranked["answers"] == plain["answers"]
    assert reranked["states"][0]["accepted_tokens"] > 0


def _refusal(tiny_pair: Any, rule: str, **more: Any) -> str:
    args = EngineArgs(
        model=str(tiny_pair.target), speculative_config=scenarios.target_rows(tiny_pair.drafter, 6, rule, **more)
    )
    with pytest.raises(ValueError) as raised:
        args.create_engine_config()
    return str(raised.value)


def test_files_are_checked_at_start_up(tiny_pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing, folder = str(tmp_path / "none"), str(tmp_path)
    refused = _refusal(tiny_pair, "rerank", reranker=missing)
    assert refused == f"speculative_config: reranker: no reranker at {missing!r}; allowed: a file that the study saved"
    refused = _refusal(tiny_pair, "draft", record=folder)
    assert refused == f"speculative_config: record={folder!r} is not allowed; allowed: a file to write"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "record needs pyarrow: pip install" in _refusal(tiny_pair, "draft", record=missing)
