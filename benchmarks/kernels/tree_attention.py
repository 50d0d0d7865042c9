# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of ``tree_attention``: beside torch's attention with a dense mask, without one, and FlexAttention.

torch's functions get keys and values that were gathered from the pages beforehand, so they do less work than the op.
"sdpa causal" is plain causal attention of as many query rows over the same context: the op should take at most 1.1
times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import Case, Prepared, kernels
from torch.nn.functional import scaled_dot_product_attention
from tree_mask import dense_mask
from trees import batch_of_trees

HEADS = {"8B": (32, 8, 128), "70B": (64, 8, 128), "tiny": (6, 2, 64)}
PAGE = 16
CACHE_BYTES = 100e6  # smaller inputs are made several times, so that the chip's cache does not hold them


@dataclass(frozen=True)
class Shape:
    model: str
    requests: int
    nodes: int
    context: int


def cases(scale: str) -> list[Case]:
    """Llama-like shapes; ``small`` for the interpreter."""
    if scale == "small":
        shapes = [Shape("tiny", 2, 8, 40)]
    else:
        shapes = [
            Shape(model, requests, nodes, context)
            for model in ("8B", "70B")
            for requests in (1, 8, 64)
            for nodes in (8, 59, 256)
            for context in (1024, 8192, 65536)
            if model == "8B" or nodes == 59
        ]
    return [
        Case(
            "tree_attention",
            f"{s.model}, batch {s.requests}, {s.nodes} nodes, context {s.context}",
            lambda device, s=s: _make(device, s),
        )
        for s in shapes
    ]


@dataclass
class Inputs:
    query: torch.Tensor
    cache: torch.Tensor  # [blocks, page, kv heads, 2 * head size]
    table: torch.Tensor


def _make(device: torch.device, shape: Shape) -> Prepared:
    op, masks = kernels("tree_attention"), kernels("tree_mask")
    heads, kv_heads, size = HEADS[shape.model]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows, length = shape.nodes + 1, shape.context + shape.nodes + 1
    pages = -(-length // PAGE)
    parents = batch_of_trees(shape.requests, shape.nodes, device)
    sizes = torch.full((shape.requests,), shape.nodes, dtype=torch.int32, device=device)
    depth, _, bits = masks.tree_mask(parents, sizes)
    seq_lens = torch.full((shape.requests,), length, dtype=torch.int32, device=device)
    start = torch.arange(0, (shape.requests + 1) * rows, rows, dtype=torch.int32, device=device)
    before = torch.ones(shape.requests, dtype=torch.int32, device=device)
    element = torch.empty((), dtype=dtype).element_size()
    context_bytes = shape.requests * length * kv_heads * size * 2 * element
    copies = max(1, min(8, int(CACHE_BYTES // context_bytes)))

    def inputs(seed: int) -> Inputs:
        generator = torch.Generator(device=device).manual_seed(seed)
        blocks = shape.requests * pages
        query = torch.randn(
            (shape.requests * rows, heads, size), device=device, generator=generator, dtype=torch.float32
        )
        cache = torch.empty((blocks, PAGE, kv_heads, 2 * size), dtype=dtype, device=device)
        cache.normal_(generator=generator)
        table = torch.randperm(blocks, device=device, generator=generator).int().view(shape.requests, pages)
        return Inputs(query.to(dtype), cache, table)

    def run(given: Inputs) -> torch.Tensor:
        return op.tree_attention(
            given.query,
            given.cache[..., :size],
            given.cache[..., size:],
            given.table,
            seq_lens,
            start,
            before,
            bits,
            depth,
            scale=size**-0.5,
        )

    sets = [inputs(seed) for seed in range(copies)]
    mask = dense_mask(parents)

    def check() -> None:
        output = run(sets[0]).view(shape.requests, rows, heads, size)
        for r in {0, shape.requests - 1}:
            expected = _attention(_contiguous(sets[0], shape, r, r + 1, torch.float32), _dense(mask[r : r + 1], shape))
            error = (output[r].float() - expected[0].transpose(0, 1)).abs().max().item()
            assert error < (2e-2 if dtype == torch.bfloat16 else 1e-4), error

    return Prepared(
        runs=[lambda given=given: run(given) for given in sets],
        check=check,
        bytes=context_bytes + 2 * sets[0].query.numel() * element,
        operations=4 * shape.requests * rows * heads * size * length,
        others=_others(device, shape, sets[0], mask, dtype),
    )


def _others(
    device: torch.device, shape: Shape, given: Inputs, mask: torch.Tensor, dtype: torch.dtype
) -> dict[str, list[Callable[[], Any]]]:
    """torch's attention on gathered keys and values, where its mask and its copies fit."""
    if device.type != "cuda" or shape.requests * shape.context > 8 * 65536:
        return {}
    from torch.nn.attention.bias import causal_lower_right

    qkv = _contiguous(given, shape, 0, shape.requests, dtype)
    causal = causal_lower_right(shape.nodes + 1, shape.context + shape.nodes + 1)
    dense = _dense(mask, shape)
    result: dict[str, list[Callable[[], Any]]] = {
        "sdpa dense": [lambda: _attention(qkv, dense)],
        "sdpa causal": [lambda: scaled_dot_product_attention(*qkv, attn_mask=causal, enable_gqa=True)],
    }
    if shape == Shape("8B", 8, 59, 8192):
        result["flex"] = [_flex(qkv, mask, shape)]
    return result


def _flex(qkv: tuple[torch.Tensor, ...], mask: torch.Tensor, shape: Shape) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv < shape.context) | mask[b, q, (kv - shape.context).clamp(min=0)]

    rows, length = shape.nodes + 1, shape.context + shape.nodes + 1
    block_mask = create_block_mask(sees, shape.requests, None, rows, length, device="cuda")
    compiled = torch.compile(flex_attention)
    return lambda: compiled(*qkv, block_mask=block_mask, enable_gqa=True)


def _contiguous(given: Inputs, shape: Shape, first: int, last: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Query, keys and values of requests ``first .. last``: ``[requests, heads, rows or positions, head size]``."""
    heads, kv_heads, size = HEADS[shape.model]
    length = shape.context + shape.nodes + 1
    query = given.query.view(shape.requests, shape.nodes + 1, heads, size)[first:last]
    pages = given.cache[given.table[first:last].long()].view(last - first, -1, kv_heads, 2 * size)[:, :length]
    parts = (query, pages[..., :size], pages[..., size:])
    return tuple(part.transpose(1, 2).to(dtype).contiguous() for part in parts)


def _dense(mask: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Bool ``[requests, 1, rows, positions]``."""
    return torch.nn.functional.pad(mask, (shape.context, 0), value=True)[:, None]


def _attention(qkv: tuple[torch.Tensor, ...], mask: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=True)
