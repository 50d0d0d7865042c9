# SPDX-License-Identifier: Apache-2.0
"""Timing several engine configurations side by side: the core of ``benchmarks/decode.py`` and of the demo.

Every configuration has an engine in a process of its own (``vllm_targetrows.engine.timed``).  All of them stay loaded
and take turns prompt by prompt, so that whatever disturbs the machine disturbs all of them alike.  An idle engine
sleeps on its pipe; what it still uses (gloo's polling, about 1 % of one CPU) is measured and reported.

This module never imports vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any

import psutil

from vllm_targetrows.cpu_runtime import preload_environment

RULES = ("draft", "root", "root_draw", "pearl", "rerank")
#: Names of the options of our own configurations, as a table has room for them.
_SHORT = {
    "B": "num_speculative_tokens",
    "topk": "tree_topk",
    "depth": "tree_depth",
    "min": "tree_min_probability",
    "grow": "tree_grow_probability",
}


class EngineError(RuntimeError):
    """An engine could not start or broke; the message is one line."""


@dataclass(frozen=True)
class Configuration:
    """A named choice of ``speculative_config``; ``None`` is plain decoding."""

    name: str
    speculative_config: dict[str, Any] | None

    @property
    def kind(self) -> str:
        """``plain``, ``eagle3``, ``ngram`` or the selection rule."""
        return self.name.partition(":")[0]

    @property
    def is_ours(self) -> bool:
        return self.kind in RULES

    @classmethod
    def parse(cls, text: str, drafter: str) -> Configuration:
        """Read ``kind`` or ``kind:key=value,key=value``.

        Kinds: ``plain``; ``eagle3`` (``k`` = chain length, 2); ``ngram`` (``k`` = 4); a selection rule (``B`` = node
        budget, 8; ``topk`` and ``depth`` of the pool, 10 and 5).  Any other key goes into ``speculative_config`` under
        its own name.  Raises ``ValueError`` for anything else.
        """
        kind, _, rest = text.partition(":")
        options: dict[str, Any] = {}
        for item in filter(None, rest.split(",")):
            key, equals, value = item.partition("=")
            if not equals or not key or not value:
                raise ValueError(f"configuration {text!r}: {item!r} is not key=value")
            options[key] = _value(value)
        if kind == "plain":
            if options:
                raise ValueError(f"configuration {text!r}: plain takes no options")
            return cls(text, None)
        if kind == "eagle3":
            config = {"method": "eagle3", "model": drafter, "num_speculative_tokens": options.pop("k", 2)}
        elif kind == "ngram":
            config = {"method": "ngram", "num_speculative_tokens": options.pop("k", 4)}
            config |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        elif kind in RULES:
            options = {"B": 8, "topk": 10, "depth": 5} | options
            config = {"method": "targetrows", "model": drafter, "selection": kind}
        else:
            allowed = ", ".join(("plain", "eagle3", "ngram", *RULES))
            raise ValueError(f"configuration {text!r}: unknown kind {kind!r}, allowed are {allowed}")
        return cls(text, config | {_SHORT.get(key, key): value for key, value in options.items()})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@dataclass(frozen=True)
class Settings:
    """What all engines of a run share."""

    target: str
    dtype: str = "bfloat16"
    eager: bool = True
    concurrency: int = 1
    temperature: float = 0.0
    max_tokens: int = 128
    max_model_len: int = 2048
    cpus: tuple[int, ...] = ()
    multiprocessing: bool = False
    #: A ``worker_cls`` for stock speculation, and the folder to import it from.
    stock_worker: tuple[str, Path] | None = None

    def engine_arguments(self, configuration: Configuration) -> dict[str, Any]:
        """The keyword arguments of vLLM's ``LLM``.

        Prefix caching is off, because a prompt comes back with every repeat and every configuration must prefill it.
        """
        arguments: dict[str, Any] = {
            "model": self.target,
            "dtype": self.dtype,
            "enforce_eager": self.eager,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.concurrency,
            "enable_prefix_caching": False,
            "seed": 0,
        }
        if configuration.speculative_config is not None:
            arguments["speculative_config"] = configuration.speculative_config
            if self.stock_worker and not configuration.is_ours:
                arguments["worker_cls"] = self.stock_worker[0]
        return arguments

    def environment(self, configuration: Configuration) -> dict[str, str]:
        """The engine process's environment: the same for all, but for our plugin, which stock engines do not load.

        In one process vLLM does not apply ``VLLM_CPU_OMP_THREADS_BIND``, so the OpenMP values that its multi-process
        executor would set for its worker are set here.
        """
        cpus = ",".join(map(str, self.cpus))
        variables = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(self.multiprocessing)),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cpus,
            "OMP_NUM_THREADS": str(len(self.cpus)),
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cpus}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        variables |= preload_environment()
        if not configuration.is_ours:
            variables["VLLM_PLUGINS"] = ""
            if self.stock_worker:
                variables["PYTHONPATH"] = str(self.stock_worker[1])
        return variables


def physical_cpus() -> tuple[int, ...]:
    """The CPUs this process may use, one for each physical core."""
    cores: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return tuple(cores.values())


def matrix_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The dtype whose matrix products with several rows are fast on this CPU.

    Without AVX-512 an x86 CPU has no oneDNN kernel for bfloat16, and vLLM falls back to one that takes as long for
    eight rows as for eight times one row: neither a chain nor a tree can pay there.  In float32 both can.
    """
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "float32" if "avx2" in text and "avx512f" not in text else "bfloat16"


