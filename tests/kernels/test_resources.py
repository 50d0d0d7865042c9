# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for the GPUs that people have, without spills, at the shapes that an engine uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RESOURCES = Path("benchmarks") / "kernels" / "resources.py"


@pytest.mark.parametrize("op", ["tree_mask", "tree_attention", "frontier", "exit_law", "commit"])
def test_kernels_compile_and_fit(repository: Path, tmp_path: Path, op: str) -> None:
    out = tmp_path / "resources.json"
    run = subprocess.run(
        [sys.executable, repository / RESOURCES, "--ops", op, "--out", out], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-4000:]
    rows = json.loads(out.read_text())
    assert {row["chip"] for row in rows} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert all(row["fits"] and row["registers"] > 0 for row in rows)


def test_a_kernel_that_spills_is_named(repository: Path, tmp_path: Path) -> None:
    """With one warp, the registers of a small commit do not hold the rows of 255 levels."""
    script = tmp_path / "spilling.py"
    script.write_text(
        "import dataclasses, runpy, sys\n"
        f"module = runpy.run_path({str(repository / RESOURCES)!r})\n"
        "launch = module['commit']('sm_90')['bfloat16, head 128, 255 levels'][0]\n"
        "launch.arguments.update(LEVELS=256, COLUMNS=32)\n"
        "module['OPS']['commit'] = lambda chip: {'too large': [dataclasses.replace(launch, num_warps=1)]}\n"
        "sys.argv = ['resources.py', '--ops', 'commit', '--chips', 'sm_90']\n"
        "sys.exit(module['main']())\n"
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr[-3000:]
    assert "TOO MUCH" in run.stdout and "1 of them spill" in run.stdout
