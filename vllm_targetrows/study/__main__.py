# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_targetrows.study RECORDING…``"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from vllm_targetrows import recording
from vllm_targetrows.study import report
from vllm_targetrows.study.bootstrap import Estimate
from vllm_targetrows.study.charts import charts
from vllm_targetrows.study.estimates import study
from vllm_targetrows.study.quantities import Numbers, quantities
from vllm_targetrows.study.reranking import compare
from vllm_targetrows.study.rounds import Group, groups


def main(argv: Sequence[str] | None = None) -> int:
    """Compute the study and return the exit status.  A foreseeable failure is one line on stderr and status 1."""
    options = _options(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads would wait for each other longer than these small operations take
    try:
        _run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    finally:
        torch.set_num_threads(threads)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vllm-targetrows-study", description="What recorded rounds say about selection rules and row reuse."
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="recordings; those of equal settings count as one")
    parser.add_argument("--out", type=Path, default=Path("study"), help="folder for the report (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of resamples and of the reranker (default: %(default)s)")
    parser.add_argument("--bootstrap", type=int, default=2000, metavar="N", help="resamples (default: %(default)s)")
    parser.add_argument("--no-rerank", action="store_true", help="do not train the reranker")
    parser.add_argument(
        "--save-reranker",
        type=Path,
        metavar="FILE",
        help="write the reranker that was trained on half of the prompts (safetensors); with several temperatures or"
        " settings one file each, their name added to FILE's",
    )
    options = parser.parse_args(argv)
    if options.bootstrap < 1:
        parser.error(f"--bootstrap is {options.bootstrap}, must be at least 1")
    if options.save_reranker and options.no_rerank:
        parser.error("--save-reranker needs the reranker that --no-rerank leaves out")
    return options


def _run(options: argparse.Namespace) -> None:
    parts = groups([_read(path) for path in options.paths])
    options.out.mkdir(parents=True, exist_ok=True)
    results, files = [], {}
    for group in parts:
        requests, numbers = measured(group)
        result: dict[str, Any] = {"name": group.name, "temperature": group.temperature}
        result["recordings"] = [{"path": each.path, "settings": _shown(each.settings)} for each in group.recordings]
        result |= study(requests, numbers, options.bootstrap, options.seed)
        if not options.no_rerank:
            result["reranker"], reranker = compare(group, requests, options.bootstrap, options.seed)
            if options.save_reranker and reranker is not None:
                path = options.save_reranker
                if len(parts) > 1:
                    path = path.with_name(f"{path.stem}-{slug(group.name)}{path.suffix}")
                reranker.save(path)
                result["reranker"]["file"] = str(path)
        files[group.name] = charts(result, options.out, slug(group.name))
        results.append(result)
    about = {"seed": options.seed, "bootstrap": options.bootstrap}
    whole = json.dumps(plain({**about, "groups": results}), indent=1, allow_nan=False)
    (options.out / "study.json").write_text(whole + "\n")
    chapters = [(result, report.sections(result), files[result["name"]]) for result in results]
    print(report.text(chapters, about))
    (options.out / "study.md").write_text(report.markdown(chapters, about))
    (options.out / "study.html").write_text(report.html(chapters, about))
    print(f"\nwritten: {options.out / 'study.html'}, study.md, study.json and charts")


def measured(group: Group) -> tuple[list[str], Numbers]:
    """Each round's request and the ``quantities`` of all rounds."""
    requests: list[str] = []
    parts: list[Numbers] = []
    for batch in tqdm(group.batches(), group.name, group.batch_count, disable=None, leave=False):
        requests += batch.requests
        parts.append(quantities(batch))
    return requests, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def slug(name: str) -> str:
    """A name as part of a file's."""
    return re.sub(r"[^\w.]+", "-", name)


def plain(value: Any) -> Any:
    """As JSON has it: estimates as objects, numbers that do not exist as null, infinite ones as text."""
    if isinstance(value, Estimate):
        return {"value": plain(value.value), "low": plain(value.low), "high": plain(value.high)}
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None if np.isnan(value) else "inf"
    return value


def _read(path: str) -> recording.Recording:
    try:
        return recording.read(path)
    except OSError as error:  # a damaged file, or one that may not be read
        raise ValueError(f"{path!r} is no recording: {str(error).splitlines()[0]}") from None


def _shown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A recording's settings without the folders of the machine that it was made on."""
    return {
        key: Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
        for key, value in settings.items()
    }


if __name__ == "__main__":
    sys.exit(main())
