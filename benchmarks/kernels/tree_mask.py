# SPDX-License-Identifier: Apache-2.0
"""Benchmark cases of ``tree_mask``: beside a dense mask by pointer doubling in torch."""

from __future__ import annotations

import torch
from common import Case, Prepared, kernels
from trees import batch_of_trees


def cases(scale: str) -> list[Case]:
    """Batches of trees as the engine has them; ``small`` for the interpreter."""
    sizes = [(2, 8)] if scale == "small" else [(1, 8), (1, 59), (1, 256), (8, 59), (64, 59), (64, 256), (64, 1024)]
    return [Case("tree_mask", f"batch {r}, {n} nodes", lambda device, r=r, n=n: _make(device, r, n)) for r, n in sizes]


def _make(device: torch.device, requests: int, nodes: int) -> Prepared:
    op = kernels("tree_mask")
    parents = batch_of_trees(requests, nodes, device)
    sizes = torch.full((requests,), nodes, dtype=torch.int32, device=device)
    root = torch.arange(1000, 1000 + requests, dtype=torch.int64, device=device)

    def check() -> None:
        for ours, expected in zip(
            op.tree_mask(parents, sizes, root), op.tree_mask_reference(parents, sizes, root), strict=True
        ):
            assert torch.equal(ours, expected.to(ours.device))

    moved = parents.numel() * (4 + 4 + 8) + requests * (nodes + 1) * op.words(nodes) * 8
    return Prepared(
        runs=[lambda: op.tree_mask(parents, sizes, root)],
        check=check,
        bytes=moved,
        others={"torch dense": [lambda: dense_mask(parents)]},
    )


def dense_mask(parents: torch.Tensor) -> torch.Tensor:
    """Bool ``[R, N + 1, N + 1]``: which rows see which; row 0 is the root."""
    requests, nodes = parents.shape
    up = torch.cat((torch.zeros_like(parents[:, :1]), parents + 1), dim=1).long()
    mask = torch.eye(nodes + 1, dtype=torch.bool, device=parents.device).expand(requests, -1, -1)
    for _ in range(nodes.bit_length()):
        mask = mask | mask.gather(1, up[:, :, None].expand(-1, -1, nodes + 1))
        up = up.gather(1, up)
    return mask
