# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with our flag on the embedded pair, over HTTP: concurrent, mixed, aborted and seeded requests."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import Server, serve, vllm

NAME = "smollm2"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def server(target_folder: Path, drafter_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flag = {
        "method": "targetrows",
        "model": str(drafter_folder),
        "num_speculative_tokens": 8,
        "selection": "root",
        "tree_topk": 6,
        "tree_depth": 4,
    }
    arguments = ("--served-model-name", NAME, "--max-model-len", "1024", "--max-num-seqs", "16")
    chunks = ("--max-num-batched-tokens", "320")  # long prompts are prefilled in chunks beside the trees
    with serve(tmp_path_factory.mktemp("server"), target_folder, flag, *arguments, *chunks) as server:
        yield server


def _idle(server: Server) -> None:
    """Nothing runs, waits or lies in the KV cache, and the worker keeps no tree."""
    deadline = time.monotonic() + 30
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any(server.metric(name) for name in names) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert {name: server.metric(name) for name in names} == dict.fromkeys(names, 0.0)
    state: dict[str, Any] = {}
    while time.monotonic() < deadline:
        state = server.state()
        if not (state["requests"] or state["trees"] or state["carried"]):
            return
        time.sleep(0.2)
    raise AssertionError(f"the worker still keeps {state}")


def _answers_correctly(server: Server) -> None:
    answer = server.client().chat.completions.create(model=NAME, messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in (answer.choices[0].message.content or "")


def test_sixteen_at_once_with_mixed_parameters(server: Server) -> None:
    client = server.client()
    wishes: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "top_p": 0.9},
        {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.5},
        {"temperature": 0, "presence_penalty": 1.0, "logprobs": True, "top_logprobs": 3},
        {"temperature": 1, "extra_body": {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}},
        {"temperature": 1, "n": 2, "stop": ["."]},
        {"temperature": 0, "logit_bias": {"260": -5}},
        {"temperature": 0, "extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
    ]

    def ask(i: int) -> Any:
        question = [{"role": "user", "content": f"Count from {i} to {i + 5}, then say something about the number {i}."}]
        return client.chat.completions.create(model=NAME, messages=question, max_tokens=40, **wishes[i % len(wishes)])

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    for i, answer in enumerate(answers):
        assert len(answer.choices) == wishes[i % len(wishes)].get("n", 1)
        assert all(choice.finish_reason in ("stop", "length") for choice in answer.choices)
        assert 0 < answer.usage.completion_tokens <= 40 * len(answer.choices)
    assert {answers[i].choices[0].message.content for i in (7, 15)} <= {"yes", "no"}
    assert all(len(token.top_logprobs) == 3 for token in answers[3].choices[0].logprobs.content)
    assert answers[5].usage.completion_tokens > 0
    _answers_correctly(server)
    _idle(server)
    state = server.state()
    assert state["accepted_tokens"] > 0
    assert state["no_tree"]["structured_output"] > 0


def test_the_same_seed_gives_the_same_text(server: Server) -> None:
    def ask() -> str | None:
        answer = server.client().chat.completions.create(
            model=NAME, messages=QUESTION, temperature=1, seed=17, max_tokens=24
        )
        return answer.choices[0].message.content

    ask()  # its prompt is in the prefix cache from here on
    assert ask() == ask()
    _idle(server)


def test_streams_aborted_half_way(server: Server) -> None:
    client = server.client()

    def stream(i: int) -> tuple[str, bool]:
        """Text of a stream, and whether it was left half-way."""
        text = ""
        with client.completions.create(
            model=NAME,
            prompt=f"Once upon a time, in the year {1900 + i},",
            max_tokens=100,
            temperature=i % 2,
            stream=True,
            extra_body={"ignore_eos": True},
        ) as parts:
            for count, part in enumerate(parts):
                text += part.choices[0].text
                if count == 5 and i % 3:
                    return text, True
        return text, False

    with ThreadPoolExecutor(12) as pool:
        streams = list(pool.map(stream, range(12)))
    assert all(text for text, _ in streams)
    assert [left for _, left in streams] == [bool(i % 3) for i in range(12)]
    _idle(server)
    _answers_correctly(server)


def test_seeded_requests_with_long_prompts_do_not_end_the_engine(server: Server) -> None:
    """In plain vLLM on the CPU, a seeded request whose prompt is prefilled in chunks ends the engine."""
    client = server.client()

    def ask(i: int) -> Any:
        prompt = f"Story {i}. " + "The quick brown fox jumps over the lazy dog. " * 65
        return client.completions.create(
            model=NAME, prompt=prompt, max_tokens=16, temperature=1, seed=i, extra_body={"ignore_eos": True}
        )

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))
    assert all(answer.usage.prompt_tokens > 640 for answer in answers)
    assert all(answer.usage.completion_tokens == 16 for answer in answers)
    _answers_correctly(server)
    _idle(server)


def test_the_rounds_are_in_the_metrics(server: Server) -> None:
    """The worker counts in a process of its own."""
    server.client().chat.completions.create(model=NAME, messages=QUESTION, temperature=0, max_tokens=24)
    text = httpx.get(f"{server.url}/metrics").text
    assert f'vllm:targetrows_rounds_total{{engine="0",model_name="{NAME}",selection="root"}}' in text
    state = server.state()
    assert server.metric("vllm:targetrows_rounds_total") == state["rounds"] > 0
    assert server.metric("vllm:targetrows_tree_nodes_sum") == state["tree_nodes"]
    assert server.metric("vllm:targetrows_accepted_tokens_sum") == state["accepted_tokens"]


def test_bench_serve_completes(server: Server, target_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"Write one sentence about the number {i}."}) + "\n" for i in range(8))
    )
    command = vllm(
        *("bench", "serve", "--base-url", server.url, "--model", NAME, "--tokenizer", str(target_folder)),
        *("--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", "8", "--custom-output-len", "16"),
        *("--max-concurrency", "4", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    )
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 8
    assert result["total_output_tokens"] > 0
    _idle(server)