class Engine:
    """The parent's end of an engine process.

    The constructor returns at once; ``wait`` returns when the engine is ready.
    """

    def __init__(self, configuration: Configuration, settings: Settings) -> None:
        self.configuration = configuration
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long as the process
        ours, theirs = socketpair()
        with theirs:
            self.process = subprocess.Popen(
                # -P: the current folder must not come before the installed packages
                [sys.executable, "-P", "-m", "vllm_targetrows.engine.timed", str(theirs.fileno())],
                env=settings.environment(configuration),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
        self._connection = Connection(ours.detach())
        self._connection.send(settings.engine_arguments(configuration))

    def wait(self) -> None:
        """Block until the engine is loaded; raise ``EngineError`` when it cannot be."""
        self._receive()

    def order(self, name: str, **arguments: Any) -> Any:
        """Have one of ``timed``'s orders carried out and return its result."""
        self._connection.send((name, arguments))
        return self._receive()

    def close(self) -> None:
        """End the engine process."""
        self._connection.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def cpu_seconds(self) -> float:
        """CPU time that the process and its live descendants have used."""
        try:
            process = psutil.Process(self.process.pid)
            times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
        except psutil.NoSuchProcess:
            return 0.0
        return float(sum(t.user + t.system for t in times))

    def memory(self) -> int:
        """Resident bytes that no other process shares."""
        process = psutil.Process(self.process.pid)
        return sum(int(p.memory_full_info().uss) for p in (process, *process.children(recursive=True)))

    def _receive(self) -> Any:
        try:
            answer, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            answer, value = "failed", f"the engine process ended (exit status {self.process.wait()})"
        if answer == "failed":
            raise EngineError(f"{self.configuration.name}: {value.splitlines()[0]}")
        return value

    def log(self) -> str:
        """What the engine process has printed so far."""
        self._log.seek(0)
        return self._log.read()


@dataclass
class Measurement:
    """One unit (``concurrency`` prompts sent at once) decoded once by one configuration.

    Decoding begins when every request of the unit has its first token: ``decode_tokens`` arrived after that, in
    ``decode_seconds`` and ``decode_steps`` of the engine.  ``rounds`` and ``round_tokens`` count, for each request, the
    steps after its own first token and the tokens that they emitted.  ``state`` is what the plugin counted meanwhile.
    """

    configuration: str
    group: int  # engines of one group were loaded together; only they are compared with each other
    unit: int
    repeat: int
    questions: list[int]
    tokens: int
    seconds: float
    decode_tokens: int
    decode_seconds: float
    decode_steps: int
    rounds: int
    round_tokens: int
    outputs: list[list[int]] = field(repr=False)
    texts: list[str] = field(repr=False)
    state: dict[str, Any] | None = None
    other_cpu: float = 0.0  # share of the CPUs' time that processes outside the measured engine used meanwhile

    @classmethod
    def of(cls, result: dict[str, Any], **identity: Any) -> Measurement:
        """Read the result of ``timed.generate``."""
        replies = result["replies"]
        first_step = max(reply["steps"][0] for reply in replies)
        parts = [
            part for reply in replies for part in zip(reply["steps"], reply["arrivals"], reply["counts"], strict=True)
        ]
        began = max(arrival for step, arrival, _ in parts if step <= first_step)
        return cls(
            tokens=sum(count for *_, count in parts),
            seconds=result["seconds"],
            decode_tokens=sum(count for step, _, count in parts if step > first_step),
            decode_seconds=max(arrival for _, arrival, _ in parts) - began,
            decode_steps=len({step for step, *_ in parts if step > first_step}),
            rounds=len(parts) - len(replies),
            round_tokens=sum(sum(reply["counts"][1:]) for reply in replies),
            outputs=[reply["tokens"] for reply in replies],
            texts=[reply["text"] for reply in replies],
            state=result["state"],
            **identity,
        )


Progress = Callable[[str], None]


def _ignore(_: str) -> None:
    pass


@dataclass
class Run:
    """Everything that one interleaved run measured."""

    measurements: list[Measurement] = field(default_factory=list)
    start_seconds: dict[str, float] = field(default_factory=dict)
    memory_bytes: dict[str, int] = field(default_factory=dict)
    #: Share of one CPU that all loaded engines together used while none had an order.
    idle_cpu: list[float] = field(default_factory=list)


def best_stock(measurements: Iterable[Measurement]) -> str | None:
    """The stock EAGLE-3 configuration with the most decoded tokens per second, if there is any."""
    tokens: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for m in measurements:
        if m.configuration.startswith("eagle3"):
            tokens[m.configuration] = tokens.get(m.configuration, 0) + m.decode_tokens
            seconds[m.configuration] = seconds.get(m.configuration, 0.0) + m.decode_seconds
    return max(tokens, key=lambda name: tokens[name] / max(seconds[name], 1e-9), default=None)


def chat(question: str) -> list[dict[str, str]]:
    """A conversation that opens with ``question``."""
    return [{"role": "user", "content": question}]


class Bench:
    """The engines of one run and the prompts they share; a context manager that ends its engines."""

    def __init__(self, settings: Settings, *, report: Progress = _ignore, at_once: int = 2) -> None:
        """``report`` gets a line for each step of the preparation; ``at_once`` engines load at the same time."""
        self.settings = settings
        self.run = Run()
        self._report = report
        self._at_once = at_once
        self._engines: dict[str, Engine] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep([])

    def load(self, configurations: Sequence[Configuration]) -> None:
        """Start the engines that are not running yet and wait until they are ready."""
        waiting = [c for c in configurations if c.name not in self._engines]
        while waiting:
            batch, waiting = waiting[: self._at_once], waiting[self._at_once :]
            started = time.perf_counter()
            for configuration in batch:
                self._engines[configuration.name] = Engine(configuration, self.settings)
            for configuration in batch:
                engine = self._engines[configuration.name]
                engine.wait()
                self.run.start_seconds[configuration.name] = time.perf_counter() - started
                self.run.memory_bytes[configuration.name] = engine.memory()
                self._report(f"{configuration.name} is loaded")

    def keep(self, names: Iterable[str]) -> None:
        """End every engine that is not named."""
        for name in set(self._engines) - set(names):
            self._engines.pop(name).close()

    def tokenize(self, questions: Sequence[str]) -> list[list[int]]:
        """The token ids of each question in the target's chat template (by any loaded engine)."""
        tokens: list[list[int]] = next(iter(self._engines.values())).order(
            "tokenize", conversations=[chat(question) for question in questions]
        )
        return tokens

    def warm_up(self, prompts: list[list[int]]) -> None:
        """Decode ``prompts`` with every engine, unmeasured, and note what the engines use while idle."""
        for name, engine in self._engines.items():
            engine.order("generate", prompts=prompts, sampling=self._sampling())
            self._report(f"{name} is warm")
        time.sleep(0.2)
        before, start = self._cpu_seconds(), time.perf_counter()
        time.sleep(1.0)
        self.run.idle_cpu.append((self._cpu_seconds() - before) / (time.perf_counter() - start))

    def measure(
        self,
        units: Sequence[Sequence[tuple[int, list[int]]]],
        repeats: int,
        *,
        group: int = 0,
        tick: Callable[[Measurement], None],
    ) -> None:
        """Decode every unit ``repeats`` times with every engine, unit by unit, in rotating order.

        A unit is a list of (question id, prompt); ``tick`` is called with each measurement.
        """
        engines = list(self._engines.items())
        cpus = max(len(self.settings.cpus), 1)
        for repeat in range(repeats):
            for index, unit in enumerate(units):
                turn = (index + repeat) % len(engines)
                for name, engine in engines[turn:] + engines[:turn]:
                    used, busy, start = engine.cpu_seconds(), _busy_seconds(), time.perf_counter()
                    prompts = [prompt for _, prompt in unit]
                    result = engine.order("generate", prompts=prompts, sampling=self._sampling())
                    wall = time.perf_counter() - start
                    others = (_busy_seconds() - busy) - (engine.cpu_seconds() - used)
                    measurement = Measurement.of(
                        result,
                        configuration=name,
                        group=group,
                        unit=index,
                        repeat=repeat,
                        questions=[question for question, _ in unit],
                        other_cpu=max(others, 0.0) / (wall * cpus),
                    )
                    self.run.measurements.append(measurement)
                    tick(measurement)

    def _sampling(self) -> dict[str, Any]:
        return {"temperature": self.settings.temperature, "max_tokens": self.settings.max_tokens}

    def _cpu_seconds(self) -> float:
        return sum(engine.cpu_seconds() for engine in self._engines.values())


def _busy_seconds() -> float:
    """CPU time that the whole machine has used."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)
