# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of ``commit``: beside torch's indexing, one layer after the other."""

from __future__ import annotations

import torch
from common import Case, Prepared, kernels

PAGE = 16


def cases(scale: str) -> list[Case]:
    """Paths of up to 8 nodes in a model of Llama-8B's and of 70B's layers; ``small`` for the interpreter."""
    if scale == "small":
        return [Case("commit", "batch 2, 3 levels, 2 layers", lambda device: _make(device, 2, 3, 2, 2, 16))]
    shapes = [(r, 8, layers) for layers in (32, 80) for r in (1, 8, 64)]
    return [
        Case(
            "commit",
            f"batch {r}, {d} levels, {layers} layers",
            lambda device, r=r, d=d, layers=layers: _make(device, r, d, layers, 8, 128),
        )
        for r, d, layers in shapes
    ]


def _make(device: torch.device, requests: int, levels: int, layers: int, heads: int, size: int) -> Prepared:
    op = kernels("commit")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    blocks = 5 * requests
    stack = torch.randn(layers, blocks, PAGE, heads, 2 * size, device=device).to(dtype)
    keys, values = [layer[..., :size] for layer in stack], [layer[..., size:] for layer in stack]
    caches = op.caches(keys, values)
    first = torch.arange(requests, device=device)[:, None] * 5 * PAGE + 3
    destination = first + torch.arange(levels, device=device)
    source = first + torch.arange(levels, device=device) * 2 + 1
    lengths = torch.arange(requests, device=device) % levels + 1

    def check() -> None:
        before = stack.clone()
        op.commit(caches, source, destination, lengths)
        ours = stack.clone()
        stack.copy_(before)
        op.commit_reference(keys, values, source, destination, lengths)
        assert torch.equal(ours, stack) and not torch.equal(ours, before)

    def plain() -> None:
        for cache in stack:
            flat = cache.view(-1, heads, 2 * size)
            flat[destination] = flat[source]

    moved = int(lengths.sum()) * layers * heads * 2 * size * stack.element_size()
    return Prepared(
        runs=[lambda: op.commit(caches, source, destination, lengths)],
        check=check,
        bytes=2 * moved,
        others={"torch indexing": [plain]},
    )
