# SPDX-License-Identifier: Apache-2.0
"""What every test shares: the environment of the processes, and the folders of models and data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# Kernels run in the interpreter, which is chosen before anything imports triton; vLLM on the CPU does not use it.
os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def target_folder() -> Path:
    """The embedded target, prepared on first use."""
    from vllm_targetrows import embedded

    return embedded.target_folder()


@pytest.fixture(scope="session")
def drafter_folder() -> Path:
    """The embedded drafter."""
    from vllm_targetrows import embedded

    return embedded.drafter_folder()


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """Data that lies beside the repository, or where VLLM_TARGETROWS_SHARED says; the test is skipped without it."""
    folder = Path(os.environ.get("VLLM_TARGETROWS_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no folder of shared data at {folder}; VLLM_TARGETROWS_SHARED can name one")
    return folder
