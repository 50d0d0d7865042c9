# SPDX-License-Identifier: Apache-2.0
"""Counts and times of the rounds, kept by each worker and read through ``collective_rpc("targetrows_state")``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PHASES = ("draft", "root_pass", "select", "verify", "commit")


class RoundStatistics:
    """Sums over all rounds since the worker started.

    ``phase_seconds`` holds the whole of each phase; ``forward_seconds`` the part of it inside a model's forward pass,
    so that the difference is the plugin's own work.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.emitted_tokens = 0
        self.accepted_tokens = 0
        self.tree_nodes = 0
        self.no_tree: Counter[str] = Counter()
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self.forward_seconds = dict.fromkeys(PHASES, 0.0)
        self._asked = dict(self.phase_seconds)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the ``with`` block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phase_seconds[name] += time.perf_counter() - start

    @contextmanager
    def forward(self, name: str) -> Iterator[None]:
        """Add the time of the ``with`` block to a phase's model time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.forward_seconds[name] += time.perf_counter() - start

    def since_last_time(self) -> dict[str, float]:
        """Seconds of each phase since this was last asked."""
        now, before = dict(self.phase_seconds), self._asked
        self._asked = now
        return {name: seconds - before[name] for name, seconds in now.items()}

    def as_dict(self) -> dict[str, Any]:
        """A plain copy, for sending to the front end."""
        return {
            "rounds": self.rounds,
            "emitted_tokens": self.emitted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "tree_nodes": self.tree_nodes,
            "absent": self.no_tree["absent"],
            "no_tree": dict(self.no_tree),
            "phase_seconds": dict(self.phase_seconds),
            "forward_seconds": dict(self.forward_seconds),
        }
