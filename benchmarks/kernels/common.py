# SPDX-License-Identifier: Apache-2.0
"""What the kernels' benchmarks share: a case, its floor, and the device's own bandwidth and matrix rate.

Torch and triton only, so that it runs on a machine with a GPU and nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent


def kernels(name: str) -> ModuleType:
    """Import ``vllm_targetrows.triton_kernels.NAME``; from the checkout where the package is not installed.

    The checkout's folder is loaded under the installed name, never as a top-level ``triton_kernels``.
    """
    package = "vllm_targetrows.triton_kernels"
    if package not in sys.modules and importlib.util.find_spec("vllm_targetrows") is None:
        _load("vllm_targetrows", ROOT / "vllm_targetrows")
        _load(package, ROOT / "triton_kernels")
    return importlib.import_module(f"{package}.{name}")


def _load(name: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


@dataclass
class Prepared:
    """One case with its inputs on the device.

    Attributes:
        runs: the op on several sets of inputs, which the timing goes through in turn, so that no set stays in a cache.
        check: compares the op with its reference; raises ``AssertionError``.
        bytes: bytes that have to move at least, each input read once and each output written once.
        operations: multiplications and additions on the matrix units (0: none).
        others: the same work done otherwise (torch, FlexAttention, ...), on the same inputs.
    """

    runs: Sequence[Callable[[], Any]]
    check: Callable[[], None]
    bytes: int
    operations: int = 0
    others: dict[str, Sequence[Callable[[], Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A named piece of work that is made only when its turn comes, so that memory holds one case at a time."""

    op: str
    name: str
    make: Callable[[torch.device], Prepared]


def rotated(runs: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """A function that calls the next of ``runs`` each time."""
    turn = itertools.cycle(runs)
    return lambda: next(turn)()


def milliseconds(runs: Sequence[Callable[[], Any]], budget_ms: int = 60) -> float:
    """Median time of one call on the GPU."""
    from triton.testing import do_bench

    return float(do_bench(rotated(runs), warmup=15, rep=budget_ms, return_mode="median"))


def graphed(run: Callable[[], Any]) -> Callable[[], Any]:
    """``run`` captured in a CUDA graph: what it costs inside an engine that replays its steps.

    Capture fails when the op synchronises with the host, so this is a check as well.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy, read and written bytes together."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    times = [milliseconds([lambda: target.copy_(source)]) for _ in range(3)]
    return 2 * source.numel() * source.element_size() / (statistics.median(times) * 1e-3)


def matrix_rate(dtype: torch.dtype = torch.bfloat16, size: int = 8192) -> float:
    """Operations per second of a large matrix product."""
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    return 2 * size**3 / (milliseconds([lambda: a @ b]) * 1e-3)


def floor_seconds(prepared: Prepared, bandwidth: float, rate: float) -> float:
    """The larger of what the bytes and what the operations take at the device's own rates."""
    return max(prepared.bytes / bandwidth, prepared.operations / rate)
