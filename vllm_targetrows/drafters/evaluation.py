# SPDX-License-Identifier: Apache-2.0
"""Stage *evaluate*: what drafters are worth in the engine, by kind of task.

Counts, not times: tokens that a round emits, and the share of rounds whose first token is absent from the pool's first
level.  Every configuration decodes the same prompts, one after the other, in an engine of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from vllm_targetrows.measure import Bench, Configuration, Measurement, Settings

TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Spec-Bench's categories that are tasks of their own; its others are conversation."""
DEFAULT_CONFIGURATIONS = (
    *(f"eagle3:k={k}" for k in range(1, 6)),
    *(f"{rule}:B=8,topk=10,depth=8" for rule in ("draft", "root", "root_draw", "pearl")),
)
ALL = "all"


@dataclass(frozen=True)
class Prompt:
    """A prompt and the task that it belongs to."""

    task: str
    text: str


@dataclass(frozen=True)
class Count:
    """What one configuration of one drafter did in one task."""

    drafter: str
    configuration: str
    task: str
    rounds: int
    emitted: float
    """Tokens that a round emits."""
    low: float
    high: float
    """95 % prompt-bootstrap interval of ``emitted``."""
    absent: float | None
    """Share of rounds whose first token is not in the pool's first level; known where the rule draws it first."""


def spread_prompts(path: Path) -> Iterator[Prompt]:
    """First turns of a file in Spec-Bench's format, in an order whose every beginning is spread over the tasks."""
    tasks: dict[str, list[Prompt]] = {}
    for line in path.read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        task = row["category"] if row["category"] in TASKS else "conversation"
        tasks.setdefault(task, []).append(Prompt(task, row["turns"][0]))
    columns = [[p for start in range(7) for p in prompts[start::7]] for prompts in tasks.values()]
    for row_of in zip_longest(*columns):
        yield from filter(None, row_of)


def evaluate(
    drafters: dict[str, Path],
    settings: Settings,
    prompts: Sequence[Prompt],
    configurations: Sequence[str] = DEFAULT_CONFIGURATIONS,
    at_once: int = 4,
) -> list[Count]:
    """Decode prompts with every drafter and configuration and count.

    Args:
        drafters: name to folder.
        settings: of all engines.
        prompts: what they decode.
        configurations: as ``benchmarks/decode.py`` names them.
        at_once: engines that are loaded at the same time.

    Raises:
        EngineError: an engine cannot start.
    """
    from tqdm import tqdm

    jobs = [
        (name, Configuration.parse(text, str(folder))) for name, folder in drafters.items() for text in configurations
    ]
    counts: list[Count] = []
    with tqdm(total=len(jobs) * len(prompts), unit="prompt") as bar:
        for start in range(0, len(jobs), at_once):
            some = {f"{name} {c.name}": (name, c) for name, c in jobs[start : start + at_once]}
            with Bench(settings, at_once=2) as bench:
                bench.load([Configuration(key, c.speculative_config) for key, (_, c) in some.items()])
                tokens = bench.tokenize([prompt.text for prompt in prompts])
                longest = settings.max_model_len - settings.max_tokens - 64
                units = [[(number, prompt[-longest:])] for number, prompt in enumerate(tokens)]
                bench.measure(units, 1, tick=lambda _: bar.update() and None)
                for key, (name, c) in some.items():
                    own = [m for m in bench.run.measurements if m.configuration == key]
                    counts += counted(name, c.name, own, prompts)
    return counts


def counted(
    drafter: str, configuration: str, measurements: Sequence[Measurement], prompts: Sequence[Prompt]
) -> Iterator[Count]:
    """The counts of one configuration: of all prompts, then of each task."""
    for task in (ALL, *dict.fromkeys(prompt.task for prompt in prompts)):
        own = [m for m in measurements if task in (ALL, prompts[m.questions[0]].task) and m.rounds]
        if not own:
            continue
        tokens, rounds = (np.array([getattr(m, name) for m in own]) for name in ("round_tokens", "rounds"))
        draws = np.random.default_rng(0).integers(len(own), size=(5_000, len(own)))
        low, high = np.percentile(tokens[draws].sum(-1) / rounds[draws].sum(-1), [2.5, 97.5])
        absent = None
        if configuration.startswith(("root_draw", "pearl")):
            states = [m.state for m in own if m.state]
            all_rounds = sum(state["rounds"] + sum(state["no_tree"].values()) for state in states)
            absent = sum(state["absent"] for state in states) / max(all_rounds, 1)
        emitted = float(tokens.sum() / rounds.sum())
        yield Count(drafter, configuration, task, int(rounds.sum()), emitted, float(low), float(high), absent)


def table(counts: Sequence[Count]) -> str:
    """Markdown: a table a drafter, a row a configuration, a column a task.  Emitted tokens a round; absent shares in
    brackets."""
    out: list[str] = []
    for drafter in dict.fromkeys(c.drafter for c in counts):
        own = [c for c in counts if c.drafter == drafter]
        tasks = list(dict.fromkeys(c.task for c in own))
        out += [
            f"{drafter}:",
            "",
            f"| | {' | '.join(t.replace('_', ' ') for t in tasks)} |",
            "|---" * (len(tasks) + 1) + "|",
        ]
        for name in dict.fromkeys(c.configuration for c in own):
            cells = []
            for task in tasks:
                found = [c for c in own if c.configuration == name and c.task == task]
                cells.append(_cell(found[0]) if found else "")
            out.append(f"| `{name}` | {' | '.join(cells)} |")
        out.append("")
    return "\n".join(out)


def _cell(count: Count) -> str:
    text = f"{count.emitted:.2f}"
    if count.task == ALL:
        text += f" [{count.low:.2f}, {count.high:.2f}]"
    return text if count.absent is None else f"{text} ({count.absent:.1%})"
