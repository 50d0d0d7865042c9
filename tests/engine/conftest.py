# SPDX-License-Identifier: Apache-2.0
"""What the tests that start vLLM share."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import tiny


class TinyPair(NamedTuple):
    """The folders of a random target and its EAGLE-3 head."""

    target: Path
    drafter: Path


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """A tiny random target and its EAGLE-3 head, the same in every run."""
    return TinyPair(*tiny.make_tiny_pair(tmp_path_factory.mktemp("tiny")))
