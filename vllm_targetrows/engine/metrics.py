# SPDX-License-Identifier: Apache-2.0
"""Statistics of the rounds among vLLM's own metrics, at ``/metrics`` and in ``LLM.get_metrics()``.

vLLM's front end shows ``prometheus_client``'s registry; the rounds happen in a worker, mostly in another process.  What
goes between them is prometheus_client's own multiprocess mode: files of values in a directory, written by the worker
and summed by whoever is asked.  Where ``PROMETHEUS_MULTIPROC_DIR`` is set (by vLLM, when there are several API servers)
that is the directory; otherwise the front end makes one for the engine, which ends with it.

Only the first rank of a tensor-parallel group counts.
"""

from __future__ import annotations

import glob
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from prometheus_client import REGISTRY, Counter, Histogram, Metric, values
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from vllm.logger import init_logger

from vllm_targetrows.engine.statistics import PHASES

logger = init_logger(__name__)

PREFIX = "vllm:targetrows_"
SHARED = "PROMETHEUS_MULTIPROC_DIR"
DIRECTORY = "TARGETROWS_METRICS_DIR"
"""Variable that tells the worker where to write."""
TOKENS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 256)
RANKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
REASONS = ("absent", "improbable", "structured_output", "drafter_max_model_len", "not_scheduled")
MATCHES = ("address", "token_only", "none")


class _Reader(Collector):
    """Hands the newest engine's metrics to the front end's registry."""

    def __init__(self) -> None:
        self.directory = ""
        self.owned: tempfile.TemporaryDirectory[str] | None = None

    def describe(self) -> Sequence[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        files = glob.glob(os.path.join(self.directory, f"*{SUFFIX}.db")) if self.directory else []
        yield from MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]


SUFFIX = "_targetrows"
"""Ends the names of our files: prometheus_client may have files of its own for the same process."""
_reader: _Reader | None = None


def publish() -> None:
    """Make the metrics of the engine that is being configured visible in this process, in place of an older one's."""
    global _reader
    if _reader is None:
        _reader = _Reader()
        REGISTRY.register(_reader)
    if shared := os.environ.get(SHARED):
        _reader.directory, _reader.owned = shared, None
    else:
        _reader.owned = tempfile.TemporaryDirectory(prefix="targetrows-metrics-", ignore_cleanup_errors=True)
        _reader.directory = _reader.owned.name
    os.environ[DIRECTORY] = _reader.directory


def withdraw() -> None:
    """The engine that is being configured keeps no metrics (``disable_log_stats``)."""
    os.environ.pop(DIRECTORY, None)
    if _reader is not None:
        _reader.directory, _reader.owned = "", None


@dataclass
class Round:
    """What is counted of one request's round."""

    nodes: int
    accepted: int
    emitted: int
    expected: float  # accepted tokens that the rows let expect
    match: str  # of MATCHES
    agree: bool | None = None  # the drafter's and the target's likeliest first tokens; None: not known here


