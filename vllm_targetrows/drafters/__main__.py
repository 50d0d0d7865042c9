# SPDX-License-Identifier: Apache-2.0
"""The console script ``vllm-targetrows-drafter``: one command a stage."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import ValidationError

from vllm_targetrows import embedded
from vllm_targetrows.cpu_runtime import preload_environment
from vllm_targetrows.drafters.conversations import DataSettings, write
from vllm_targetrows.measure import EngineError, Settings, physical_cpus


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage and return the exit status.  A foreseeable failure is one line on stderr and status 1."""
    arguments = _parser().parse_args(argv)
    if missing := {k: v for k, v in preload_environment().items() if os.environ.get(k) != v}:
        os.execve(sys.executable, [sys.executable, "-P", *sys.argv], {**os.environ, **missing})
    try:
        arguments.run(arguments)
    except ValidationError as error:
        first = error.errors()[0]
        print(f"error: --{str(first['loc'][0]).replace('_', '-')}={first['input']!r}: {first['msg']}", file=sys.stderr)
        return 1
    except (embedded.EmbeddedModelError, EngineError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-targetrows-drafter",
        description="Make a drafter for a target.  A stage that was killed goes on when its command is given again.",
    )
    stages = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")

    data = stages.add_parser("data", help="the target writes conversations", formatter_class=_Defaults)
    data.set_defaults(run=_data)
    data.add_argument("folder", type=Path, help="where the conversations go")
    data.add_argument("--tokens", type=int, default=3_000_000, metavar="N", help="tokens of answers")
    data.add_argument("--turns", metavar="FILE", help="JSON lines with the users' turns, in place of the target's own")
    data.add_argument("--concurrency", type=int, default=64, metavar="N", help="texts at once")
    data.add_argument("--enforce-eager", action="store_true", help="no compilation: slower, but begins at once")
    data.add_argument("--seed", type=int, default=0, help="of all texts")

    train = stages.add_parser("train", help="a drafter learns the target's rows", formatter_class=_Defaults)
    train.set_defaults(run=_train)
    train.add_argument("folder", type=Path, help="where the run goes; the drafter is in its folder drafter/")
    train.add_argument("--data", type=Path, required=True, metavar="DIR", help="the conversations")
    train.add_argument("--save-every", type=float, default=300, metavar="SECONDS", help="between saved states")
    train.add_argument("--device", default="cpu", help="such as cuda")
    _add_settings(train)

    evaluate = stages.add_parser("evaluate", help="what drafters are worth in the engine", formatter_class=_Defaults)
    evaluate.set_defaults(run=_evaluate)
    evaluate.add_argument("drafters", nargs="+", metavar="NAME=DIR", help="drafters, each with a name for the table")
    evaluate.add_argument("--data", type=Path, required=True, metavar="FILE", help="prompts in Spec-Bench's format")
    evaluate.add_argument("--configs", nargs="+", metavar="NAME", help="such as eagle3:k=2 or draft:B=8 (default: all)")
    evaluate.add_argument("--prompts", type=int, default=60, metavar="N", help="prompts, spread over the tasks")
    evaluate.add_argument("--max-tokens", type=int, default=64, metavar="N", help="most new tokens for a prompt")
    evaluate.add_argument("--temperature", type=float, default=0.0, help="of the requests")
    evaluate.add_argument("--out", type=Path, metavar="FILE", help="the counts as JSON")

    for stage in (data, train, evaluate):
        stage.add_argument("--target", help="a model's folder or name; without it the embedded one")
    for stage in (data, evaluate):
        stage.add_argument("--dtype", default="bfloat16", help="of the engines")
    return parser


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return (
            action.help if action.default in (None, False, []) or action.required else super()._get_help_string(action)
        )


def _add_settings(stage: argparse.ArgumentParser) -> None:
    """An option for each of ``TrainSettings``."""
    from vllm_targetrows.drafters.learners import TrainSettings

    for name, field in TrainSettings.model_fields.items():
        option, default, about = "--" + name.replace("_", "-"), field.default, field.description
        if isinstance(default, tuple):
            stage.add_argument(option, type=int, nargs="+", default=list(default), metavar="N", help=about)
        else:
            stage.add_argument(option, type=type(default), default=default, metavar="X", help=about)


def _target(arguments: argparse.Namespace) -> str:
    return arguments.target or str(embedded.target_folder())


def _data(arguments: argparse.Namespace) -> None:
    settings = DataSettings(_target(arguments), arguments.dtype, seed=arguments.seed, turns=arguments.turns)
    found = write(arguments.folder, settings, arguments.tokens, arguments.concurrency, arguments.enforce_eager)
    print(f"{arguments.folder}: {found.conversations} conversations, {found.answer_tokens} tokens of answers")


def _train(arguments: argparse.Namespace) -> None:
    from vllm_targetrows.drafters.learners import TrainSettings
    from vllm_targetrows.drafters.training import train

    settings = TrainSettings(**{name: getattr(arguments, name) for name in TrainSettings.model_fields})
    train(arguments.folder, arguments.data, _target(arguments), settings, arguments.save_every, arguments.device)


def _evaluate(arguments: argparse.Namespace) -> None:
    from vllm_targetrows.drafters.evaluation import DEFAULT_CONFIGURATIONS, evaluate, spread_prompts, table

    drafters = {}
    for text in arguments.drafters:
        name, _, folder = text.rpartition("=")
        if not (Path(folder) / "config.json").is_file():
            raise ValueError(f"{text!r}: {folder} has no config.json; allowed: NAME=DIR with a drafter's folder")
        drafters[name or Path(folder).name] = Path(folder)
    settings = Settings(
        _target(arguments),
        dtype=arguments.dtype,
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        cpus=physical_cpus(),
    )
    prompts = list(spread_prompts(arguments.data))[: arguments.prompts]
    counts = evaluate(drafters, settings, prompts, arguments.configs or DEFAULT_CONFIGURATIONS)
    print(table(counts))
    if arguments.out:
        kept = {name: getattr(arguments, name) for name in ("dtype", "temperature", "prompts", "max_tokens")}
        result = {"settings": kept, "counts": [asdict(count) for count in counts]}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
