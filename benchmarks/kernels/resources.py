# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel, at the shapes that an engine uses, for GPUs that are not there, and print what each takes.

Ends with 1 when a kernel spills registers or takes more shared memory than its chip has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported
warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from common import kernels  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

Launches = dict[str, list[Any]]

CHIPS: dict[str, tuple[GPUTarget, int]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163),
    "sm_90": (GPUTarget("cuda", 90, 32), 227),
    "sm_100": (GPUTarget("cuda", 100, 32), 227),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64),
}
"""Each chip's target, and KiB of shared memory that a program may have there."""


def meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def tree_mask(chip: str) -> Launches:
    op = kernels("tree_mask")
    result: Launches = {}
    for nodes in (8, 59, 256, 1024):
        parents, sizes = meta(4, nodes, dtype=torch.int32), meta(4, dtype=torch.int32)
        depth, bits = meta(4, nodes, dtype=torch.int32), meta(4, nodes + 1, op.words(nodes))
        result[f"{nodes} nodes"] = op.launches(parents, sizes, None, depth, None, bits)
        result[f"{nodes} nodes, positions"] = op.launches(parents, sizes, meta(4), depth, meta(4, nodes), bits)
    return result


def tree_attention(chip: str) -> Launches:
    op = kernels("tree_attention")
    arch: Any = CHIPS[chip][0].arch
    bf16, fp32, fp8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    every = {"sliding_window": 4096, "softcap": 30.0, "sinks": meta(32, dtype=fp32)}
    shapes: list[tuple[str, int, torch.dtype, torch.dtype, int, int, int, dict[str, Any]]] = [
        ("59 nodes, head 64, all options", 64, bf16, bf16, 4, 16, 59, every),
        ("59 nodes, head 128", 128, bf16, bf16, 4, 16, 59, {}),
        ("59 nodes, head 128, all options", 128, bf16, bf16, 4, 16, 59, every),
        ("no tree, head 128, group 8", 128, bf16, bf16, 8, 64, 0, {}),
        ("256 nodes, head 256, all options", 256, bf16, bf16, 4, 16, 256, every),
        ("59 nodes, head 128, fp8 cache, all options", 128, bf16, fp8, 4, 16, 59, every),
        ("59 nodes, head 128, float32, all options", 128, fp32, fp32, 4, 16, 59, every),
    ]
    result: Launches = {}
    for name, head, dtype, cache, group, page, nodes, options in shapes:
        heads, requests, splits = 8, 8, 4
        key, value = meta(1000, heads, page, 2 * head, dtype=cache).transpose(1, 2).split(head, dim=-1)
        query = meta(requests * (nodes + 1), heads * group, head, dtype=dtype)
        scale = meta(1, dtype=fp32) if cache.itemsize == 1 else None
        ints = [
            meta(*shape, dtype=torch.int32) for shape in ((requests, 4096), (requests,), (requests + 1,), (requests,))
        ]
        result[name] = op.launches(
            query,
            key,
            value,
            *ints,
            meta(requests, nodes + 1, (nodes + 64) // 64),
            meta(requests, nodes, dtype=torch.int32),
            **({"scale": 0.1, "sliding_window": 0, "softcap": 0.0, "sinks": None} | options),
            k_scale=scale,
            v_scale=scale,
            out=query,
            partial=meta(splits, *query.shape, dtype=fp32),
            lse=meta(splits, *query.shape[:2], dtype=fp32),
            native_fp8=op.converts_e4m3(str(arch)),
            tile=op.tile_for(head, dtype, cache, (nodes + 1) * group, str(arch)),
        )
    return result


def frontier(chip: str) -> Launches:
    op = kernels("frontier")
    floats = torch.float32
    result: Launches = {}
    for rows, vocabulary, dtype in ((10, 32000, torch.bfloat16), (640, 32000, torch.bfloat16), (80, 262144, floats)):
        plan = op.row_splits(rows, vocabulary)
        logits = meta(rows, vocabulary, dtype=dtype)
        scratch = op.topk_scratch(rows, 10, plan, logits.device)
        outputs = (meta(rows, 10, dtype=floats), meta(rows, 10))
        launches = op.topk_log_softmax_launches(logits, meta(vocabulary), *outputs, *scratch, plan)
        result[f"children, {rows} rows of {vocabulary}"] = launches
    level = op.Level(meta(8, 100), meta(8, 100), meta(8, 100), meta(8, 100, dtype=floats), meta(8, 100))
    chosen = op.Frontier(meta(8, 10), meta(8, 10, dtype=floats), meta(8, 10), meta(8, 10), meta(8, 10))
    given = (meta(8, 10, 10, dtype=floats), meta(8, 10, 10), meta(8, 10, dtype=floats), meta(8, 10), meta(8, 10))
    result["expand, top-k 10"] = op.expand_launches(*given, 110, 3, level, chosen)
    for rule, budget in (("draft", 8), ("root_draw", 59), ("root", 256)):
        pool, out = meta(8, 710), op.Selected(meta(8, budget), meta(8, budget), meta(8, budget), meta(8))
        rows = (meta(8, 10, dtype=floats), meta(8), meta(8, dtype=torch.bool))
        result[f"select {rule}, {budget} nodes of 710"] = op.select_launches(
            pool, pool, pool, meta(8, 710, dtype=floats), pool, 10, budget, rule, *rows, out
        )
    return result


def exit_law(chip: str) -> Launches:
    op = kernels("exit_law")

    def launches(nodes: int, vocabulary: int, mode: str, logits: torch.dtype | None = None) -> list[Any]:
        rows = 8 * (nodes + 1)
        levels = 8
        return op.exit_law_launches(  # type: ignore[no-any-return]
            None if mode == "greedy" else meta(rows, vocabulary, dtype=logits or torch.float32),
            *(meta(8, nodes), meta(8, nodes), meta(8), meta(8, nodes + 1)),
            meta(8, 2, dtype=torch.float64),
            None if mode == "sampled" else meta(rows),
            meta(8, dtype=torch.bool) if mode == "mixed" else None,
            meta(rows, dtype=torch.float32) if logits else None,
            meta(8, dtype=torch.float32) if logits else None,
            meta(8, nodes + 1, -(-vocabulary // op.BLOCK), dtype=torch.float64),
            op.Exits(meta(8), meta(8, levels), meta(8), meta(8), meta(8, levels + 1)),
        )

    return {
        "8 nodes, vocabulary 32k": launches(8, 32000, "sampled"),
        "59 nodes, vocabulary 128k": launches(59, 131072, "sampled"),
        "59 nodes, greedy and sampled": launches(59, 131072, "mixed"),
        "59 nodes, from logits": launches(59, 131072, "mixed", torch.bfloat16),
        "59 nodes, greedy": launches(59, 131072, "greedy"),
        "256 nodes, vocabulary 256k": launches(256, 262144, "mixed"),
    }


def commit(chip: str) -> Launches:
    op = kernels("commit")
    result: Launches = {}
    for dtype, head, levels in (
        (torch.bfloat16, 128, 8),
        (torch.bfloat16, 256, 8),
        (torch.float8_e4m3fn, 64, 8),
        (torch.float16, 80, 16),
        (torch.float32, 128, 1),
        (torch.bfloat16, 128, 255),
    ):
        packed = [meta(100, 8, 16, 2 * head, dtype=dtype).transpose(1, 2) for _ in range(4)]
        caches = op.caches([t[..., :head] for t in packed], [t[..., head:] for t in packed])
        name = f"{str(dtype).removeprefix('torch.')}, head {head}, {levels} levels"
        result[name] = op.commit_launches(caches, meta(8, levels), meta(8, levels), meta(8))
    return result


OPS: dict[str, Callable[[str], Launches]] = {
    "tree_mask": tree_mask,
    "tree_attention": tree_attention,
    "frontier": frontier,
    "exit_law": exit_law,
    "commit": commit,
}


def compiled(ops: list[str], chips: list[str]) -> Iterator[dict[str, Any]]:
    """One row for each kernel of each case on each chip."""
    launch = kernels("launch")
    for op in ops:
        for chip in chips:
            target, limit = CHIPS[chip]
            for case, launches in OPS[op](chip).items():
                for each in launches:
                    taken = launch.compile_for(each, target)
                    fits = taken.spill_bytes == 0 and taken.shared_bytes <= limit * 1024
                    row = {
                        "op": op,
                        "case": case,
                        "kernel": each.kernel.__name__,
                        "chip": chip,
                        "warps": each.num_warps,
                    }
                    yield row | asdict(taken) | {"fits": fits}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--out", type=Path, help="JSON file for the table")
    options = parser.parse_args()
    rows = []
    for row in compiled(options.ops, options.chips):
        rows.append(row)
        print(
            f"{row['op']:15} {row['case']:44} {row['kernel']:24} {row['chip']:7} {row['warps']} warps "
            f"{row['registers']:4} registers {row['shared_bytes']:7} B shared {row['spill_bytes']:4} spilled"
            + ("" if row["fits"] else "  TOO MUCH"),
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    wrong = sum(not row["fits"] for row in rows)
    print(f"{len(rows)} kernels compiled, {wrong} of them spill or do not fit")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
