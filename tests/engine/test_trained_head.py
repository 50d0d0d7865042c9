# SPDX-License-Identifier: Apache-2.0
"""A head as the recipe trains it is the head that the engine runs: the same rows at every node of its pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_process
import pytest
import scenarios
import torch

from vllm_targetrows.drafters.head import Eagle3Head
from vllm_targetrows.drafters.target import Target
from vllm_targetrows.recording import read

PROMPT = [3, 9, 4, 13, 5, 6, 7]


@pytest.mark.timeout(300)
def test_the_engine_drafts_by_the_rows_that_were_trained(tiny_pair: Any, tmp_path: Path) -> None:
    target = Target(str(tiny_pair.target), dtype=torch.float32)
    head = Eagle3Head.from_target(target, torch.tensor([0, 2, 3, 5, 6, 7, 9, 10, 12, 13, 14, 17, 20, 22]))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.2 * parameter.std(correction=0) * torch.randn_like(parameter)
        head.fc.weight += 0.05 * torch.randn_like(head.fc.weight)
    head.save(tmp_path / "head")
    head = Eagle3Head.load(tmp_path / "head")  # rounded to bfloat16, as the engine reads it

    path = tmp_path / "rounds.parquet"
    options = {"speculative_config": scenarios.target_rows(tmp_path / "head", 6, "draft", depth=4, record=str(path))}
    settings = [{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}]
    result = engine_process.run(scenarios.record, tiny_pair.target, options, [([PROMPT], settings)])
    text = PROMPT + result["answers"][0][0]["sequences"][0]["tokens"]
    rows = read(path).rounds.to_pylist()
    assert len(rows) > 5
    index = {int(token): i for i, token in enumerate(head.draft_tokens)}
    compared = 0
    for row in rows:
        context = text[: row["position"]]
        paths: list[list[int]] = []
        for token, parent in zip(row["pool_token"], row["pool_parent"], strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        for node in range(0, len(paths), 3):
            *chain, token = paths[node]
            tokens = torch.tensor([[*context, *chain]])
            seen = target.see(tokens)
            with torch.no_grad():
                steps = list(head.unroll(target.embedding[tokens], seen.features, len(chain) + 1))
                log_q = head.lm_head(steps[-1][0, len(context) - 2]).log_softmax(-1)
            assert row["pool_log_q"][node] == pytest.approx(float(log_q[index[token]]), abs=2e-3)
            compared += len(chain) > 0
    assert compared > 20


@pytest.mark.timeout(300)
def test_a_checkpoint_of_speculators_loads(tiny_pair: Any) -> None:
    """One made by that library (see ``make_speculators_checkpoint.py``): text is plain vLLM's, drafts are accepted."""
    head = Path(__file__).with_name("speculators_head")
    batches = [([PROMPT, PROMPT[2:], PROMPT[4:]], {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True})]
    plain = engine_process.run(scenarios.answer, tiny_pair.target, {}, batches)
    options = {"speculative_config": scenarios.target_rows(head, 6, "root", depth=4)}
    ours = engine_process.run(scenarios.answer, tiny_pair.target, options, batches)
    assert [a["sequences"] for a in ours["answers"][0]] == [a["sequences"] for a in plain["answers"][0]]
    state = ours["states"][0]
    assert state["rounds"] > 10 and state["accepted_tokens"] > state["rounds"] / 2
