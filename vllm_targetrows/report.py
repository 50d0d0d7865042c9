# SPDX-License-Identifier: Apache-2.0
"""From measurements to numbers: sums by prompt, ratios with bootstrap intervals, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_targetrows.measure import RULES, Measurement, best_stock

PHASES = ("draft", "root_pass", "select", "verify", "commit")
RESAMPLES = 10_000


@dataclass(frozen=True)
class Ratio:
    """A ratio of two speeds with its 95 % prompt-bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Row:
    """What the table says about one configuration: tokens per second, and milliseconds per engine step."""

    configuration: str
    speed: float
    speed_with_prompt: float
    to_plain: Ratio | None
    to_stock: Ratio | None
    emitted: float
    round_ms: float
    phase_ms: dict[str, float] = field(default_factory=dict)
    #: Share of the rounds' time outside model forward passes.
    own_share: float | None = None
    nodes: float | None = None
    absent: float | None = None
    #: Share of the answers that are token-identical to plain decoding's.
    identical: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)


def bootstrap_ratio(
    tokens: NDArray[Any],
    seconds: NDArray[Any],
    base_tokens: NDArray[Any],
    base_seconds: NDArray[Any],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Ratio:
    """The ratio of two speeds, each total tokens by total seconds, over the same units in the same order.

    All four arrays have shape [units].  A resample draws units with replacement and takes both configurations' figures
    of each drawn unit, so what a prompt does to both cancels (percentile interval).
    """
    draws = np.random.default_rng(seed).integers(len(tokens), size=(resamples, len(tokens)))

    def ratio(index: Any) -> Any:
        ours = tokens[index].sum(-1) / seconds[index].sum(-1)
        return ours / (base_tokens[index].sum(-1) / base_seconds[index].sum(-1))

    low, high = np.percentile(ratio(draws), [2.5, 97.5])
    return Ratio(float(ratio(np.arange(len(tokens)))), float(low), float(high))


def rows(measurements: Sequence[Measurement], *, stock: str | None = None) -> list[Row]:
    """One row for each configuration, in order of first appearance.

    ``stock`` is the configuration to compare with; without it, the best stock EAGLE-3 of ``measurements``.
    """
    stock = stock or best_stock(measurements)
    by_name: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        by_name.setdefault(measurement.configuration, []).append(measurement)
    return [_row(ms, by_name.get("plain", []), by_name.get(stock or "", [])) for ms in by_name.values()]


def _row(own: list[Measurement], plain: list[Measurement], stock: list[Measurement]) -> Row:
    groups = {m.group for m in own}
    plain, stock = ([m for m in base if m.group in groups] for base in (plain, stock))
    decode_seconds = sum(m.decode_seconds for m in own)
    steps, rounds = (max(sum(getattr(m, name) for m in own), 1) for name in ("decode_steps", "rounds"))
    row = Row(
        configuration=own[0].configuration,
        speed=sum(m.decode_tokens for m in own) / max(decode_seconds, 1e-9),
        speed_with_prompt=sum(m.tokens for m in own) / sum(m.seconds for m in own),
        to_plain=_ratio(own, plain),
        to_stock=_ratio(own, stock),
        emitted=sum(m.round_tokens for m in own) / rounds,
        round_ms=1e3 * decode_seconds / steps,
        identical=_identical(own, plain),
    )
    states = [m.state for m in own if m.state]
    return _with_state(row, states, steps) if states else row


def _with_state(row: Row, states: Sequence[dict[str, Any]], steps: int) -> Row:
    """Add what the plugin's counters say; a ``state`` is their difference over one measurement's decoding."""
    rounds = max(sum(state["rounds"] + sum(state["no_tree"].values()) for state in states), 1)
    phases = {phase: sum(state["phase_seconds"][phase] for state in states) for phase in PHASES}
    forward = sum(sum(state["forward_seconds"].values()) for state in states)
    return replace(
        row,
        phase_ms={phase: 1e3 * seconds / steps for phase, seconds in phases.items()},
        own_share=1 - forward / max(sum(phases.values()), 1e-9),
        nodes=sum(state["tree_nodes"] for state in states) / rounds,
        absent=sum(state["absent"] for state in states) / rounds,
    )


def _unit_sums(own: Iterable[Measurement]) -> dict[int, tuple[int, float]]:
    """Decoded tokens and seconds of each unit, summed over its repeats."""
    sums: dict[int, tuple[int, float]] = {}
    for m in own:
        tokens, seconds = sums.get(m.unit, (0, 0.0))
        sums[m.unit] = (tokens + m.decode_tokens, seconds + m.decode_seconds)
    return sums


def _ratio(own: list[Measurement], base: list[Measurement]) -> Ratio | None:
    ours, theirs = _unit_sums(own), _unit_sums(base)
    # A unit whose every answer is one token has nothing to time.
    units = [u for u in sorted(ours.keys() & theirs.keys()) if min(ours[u][1], theirs[u][1]) > 0]
    if not units:
        return None
    tokens, seconds = np.array([ours[u] for u in units]).T
    base_tokens, base_seconds = np.array([theirs[u] for u in units]).T
    return bootstrap_ratio(tokens, seconds, base_tokens, base_seconds)


def _identical(own: list[Measurement], plain: list[Measurement]) -> float | None:
    """Share of answers equal to plain decoding's of the same prompt, group and repeat."""
    expected = {(m.group, m.unit, m.repeat): m.outputs for m in plain}
    pairs = [
        (answer, reference)
        for m in own
        for answer, reference in zip(m.outputs, expected.get((m.group, m.unit, m.repeat), []), strict=False)
    ]
    return sum(answer == reference for answer, reference in pairs) / len(pairs) if pairs else None


def first_difference(answer: Sequence[int], reference: Sequence[int]) -> int | None:
    """The first position where two token sequences differ; ``None`` when they are equal."""
    for position, (a, b) in enumerate(zip(answer, reference, strict=False)):
        if a != b:
            return position
    return None if len(answer) == len(reference) else min(len(answer), len(reference))


def speed_table(table: Sequence[Row], *, greedy: bool = True, mark: str = "") -> str:
    """The main table.  ``mark`` is put behind the names of stock speculative configurations (a footnote's sign)."""
    header = ["configuration", "tok/s", "x plain [95 %]", "x best stock [95 %]", "emitted", "ms", "tok/s with prompt"]
    if greedy:
        header.append("same as plain")
    lines = []
    for row in table:
        kind = row.configuration.partition(":")[0]
        cells = [
            row.configuration + (mark if kind in ("eagle3", "ngram") else ""),
            f"{row.speed:.1f}",
            str(row.to_plain or "-"),
            str(row.to_stock or "-"),
            f"{row.emitted:.2f}",
            f"{row.round_ms:.1f}",
            f"{row.speed_with_prompt:.1f}",
        ]
        if greedy:
            cells.append("-" if row.identical is None else f"{row.identical:.0%}")
        lines.append(cells)
    return align(header, lines)


def phase_table(table: Sequence[Row]) -> str | None:
    """Milliseconds of each phase of a round, for the configurations that report them."""
    header = ["ms per round", *(p.replace("_", " ") for p in PHASES), "rest", "all", "own work", "nodes", "no node"]
    lines = [
        [
            row.configuration,
            *(f"{row.phase_ms[p]:.2f}" for p in PHASES),
            f"{row.round_ms - sum(row.phase_ms.values()):.2f}",
            f"{row.round_ms:.2f}",
            "-" if row.own_share is None else f"{row.own_share:.1%}",
            f"{row.nodes:.1f}",
            f"{row.absent:.1%}",
        ]
        for row in table
        if row.phase_ms
    ]
    return align(header, lines) if lines else None


def align(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join([cells[0].ljust(widths[0]), *rest]).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, lines)])


def is_ours(name: str) -> bool:
    """Whether a configuration's name is one of the selection rules'."""
    return name.partition(":")[0] in RULES
