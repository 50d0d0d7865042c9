# SPDX-License-Identifier: Apache-2.0
"""A real ``vllm serve`` with our method, in processes of its own, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

START_SECONDS = 600


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=240, max_retries=0)

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels; every call opens a connection of its own."""
        text = httpx.get(f"{self.url}/metrics").text
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def state(self) -> dict[str, Any]:
        """What the worker keeps at this moment (an endpoint of vLLM's development mode)."""
        answer = httpx.post(f"{self.url}/collective_rpc", json={"method": "targetrows_state"}, timeout=30)
        answer.raise_for_status()
        state: dict[str, Any] = answer.json()["results"][0]
        return state

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


def vllm(*arguments: str) -> list[str]:
    """The command line of vLLM beside this Python."""
    return [str(Path(sys.executable).parent / "vllm"), *arguments]


@contextlib.contextmanager
def serve(
    folder: Path,
    target: Path,
    speculative_config: Mapping[str, Any],
    *arguments: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Serve ``target`` on a free port, with its log in ``folder``; all its processes are ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = vllm(
        *("serve", str(target), "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--speculative-config", json.dumps(speculative_config)),
        *arguments,
    )
    variables = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        **(environment or {}),
    }
    log = folder / "log"
    with log.open("wb") as output:
        # Its own folder: the repository's root would put triton_kernels/ on the path of vLLM's processes.
        process = subprocess.Popen(
            command, env=variables, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        _wait_until_healthy(server)
        yield server
        assert process.poll() is None, f"the server died:\n{server.tail()}"
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.process.poll() is None, f"the server did not start:\n{server.tail()}"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health", timeout=5).is_success:
                return
        time.sleep(0.5)
    raise AssertionError(f"the server is not healthy after {START_SECONDS} s:\n{server.tail()}")