class RoundMetrics:
    """A worker's metrics.

    Args:
        labels: values of ``model_name``, ``engine`` and ``selection``.
        directory: where the files of values go.
        row_rate: share of the rounds whose retained row is compared with the next root row.
        log_seconds: time between two lines in the log.
    """

    def __init__(self, labels: Mapping[str, str], directory: str, row_rate: float, log_seconds: float) -> None:
        self.row_rate = row_rate
        self._random = random.Random(0)
        self._log_seconds = log_seconds
        self._logged = time.monotonic()
        self._since = _Since()
        names = list(labels)

        def counter(name: str, text: str, *more: str) -> Any:
            metric = Counter(PREFIX + name, text, [*names, *more], registry=None)
            return metric if more else metric.labels(**labels)

        def histogram(name: str, text: str, buckets: Sequence[float], *more: str) -> Any:
            metric = Histogram(PREFIX + name, text, [*names, *more], buckets=buckets, registry=None)
            return metric if more else metric.labels(**labels)

        def each(metric: Any, label: str, allowed: Sequence[str]) -> dict[str, Any]:
            return {value: metric.labels(**labels, **{label: value}) for value in allowed}

        with _files_in(directory):
            self._rounds = counter("rounds", "Rounds with a tree.")
            no_tree = counter("no_tree", "Decoding steps of a request without a tree, and why.", "reason")
            self._no_tree = each(no_tree, "reason", REASONS)
            self._nodes = histogram("tree_nodes", "Nodes of a verified tree.", TOKENS[1:])
            self._accepted = histogram("accepted_tokens", "Tree nodes accepted in a round.", TOKENS)
            self._emitted = histogram("emitted_tokens", "Tokens that a request got from a round.", TOKENS[1:])
            text = "Accepted tokens that the target's rows let expect of a tree: the sum of its path probabilities."
            self._expected = histogram("expected_accepted_tokens", text, TOKENS)
            text = "Next roots whose whole context was scored (address), of which only the last token was, or none."
            self._coverage = each(counter("coverage", text, "match"), "match", MATCHES)
            text = "Total variation distance between a retained row and the next root row, of sampled rounds."
            variation = histogram("row_total_variation", text, SHARES, "match")
            self._variation = each(variation, "match", MATCHES[:2])
            text = "Whether the drafter's and the target's likeliest first tokens are the same."
            agreement = each(counter("first_token_agreement", text, "agree"), "agree", ("true", "false"))
            self._agreement = {True: agreement["true"], False: agreement["false"]}
            text = "Rank of the target's (or the drawn) first token in the pool's first level, where it is in it."
            self._rank = histogram("root_rank", text, RANKS)
            self._absent = counter("root_absent", "First tokens of the target that are not in the pool's first level.")
            text = "Time of a step with rounds, by phase, as the host sees it."
            phase = histogram("phase_seconds", text, SECONDS, "phase")
            self._phases = each(phase, "phase", PHASES)

    def samples_a_row(self) -> bool:
        """Whether this round's retained row is kept for a comparison."""
        return self.row_rate > 0 and self._random.random() < self.row_rate

    def round(self, observed: Round) -> None:
        """Count a round with a tree."""
        self._rounds.inc()
        self._nodes.observe(observed.nodes)
        self._accepted.observe(observed.accepted)
        self._emitted.observe(observed.emitted)
        self._expected.observe(observed.expected)
        self._coverage[observed.match].inc()
        since = self._since
        since.rounds += 1
        since.nodes += observed.nodes
        since.emitted += observed.emitted
        since.expected += observed.expected
        since.covered += observed.match == "address"

    def no_tree(self, reason: str) -> None:
        """Count a decoding step of a request without a tree."""
        self._no_tree[reason].inc()
        self._since.no_tree += 1

    def first_token(self, rank: int | None, agree: bool | None) -> None:
        """Count where in the pool's first level (1, 2, ...; ``None``: not in it) the target's first token was."""
        if rank is None:
            self._absent.inc()
        else:
            self._rank.observe(rank)
        if agree is not None:
            self._agreement[agree].inc()
            self._since.agreed += agree
            self._since.compared += 1

    def variation(self, match: str, distance: float) -> None:
        """Count a distance between a retained row and the next root row."""
        self._variation[match].observe(distance)

    def step(self, phase_seconds: Mapping[str, float]) -> None:
        """Count the phases of a step with rounds, and write to the log when it is time."""
        for phase, seconds in phase_seconds.items():
            self._phases[phase].observe(seconds)
        now = time.monotonic()
        if now - self._logged >= self._log_seconds:
            logger.info("%s", self._since.line(now - self._logged))
            self._logged, self._since = now, _Since()


@dataclass
class _Since:
    """Sums since the last line in the log."""

    rounds: int = 0
    nodes: int = 0
    emitted: int = 0
    expected: float = 0.0
    covered: int = 0
    no_tree: int = 0
    agreed: int = 0
    compared: int = 0

    def line(self, seconds: float) -> str:
        rounds, decodes = max(self.rounds, 1), max(self.rounds + self.no_tree, 1)
        return (
            f"Target rows: Rounds: {self.rounds / seconds:.1f}/s, Without a tree: {100 * self.no_tree / decodes:.1f}%, "
            f"Mean emitted tokens: {self.emitted / rounds:.2f}, Mean tree nodes: {self.nodes / rounds:.1f}, "
            f"Expected accepted tokens: {self.expected / rounds:.2f}, "
            f"First tokens agree: {100 * self.agreed / max(self.compared, 1):.1f}%, "
            f"Next root rows covered: {100 * self.covered / rounds:.1f}%"
        )


def round_metrics(vllm_config: Any, selection: str, row_rate: float) -> RoundMetrics | None:
    """The metrics of this worker; ``None`` when the engine keeps none."""
    import vllm.envs as envs

    directory = os.environ.get(DIRECTORY)
    if not directory:
        return None
    labels = {
        "model_name": str(vllm_config.model_config.served_model_name),
        "engine": str(getattr(vllm_config.parallel_config, "data_parallel_index", 0)),
        "selection": selection,
    }
    return RoundMetrics(labels, directory, row_rate, envs.VLLM_LOG_STATS_INTERVAL)


@contextmanager
def _files_in(directory: str) -> Iterator[None]:
    """Metrics made in here keep their values in files."""
    kept = values.MultiProcessValue(process_identifier=lambda: f"{os.getpid()}{SUFFIX}")  # type: ignore[no-untyped-call]
    with patch.dict(os.environ, {SHARED: directory}), patch.object(values, "ValueClass", kept):
        yield
