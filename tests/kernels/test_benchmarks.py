# SPDX-License-Identifier: Apache-2.0
"""The kernels' benchmark runs, small and interpreted, so that it works on the day a GPU is at hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RUN = Path("benchmarks") / "kernels" / "run.py"
OPS = {"tree_mask", "tree_attention", "frontier", "exit_law", "commit"}


def test_every_op_is_checked_and_reported(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, repository / RUN, "--interpret", "--out", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    content = json.loads((tmp_path / "kernels.json").read_text())
    assert {result["op"] for result in content["results"]} == OPS
    assert all(result["passed"] and result["bytes"] > 0 for result in content["results"])
    assert content["not_started"] == 0
    assert (tmp_path / "kernels.svg").read_text().startswith("<svg")


def test_a_kernel_that_disagrees_fails_the_run(repository: Path, tmp_path: Path) -> None:
    """A reference that is off by one token stands in for a broken kernel."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import os, runpy, sys\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "from vllm_targetrows.triton_kernels import exit_law\n"
        "right = exit_law.exit_law_reference\n"
        "exit_law.exit_law_reference = lambda *a: right(*a)._replace(continuation=right(*a).continuation + 1)\n"
        f"sys.argv = ['run.py', '--interpret', '--ops', 'exit_law', 'commit']\n"
        f"runpy.run_path({str(repository / RUN)!r}, run_name='__main__')\n"
    )
    run = subprocess.run([sys.executable, broken], capture_output=True, text=True)
    assert run.returncode == 1
    assert "1 of 2 cases agree" in run.stdout


def test_without_a_gpu_it_says_so(repository: Path) -> None:
    run = subprocess.run([sys.executable, repository / RUN], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.strip() == "run.py: no GPU here; --interpret checks the kernels on the CPU"
