# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of ``frontier``: the children of drafter rows, a level of the pool, and the choice of the tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import Case, Prepared, kernels

TOPK = 10
CACHE_BYTES = 100e6


def cases(scale: str) -> list[Case]:
    """Draft vocabularies of Llama's heads (32k) and whole vocabularies; ``small`` for the interpreter."""
    if scale == "small":
        return [
            Case("frontier", "children, 2 rows of 300", lambda device: _children(device, 2, 300)),
            Case("frontier", "select draft, batch 2, pool 20", lambda device: _select(device, 2, 2, 5, 6, "draft")),
        ]
    children = [(rows, v) for rows in (1, 10, 80, 640) for v in (32_000, 128_256)]
    choices = [(r, budget, rule) for r in (1, 8, 64) for budget in (8, 59, 256) for rule in ("draft", "root")]
    return [
        Case("frontier", f"children, {n} rows of {v}", lambda device, n=n, v=v: _children(device, n, v))
        for n, v in children
    ] + [
        Case(
            "frontier",
            f"select {rule}, batch {r}, pool 710, {b} nodes",
            lambda device, r=r, b=b, rule=rule: _select(device, r, TOPK, 8, b, rule),
        )
        for r, b, rule in choices
    ]


def _children(device: torch.device, rows: int, vocabulary: int) -> Prepared:
    op = kernels("frontier")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    copies = max(1, min(8, int(CACHE_BYTES // (rows * vocabulary * 2))))
    sets = [(torch.randn(rows, vocabulary, device=device) * 4).to(dtype) for _ in range(copies)]
    d2t = torch.randperm(vocabulary, device=device)
    k = min(TOPK, vocabulary)

    def check() -> None:
        log_q, token = op.topk_log_softmax(sets[0], k, d2t)
        expected_q, expected = op.topk_log_softmax_reference(sets[0], k, d2t)
        assert torch.equal(token.long(), expected)
        assert (log_q - expected_q).abs().max().item() < 1e-4

    def plain(logits: torch.Tensor) -> Any:
        return torch.log_softmax(logits.float(), dim=-1).topk(k)

    return Prepared(
        runs=[lambda x=x: op.topk_log_softmax(x, k, d2t) for x in sets],
        check=check,
        bytes=sets[0].numel() * sets[0].element_size(),
        others={"torch log_softmax, topk": [lambda x=x: plain(x) for x in sets]},
    )


def random_pool(device: torch.device, requests: int, k: int, depth: int) -> dict[str, Any]:
    """A pool as the drafter grows it: ``k`` children of the best ``k`` nodes of each level."""
    generator = torch.Generator().manual_seed(requests)

    def log_q(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, 50, generator=generator).mul(2).log_softmax(-1).sort(-1, descending=True)[0][..., :k]

    score = log_q(requests)
    index = torch.arange(k).expand(requests, k)
    parents, branch, depths = [torch.full_like(index, -1)], [index], [torch.ones_like(index)]
    scores, front, front_score, front_branch, base = [score], index, score, index, k
    for level in range(2, depth + 1):
        score = (front_score[:, :, None] + log_q(requests, k)).flatten(1)
        parents.append(front.repeat_interleave(k, 1))
        branch.append(front_branch.repeat_interleave(k, 1))
        depths.append(torch.full_like(parents[-1], level))
        scores.append(score)
        front_score, best = score.topk(k, dim=1)
        front, front_branch = base + best, branch[-1].gather(1, best)
        base += k * k
    nodes = sum(part.shape[1] for part in scores)
    tokens = torch.stack([torch.randperm(10 * nodes, generator=generator)[:nodes] for _ in range(requests)])
    parts = {"tokens": tokens, "parents": torch.cat(parents, 1), "depth": torch.cat(depths, 1)}
    parts |= {"score": torch.cat(scores, 1), "branch": torch.cat(branch, 1)}
    return {name: part.to(device) for name, part in parts.items()} | {"width": k}


def _select(device: torch.device, requests: int, k: int, depth: int, budget: int, rule: str) -> Prepared:
    op = kernels("frontier")
    pool = random_pool(device, requests, k, depth)
    root = torch.randn(requests, 50, device=device).log_softmax(-1)[:, :k].contiguous() if rule == "root" else None
    wishes = {**pool, "budget": budget, "rule": rule, "root_log_p": root}

    def check() -> None:
        for ours, expected in zip(op.select(**wishes), op.select_reference(**wishes), strict=True):
            assert torch.equal(ours, expected.to(ours))

    pool_bytes = sum(part.numel() * part.element_size() for part in pool.values() if isinstance(part, torch.Tensor))
    others: dict[str, list[Callable[[], Any]]] = {"torch topk": [lambda: pool["score"].topk(budget, dim=1)]}
    return Prepared(
        runs=[lambda: op.select(**wishes)],
        check=check,
        bytes=pool_bytes + requests * budget * 24,
        others=others if budget <= pool["score"].shape[1] else {},
    )
