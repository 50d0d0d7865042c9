# SPDX-License-Identifier: Apache-2.0
"""Check and time every Triton kernel on the GPU at hand, next to torch, against the floor that the device allows.

Needs torch and triton only.  Without a GPU: ``--interpret`` checks small cases on the CPU, untimed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from html import escape
from pathlib import Path

OPS = ("tree_mask", "tree_attention", "frontier", "exit_law", "commit")
HERE = Path(__file__).resolve().parent


@dataclass
class Result:
    """One case; times in microseconds, ``None`` where it was not timed."""

    op: str
    case: str
    passed: bool
    bytes: int = 0
    operations: int = 0
    floor_us: float | None = None
    time_us: float | None = None
    graph_us: float | None = None
    others_us: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None

    @property
    def efficiency(self) -> float | None:
        """Floor divided by time."""
        return self.floor_us / self.time_us if self.floor_us and self.time_us else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="small cases on the CPU, checked and not timed")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--seconds", type=float, default=270, help="start no further case after this time")
    parser.add_argument("--out", type=Path, help="folder for kernels.json and kernels.svg")
    options = parser.parse_args()
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    sys.path.insert(0, str(HERE))
    import importlib

    import torch

    if not options.interpret and not torch.cuda.is_available():
        print("run.py: no GPU here; --interpret checks the kernels on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.interpret else "cuda")
    start = time.monotonic()
    bandwidth = rate = 0.0
    if not options.interpret:
        from common import copy_bandwidth, matrix_rate

        bandwidth, rate = copy_bandwidth(), matrix_rate()
        print(
            f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} Tflop/s"
        )
    scale = "small" if options.interpret else "full"
    results: list[Result] = []
    skipped = 0
    for op in options.ops:
        for case in importlib.import_module(op).cases(scale):
            if time.monotonic() - start > options.seconds:
                skipped += 1
                continue
            results.append(_run(case, device, bandwidth, rate))
            print(_line(results[-1]), flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        content = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": "interpreter" if options.interpret else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "bandwidth_bytes_per_second": bandwidth,
            "bf16_operations_per_second": rate,
            "seconds": time.monotonic() - start,
            "not_started": skipped,
            "results": [asdict(r) | {"efficiency": r.efficiency} for r in results],
        }
        (options.out / "kernels.json").write_text(json.dumps(content, indent=1) + "\n")
        (options.out / "kernels.svg").write_text(chart(results))
    failed = sum(not r.passed for r in results)
    print(f"{len(results) - failed} of {len(results)} cases agree with their references; {skipped} not started")
    return 1 if failed or not results else 0


def _run(case, device, bandwidth, rate) -> Result:  # type: ignore[no-untyped-def]
    """Check one case and, on a GPU, time it."""
    from common import floor_seconds, graphed, milliseconds

    try:
        prepared = case.make(device)
        prepared.check()
    except Exception as error:  # a kernel that does not compile must not hide the others
        traceback.print_exc()
        return Result(case.op, case.name, False, error=f"{type(error).__name__}: {str(error).splitlines()[:1]}")
    result = Result(case.op, case.name, True, prepared.bytes, prepared.operations)
    if device.type == "cuda":
        result.floor_us = floor_seconds(prepared, bandwidth, rate) * 1e6
        result.time_us = milliseconds(prepared.runs) * 1e3
        try:
            result.graph_us = milliseconds([graphed(run) for run in prepared.runs]) * 1e3
        except RuntimeError as error:
            result.error = f"not captured: {str(error).splitlines()[0]}"
        for name, runs in prepared.others.items():
            try:
                result.others_us[name] = milliseconds(runs) * 1e3
            except Exception as error:
                result.others_us[name] = None
                print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr)
    return result


def _line(r: Result) -> str:
    if not r.passed:
        return f"{r.op:15} {r.case:52} FAILED {r.error}"
    if r.time_us is None:
        return f"{r.op:15} {r.case:52} agrees"
    others = "  ".join(f"{name} {us:.1f}" for name, us in r.others_us.items() if us is not None)
    graph = f"{r.graph_us:8.1f}" if r.graph_us else " " * 8
    return (
        f"{r.op:15} {r.case:52} {r.bytes / 1e6:9.2f} MB {r.operations / 1e9:8.1f} Gop  floor {r.floor_us or 0:8.1f} us "
        f" time {r.time_us:8.1f} us  graph {graph} us  {100 * (r.efficiency or 0):5.1f} %  {others}"
    )


def chart(results: list[Result]) -> str:
    """A bar for each timed case: floor divided by time, in SVG (no plotting library on such a machine)."""
    timed = [r for r in results if r.efficiency is not None]
    height, left, width = 18, 420, 400
    bars = []
    for i, r in enumerate(timed):
        share, top = min(r.efficiency or 0.0, 1.0), 30 + i * height
        bars.append(
            f'<text x="{left - 6}" y="{top + 12}" text-anchor="end">{escape(f"{r.op}: {r.case}")}</text>'
            f'<rect x="{left}" y="{top + 2}" width="{share * width:.1f}" height="{height - 4}" fill="#2a7"/>'
            f'<text x="{left + share * width + 4:.1f}" y="{top + 12}">{100 * share:.0f} % ({r.time_us:.0f} µs)</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 130}" height="{40 + len(timed) * height}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="8" y="18" font-size="13">floor ÷ time (100 % = the bandwidth or matrix rate measured here)</text>'
        + "".join(bars)
        + "</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(main())
