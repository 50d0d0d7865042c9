# SPDX-License-Identifier: Apache-2.0
"""The study's charts, one PNG each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from vllm_targetrows.study.bootstrap import Estimate
from vllm_targetrows.study.estimates import telling_sets
from vllm_targetrows.study.quantities import BUDGETS, CANDIDATES, REPORTED
from vllm_targetrows.study.reranking import METHODS

matplotlib.use("Agg")

#: A rule's colour is the same in all charts (Okabe and Ito's palette, told apart by the colour-blind too).
COLOURS = {
    "draft": "#555555",
    "root": "#0072B2",
    "root_draw": "#D55E00",
    "top_first": "#E69F00",
    "oracle": "#009E73",
    "pearl": "#CC79A7",
}
LABELS = {
    "draft": "draft (= pearl)",
    "top_first": "root_draw, top token instead of a drawn one",
}
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.dpi": 150,
}


def charts(numbers: dict[str, Any], folder: Path, prefix: str) -> dict[str, Path]:
    """Draw a group's charts.

    Args:
        numbers: of ``estimates.study``, with the reranker's under ``reranker``.
        prefix: of the files' names.

    Returns:
        The files by chart; a chart without anything to show is left out.
    """
    from matplotlib import pyplot

    drawn: dict[str, Callable[[dict[str, Any]], Any]] = {
        "accepted": _accepted,
        "ratio": _ratio,
        "coverage": _coverage,
        "gains": _gains,
        "tasks": _tasks,
        "variation": _variation,
        "reranker": _reranker,
    }
    files = {}
    with matplotlib.rc_context(STYLE):
        for name, draw in drawn.items():
            figure = draw(numbers)
            if figure is None:
                continue
            files[name] = folder / f"{prefix}-{name}.png"
            figure.savefig(files[name])
            pyplot.close(figure)
    return files


def _subplots(columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=size, layout="constrained", squeeze=False, **options)
    return figure, axes[0]


def _curve(axes: Any, curve: Sequence[Estimate], colour: str, label: str, percent: bool = False) -> None:
    value, low, high = (np.array([getattr(each, part) for each in curve]) for part in ("value", "low", "high"))
    if percent:
        value, low, high = ((part - 1) * 100 for part in (value, low, high))
    budgets = np.arange(1, len(curve) + 1)
    # Of greedy rounds root and root_draw are one line.
    style = (0, (3, 2)) if label == "root" else "-"
    axes.plot(budgets, value, color=colour, label=label, linewidth=1.6, linestyle=style)
    axes.fill_between(budgets, low, high, color=colour, alpha=0.15, linewidth=0)


def _budget_axis(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, BUDGETS)
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    axes.minorticks_off()
    axes.set_xlabel("node budget B")


def _accepted(numbers: dict[str, Any]) -> Any:
    figure, (axes,) = _subplots(1, (6.4, 4.2))
    for rule in ("oracle", "root_draw", "root", "draft", "top_first"):
        _curve(axes, numbers["accepted"][rule], COLOURS[rule], LABELS.get(rule, rule))
    _budget_axis(axes)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("expected accepted tokens a round")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _ratio(numbers: dict[str, Any]) -> Any:
    figure, panels = _subplots(2, (8.2, 3.5))
    for axes, rules in zip(panels, (("oracle", "root"), ("root_draw",)), strict=True):
        for rule in rules:
            _curve(axes, numbers["ratio"][f"{rule}/draft"], COLOURS[rule], rule, percent=True)
        axes.axhline(0, color=COLOURS["draft"], linewidth=1)
        _budget_axis(axes)
        axes.legend(loc="best")
    panels[0].set_ylabel("expected accepted, %")
    panels[0].set_title("over draft", loc="left")
    panels[1].set_title("over draft and pearl", loc="left")
    return figure


def _with_errors(values: Sequence[Estimate], scale: float) -> tuple[Any, Any]:
    """Values ``[K]`` and their intervals as distances ``[2, K]`` below and above."""
    ends = np.array([[each.value - each.low, each.high - each.value] for each in values]).T * scale
    return np.array([each.value for each in values]) * scale, np.nan_to_num(ends.clip(min=0))


def _percent_over(ratios: Sequence[Estimate]) -> tuple[Any, Any]:
    return _with_errors([Estimate(each.value - 1, each.low - 1, each.high - 1) for each in ratios], 100)


def _bars(axes: Any, at: Any, ratios: Sequence[Estimate], **options: Any) -> None:
    heights, errors = _percent_over(ratios)
    axes.bar(at, heights, yerr=errors, error_kw={"elinewidth": 1, "capsize": 2}, **options)


def _coverage(numbers: dict[str, Any]) -> Any:
    names = {"candidates": f"{CANDIDATES} best of the pool", "frontier": "whole frontier", "pool": "whole pool"}
    colours = {"candidates": "#D55E00", "frontier": "#009E73", "pool": "#009E73"}
    figure, panels = _subplots(len(REPORTED), (8.2, 3.4), sharex=True)
    for axes, budget in zip(panels, REPORTED, strict=True):
        sets = telling_sets(numbers, budget)
        del sets["tree"]
        at = np.arange(len(sets))
        value, errors = _with_errors([each["coverage"] for each in sets.values()], 100)
        own = [colours.get(name, "#0072B2") for name in sets]
        axes.barh(at, value, xerr=errors, color=own, error_kw={"elinewidth": 1, "capsize": 2})
        labels = [names.get(name, f"{name.removeprefix('best ')} of the frontier") for name in sets]
        axes.set_yticks(
            at, [f"{label} ({each['scored'].value:.0f})" for label, each in zip(labels, sets.values(), strict=True)]
        )
        axes.invert_yaxis()
        axes.set_title(f"tree of {budget} nodes", loc="left")
        axes.set_xlabel("covered next root rows, %")
        axes.grid(axis="y", visible=False)
    figure.supylabel("scored with the tree (all scored prefixes)", fontsize=9)
    return figure


def _gains(numbers: dict[str, Any]) -> Any:
    figure, panels = _subplots(2, (8.2, 3.4), sharey=True, width_ratios=[2, 5])
    agreement = [numbers["first_token"][each] for each in ("agree", "differ")]
    fifths = numbers["entropy"]["quintiles"]
    rows = ((agreement, ["same top\nfirst token", "another"]), (fifths, [f"{each['entropy']:.2f}" for each in fifths]))
    for axes, (subsets, labels) in zip(panels, rows, strict=True):
        at = np.arange(len(subsets))
        bars = [(rule, budget) for rule in ("root", "root_draw") for budget in REPORTED]
        for place, (rule, budget) in enumerate(bars):
            ratios = [each[str(budget)][f"{rule}/draft"] for each in subsets]
            style = {"color": COLOURS[rule], "alpha": 1.0 if budget == REPORTED[0] else 0.5, "width": 0.2}
            _bars(axes, at + (place - 1.5) * 0.2, ratios, label=f"{rule}, B = {budget}", **style)
        axes.set_xticks(at, labels)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(axis="x", visible=False)
    panels[0].set_ylabel("expected accepted over draft, %")
    panels[0].set_title("by first-token agreement", loc="left")
    panels[1].set_title("by entropy of the root row (mean of each fifth, nats)", loc="left")
    panels[1].legend(loc="best", ncols=2)
    return figure


def _tasks(numbers: dict[str, Any]) -> Any:
    from matplotlib.lines import Line2D

    tasks = numbers["tasks"]
    figure, panels = _subplots(2, (8.2, 1.5 + 0.32 * len(tasks)), sharey=True)
    for axes, rule in zip(panels, ("root", "root_draw"), strict=True):
        for budget, shift, filled in zip(REPORTED, (-0.12, 0.12), (True, False), strict=True):
            value, errors = _percent_over([each[str(budget)][f"{rule}/draft"] for each in tasks.values()])
            axes.errorbar(
                value,
                np.arange(len(tasks)) + shift,
                xerr=errors,
                fmt="o",
                color=COLOURS[rule],
                markerfacecolor=COLOURS[rule] if filled else "white",
                markersize=5,
                capsize=2,
                elinewidth=1,
            )
        axes.axvline(0, color=COLOURS["draft"], linewidth=1)
        axes.set_title(f"{rule} over draft", loc="left")
        axes.set_xlabel("expected accepted, %")
        axes.grid(axis="y", visible=False)
        axes.margins(y=0.5 / len(tasks))
    panels[0].set_yticks(np.arange(len(tasks)), [f"{name} ({each['prompts']} prompts)" for name, each in tasks.items()])
    panels[0].invert_yaxis()
    # The grey ones stand for both panels' colours.
    handles = [
        Line2D([], [], color="#555555", marker="o", linewidth=1, markerfacecolor=fill) for fill in ("#555555", "white")
    ]
    figure.legend(handles, [f"B = {budget}" for budget in REPORTED], loc="outside lower center", ncols=2)
    return figure


def _variation(numbers: dict[str, Any]) -> Any:
    kinds = {"address": ("whole context matches", "#009E73"), "token": ("only the last token matches", "#D55E00")}
    if not any(numbers["variation"][kind]["rounds"] for kind in kinds):
        return None
    figure, panels = _subplots(2, (8.2, 3.1))
    for axes, (kind, (label, colour)) in zip(panels, kinds.items(), strict=True):
        histogram, rounds = numbers["variation"][kind]["histogram"], numbers["variation"][kind]["rounds"]
        edges = np.array(histogram["edges"])
        axes.bar(
            edges[:-1], np.array(histogram["rounds"]) / max(rounds, 1) * 100, np.diff(edges), align="edge", color=colour
        )
        mean = numbers["variation"][kind]["mean"].value
        if not np.isnan(mean):
            axes.axvline(mean, color="black", linewidth=1, linestyle="--", label=f"mean {mean:.3f}")
            axes.legend(loc="best")
        axes.set_title(f"{label} ({rounds} rounds)", loc="left")
        axes.set_xlim(0, edges[-1])
        axes.set_xlabel("total variation to the next root row")
    panels[0].set_ylabel("% of these rounds")
    return figure


def _reranker(numbers: dict[str, Any]) -> Any:
    reranker = numbers.get("reranker")
    if not reranker or not reranker["prompts"]:
        return None
    figure, (axes,) = _subplots(1, (5.4, 3.2))
    colours = dict(zip(METHODS, ("#0072B2", "#56B4E9", "#999999"), strict=True))
    at = np.arange(len(REPORTED))
    for place, method in enumerate(METHODS):
        ratios = [reranker[str(budget)][f"{method}/draft"] for budget in REPORTED]
        label = "direct substitution" if method == "substitution" else f"reranker {method}"
        _bars(axes, at + (place - 1) * 0.25, ratios, width=0.25, color=colours[method], label=label)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(at, [f"B = {budget}" for budget in REPORTED])
    axes.set_ylabel("expected accepted over draft, %")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="best")
    return figure
