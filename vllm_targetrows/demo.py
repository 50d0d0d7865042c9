# SPDX-License-Identifier: Apache-2.0
"""``vllm-targetrows demo``: the embedded model answers a few questions, plainly, with stock EAGLE-3 and with trees."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence

from tqdm import tqdm

from vllm_targetrows import report
from vllm_targetrows.embedded import EmbeddedModelError, drafter_folder, target_folder
from vllm_targetrows.measure import (
    Bench,
    Configuration,
    EngineError,
    Measurement,
    Settings,
    matrix_dtype,
    physical_cpus,
)

TREE = "draft:B=3,topk=3,depth=2"
CONFIGURATIONS = ("plain", "eagle3:k=2", TREE, "root_draw:B=3,topk=3,depth=2")
WARM_UP = "Name three colours."
QUESTIONS = (
    "Why is the sky blue? Answer in two or three sentences.",
    "Write a short, polite email that asks a colleague to review a report by Friday.",
    "A train travels 60 km in 45 minutes. What is its average speed in km per hour? Explain step by step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Give three tips for learning a new language.",
    "Translate into French: The library is open every day except Sunday.",
)
SHOWN = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status; a failure is one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="vllm-targetrows demo", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="most new tokens for a question")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=matrix_dtype(), help="the faster one here")
    options = parser.parse_args(argv)
    try:
        measurements = _measure(options.max_tokens, options.dtype)
    except (EngineError, EmbeddedModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(answers(measurements))
    print(speeds(measurements, options.dtype))
    return 0


def _measure(max_tokens: int, dtype: str) -> list[Measurement]:
    """Every question once by every configuration, in rotating order, with all engines loaded."""
    settings = Settings(str(target_folder()), dtype=dtype, max_tokens=max_tokens, cpus=physical_cpus())
    configurations = [Configuration.parse(name, str(drafter_folder())) for name in CONFIGURATIONS]
    # Two steps for each engine (loading, a first answer), then one for each answer.
    bar = tqdm(total=len(configurations) * (2 + len(QUESTIONS)), desc="starting four engines", mininterval=0.5)
    bar.bar_format = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}]"

    def tick(measurement: Measurement) -> None:
        bar.set_description_str(f"answering ({measurement.configuration.partition(':')[0]})", False)
        bar.update()

    with bar, Bench(settings, report=lambda _: bar.update(), at_once=len(settings.cpus)) as bench:
        bench.load(configurations)
        warm_up, *prompts = bench.tokenize([WARM_UP, *QUESTIONS])
        bench.warm_up([warm_up])
        bench.measure([[(number, prompt)] for number, prompt in enumerate(prompts)], 1, tick=tick)
        return bench.run.measurements


def answers(measurements: Sequence[Measurement]) -> str:
    """The first questions with the tree configuration's answers."""
    lines = []
    texts = {m.questions[0]: m.texts[0] for m in measurements if m.configuration == TREE}
    for number, question in list(enumerate(QUESTIONS))[:SHOWN]:
        lines += ["", f"> {question}"]
        for paragraph in texts[number].strip().splitlines():
            lines += textwrap.wrap(paragraph, 100, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def speeds(measurements: Sequence[Measurement], dtype: str) -> str:
    """The table and how to read it."""
    rows = report.rows(measurements)
    tree = next(row for row in rows if row.configuration == TREE)
    same = round((tree.identical or 0.0) * len(QUESTIONS))
    lines = [
        "",
        f"{len(QUESTIONS)} questions one at a time, greedy, {dtype}, eager mode, the four engines in turns:",
        "",
        report.speed_table(rows),
        "",
        "tok/s: decoding, after the first token. emitted: tokens a round. ms: milliseconds a round.",
        f"{same} of {len(QUESTIONS)} answers with trees are token for token those of plain decoding.",
    ]
    if dtype != "float32":
        lines.append(
            "In bfloat16 a near tie between two tokens can fall either way when several rows are computed at once,\n"
            "for stock speculation too; `vllm-targetrows demo --dtype float32` shows the texts equal."
        )
    return "\n".join(lines)
