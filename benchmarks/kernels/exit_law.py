# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of ``exit_law``: beside ``torch.multinomial`` of the same rows, which draws no exit."""

from __future__ import annotations

import torch
from common import Case, Prepared, kernels
from trees import batch_of_trees, distinct_siblings

CACHE_BYTES = 100e6


def cases(scale: str) -> list[Case]:
    """Vocabularies of Llama 3 and of 256k; ``small`` for the interpreter."""
    shapes = [(2, 6, 300)] if scale == "small" else [(r, n, 128_256) for r in (1, 8, 64) for n in (8, 59)]
    if scale != "small":
        shapes += [(1, 256, 128_256), (8, 59, 262_144)]
    return [
        Case("exit_law", f"batch {r}, {n} nodes, vocabulary {v}", lambda device, r=r, n=n, v=v: _make(device, r, n, v))
        for r, n, v in shapes
    ]


def _make(device: torch.device, requests: int, nodes: int, vocabulary: int) -> Prepared:
    op = kernels("exit_law")
    parents = batch_of_trees(requests, nodes, device).long()
    tokens = distinct_siblings(parents, vocabulary)
    sizes = torch.full((requests,), nodes, device=device)
    rows = requests * (nodes + 1)
    row_of = torch.arange(rows, device=device).view(requests, nodes + 1)
    copies = max(1, min(4, int(CACHE_BYTES // (rows * vocabulary * 4))))
    sets = [torch.randn(rows, vocabulary, device=device).mul_(2).softmax(-1) for _ in range(copies)]
    for probs in sets:  # likely children, so that paths get long
        at = row_of.gather(1, parents + 1)
        probs[at, tokens] += 0.2
        probs /= probs.sum(-1, keepdim=True)
    uniforms = torch.rand(requests, 2, device=device, dtype=torch.float64)
    levels = 8

    def check() -> None:
        ours = op.exit_law(sets[0], tokens, parents, sizes, row_of, uniforms, levels)
        expected = op.exit_law_reference(sets[0], tokens, parents, sizes, row_of, uniforms, levels)
        for a, b in zip(ours, expected, strict=True):
            assert torch.equal(a, b.to(a.device))

    return Prepared(
        runs=[lambda p=p: op.exit_law(p, tokens, parents, sizes, row_of, uniforms, levels) for p in sets],
        check=check,
        bytes=rows * vocabulary * 4,
        others={"torch multinomial": [lambda p=p: torch.multinomial(p, 1) for p in sets]},
    )
