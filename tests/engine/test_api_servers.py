# SPDX-License-Identifier: Apache-2.0
"""Our metrics behind several API servers: counted once, whichever of them answers, and from zero after a restart."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import engine_process
import httpx
import psutil
import pytest
import scenarios
from server_process import Server, serve

NAME = "tiny"
SERVERS = 2
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def start(tiny_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    flag = scenarios.target_rows(tiny_pair.drafter, 6, "root_draw")
    arguments = ("--served-model-name", NAME, "--max-model-len", "256", "--max-num-seqs", "8")
    one_thread = {name: engine_process.ENVIRONMENT[name] for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")}

    def start() -> Any:
        return serve(
            *(tmp_path_factory.mktemp("server"), tiny_pair.target, flag, *arguments),
            *("--num-gpu-blocks-override", "256", "--api-server-count", str(SERVERS)),
            environment=one_thread,
        )

    return start


def _metrics(server: Server) -> tuple[int, str]:
    """What ``/metrics`` shows over a connection of its own, and the process at its other end."""
    with httpx.Client() as client, client.stream("GET", f"{server.url}/metrics") as answer:
        here = answer.extensions["network_stream"].get_extra_info("client_addr")
        process = next(c.pid for c in psutil.net_connections("tcp4") if c.raddr == here)
        return process, answer.read().decode()


def _metrics_of_all(server: Server) -> list[str]:
    """What each API server shows."""
    found: dict[int, str] = {}
    deadline = time.monotonic() + 30
    while len(found) < SERVERS and time.monotonic() < deadline:
        found.update([_metrics(server)])
    assert len(found) == SERVERS, f"only {list(found)} answered:\n{server.tail()}"
    return list(found.values())


def _ours(text: str) -> dict[str, float]:
    """Our samples; one that is there twice fails."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^vllm:targetrows_(\S+) (\S+)$", text, re.MULTILINE):
        assert name not in found, f"{name} twice"
        found[name] = float(value)
    return found


def _ask(server: Server, i: int) -> None:
    server.client().completions.create(
        model=NAME, prompt="abcde"[: 1 + i % 5], max_tokens=40, temperature=i % 2, extra_body={"ignore_eos": True}
    )


def test_counted_once_by_every_api_server_and_from_zero_after_a_restart(start: Any) -> None:
    common = f'engine="0",model_name="{NAME}",selection="root_draw"'
    with start() as server:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: _ask(server, i), range(16)))
        state = server.state()
        assert state["rounds"] > 50
        for text in _metrics_of_all(server):
            found = _ours(text)
            assert found[f"rounds_total{{{common}}}"] == state["rounds"]
            assert found[f"tree_nodes_sum{{{common}}}"] == state["tree_nodes"]
            assert found[f"accepted_tokens_sum{{{common}}}"] == state["accepted_tokens"]
            without = {name: value for name, value in found.items() if name.startswith("no_tree_total")}
            assert sum(without.values()) == sum(state["no_tree"].values())
        # While it serves: an API server may notice at shutdown that the engine left before it, with a traceback.
        assert "Traceback" not in server.log.read_text(errors="replace")
    with start() as server:
        for text in _metrics_of_all(server):
            found = _ours(text)
            assert found[f"rounds_total{{{common}}}"] == 0
            assert not any(found.values())
