# SPDX-License-Identifier: Apache-2.0
"""Depth, position and ancestor bits of every tree node, from the parents alone.

``depth(v) = 1 + depth(parent(v))`` with the root at depth 0, and ``bit j of row v = 1`` when ``j`` is ``v``, an
ancestor of ``v`` or the root: what ``v`` may attend to inside its own tree (the tree mask of tree attention, SpecInfer,
arXiv 2305.09781, as bits instead of an ``N x N`` mask).

Shapes: ``R`` requests, ``N`` nodes of the padded trees, ``W = ceil((N + 1) / 64)`` words.

* ``parents`` int32 or int64 ``[R, N]``: parents come before their children, -1 = child of the root;
* ``sizes`` int32 or int64 ``[R]``: nodes of each tree, 0 = no tree;
* ``depth`` int32 ``[R, N]``: 1 = child of the root, 0 behind the tree;
* ``bits`` int64 ``[R, N + 1, W]``: row 0 is the root, row ``i + 1`` node ``i``; column ``j`` is bit ``j % 64`` of word
  ``j // 64``; rows behind the tree are 0;
* ``positions`` int32 or int64 ``[R, N]``: ``root_position + depth``.

Each lane walks from its node up to the root.  A draft tree is shallow, so that is a handful of loads that all hit the
first-level cache; a chain of 1,024 nodes still ends, after 1,024 steps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launch import Launch

ROWS = 32  # rows of ``bits`` per program


@triton.jit
def _tree_mask_kernel(
    parents,
    sizes,
    root_position,
    depth,
    positions,
    bits,
    parents_stride,
    nodes,
    words,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program: ``ROWS`` rows and ``WORDS`` words of one request."""
    request = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    size = tl.load(sizes + request).to(tl.int32)
    size = tl.minimum(size, nodes)
    exists = row <= size

    # ``at`` is the bit of the node the lane stands on: 0 = the root, -1 = past the root.
    at = tl.where(exists, row, -1)
    found = tl.zeros((ROWS, WORDS), dtype=tl.int64)
    steps = tl.zeros((ROWS,), dtype=tl.int32)
    one = tl.full((ROWS,), 1, dtype=tl.int64)
    while tl.max(at, axis=0) >= 0:
        on = at >= 0
        bit = one << (at & 63).to(tl.int64)
        found |= tl.where(on[:, None] & ((at >> 6)[:, None] == word[None, :]), bit[:, None], 0)
        inside = at > 0
        steps += inside.to(tl.int32)
        parent = tl.load(parents + request * parents_stride + at - 1, mask=inside, other=-2).to(tl.int32)
        # A parent that does not come before its child would never end: it counts as the root.
        parent = tl.where(inside & (parent >= at - 1), -1, parent)
        at = tl.where(inside, tl.maximum(parent, -1) + 1, -1)

    base = bits + (request * (nodes + 1) + row[:, None]) * words + word[None, :]
    tl.store(base, found, mask=(row <= nodes)[:, None] & (word < words)[None, :])
    if tl.program_id(1) == 0:
        node = row - 1
        held = (node >= 0) & (node < nodes)
        tl.store(depth + request * nodes + node, steps, mask=held)
        if positions is not None:
            root = tl.load(root_position + request)
            tl.store(positions + request * nodes + node, root + steps, mask=held)


def words(nodes: int) -> int:
    """Words of a row of bits for a tree of ``nodes`` nodes and its root."""
    return (nodes + 64) // 64


def launches(
    parents: torch.Tensor,
    sizes: torch.Tensor,
    root_position: torch.Tensor | None,
    depth: torch.Tensor,
    positions: torch.Tensor | None,
    bits: torch.Tensor,
) -> list[Launch]:
    """The one launch that fills ``depth``, ``positions`` and ``bits`` (all contiguous; shapes above)."""
    requests, nodes = parents.shape
    width = words(nodes)
    columns = min(triton.next_power_of_2(width), 8)
    arguments: dict[str, Any] = {
        "parents": parents,
        "sizes": sizes,
        "root_position": root_position,
        "depth": depth,
        "positions": positions,
        "bits": bits,
        "parents_stride": parents.stride(0) if nodes else 0,
        "nodes": nodes,
        "words": width,
        "ROWS": ROWS,
        "WORDS": columns,
    }
    grid = (triton.cdiv(nodes + 1, ROWS), triton.cdiv(width, columns), requests)
    return [Launch(_tree_mask_kernel, grid, arguments, num_warps=1, num_stages=1)]


def tree_mask(
    parents: torch.Tensor, sizes: torch.Tensor, root_position: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Depth, positions and ancestor bits of a batch of trees, in one launch.

    Args:
        parents: int32 or int64 ``[R, N]``, nodes contiguous.
        sizes: int32 or int64 ``[R]``, contiguous.
        root_position: int32 or int64 ``[R]`` position of each root, or ``None``.

    Returns:
        ``depth`` int32 ``[R, N]``, ``positions`` like ``root_position`` ``[R, N]`` (``None`` without root positions;
        behind the tree the root's own position) and ``bits`` int64 ``[R, N + 1, W]``.  The caller owns all of them.

    Raises:
        ValueError: a wrong shape, dtype or layout.
    """
    if parents.dim() != 2 or parents.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"parents must be int32 or int64 [requests, nodes], not {parents.dtype} {list(parents.shape)}")
    requests, nodes = parents.shape
    if nodes and parents.stride(1) != 1:
        raise ValueError("the nodes of a request must be contiguous in parents")
    _check_vector("sizes", sizes, requests)
    if root_position is not None:
        _check_vector("root_position", root_position, requests)
    device = parents.device
    depth = torch.empty((requests, nodes), dtype=torch.int32, device=device)
    bits = torch.empty((requests, nodes + 1, words(nodes)), dtype=torch.int64, device=device)
    positions = None
    if root_position is not None:
        positions = torch.empty((requests, nodes), dtype=root_position.dtype, device=device)
    for launch in launches(parents, sizes, root_position, depth, positions, bits):
        launch.run()
    return depth, positions, bits


def _check_vector(name: str, value: torch.Tensor, requests: int) -> None:
    if value.dtype not in (torch.int32, torch.int64) or value.shape != (requests,) or not value.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous int32 or int64 [{requests}], not {value.dtype} {list(value.shape)}"
        )


def tree_mask_reference(
    parents: torch.Tensor, sizes: torch.Tensor, root_position: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The same by loops over requests and nodes."""
    requests, nodes = parents.shape
    width = words(nodes)
    depth = torch.zeros((requests, nodes), dtype=torch.int32)
    bits = torch.zeros((requests, nodes + 1, width), dtype=torch.int64)
    for r in range(requests):
        rows = [1]  # each row as one Python integer
        for i in range(int(sizes[r])):
            parent = int(parents[r, i])
            rows.append(rows[parent + 1] | 1 << (i + 1))
            depth[r, i] = 1 if parent < 0 else int(depth[r, parent]) + 1
        for i, row in enumerate(rows):
            for w in range(width):
                word = row >> (64 * w) & (2**64 - 1)
                bits[r, i, w] = word - 2**64 if word >= 2**63 else word
    depth, bits = depth.to(parents.device), bits.to(parents.device)
    positions = None if root_position is None else root_position[:, None] + depth.to(root_position.dtype)
    return depth, positions, bits
