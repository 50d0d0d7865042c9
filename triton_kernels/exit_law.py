# SPDX-License-Identifier: Apache-2.0
"""The exit law: where the walk through a tree leaves it, and with which token, from two uniforms per request.

With ``p_v`` the row of node ``v``, ``P(v)`` the product of the row probabilities along the path to ``v`` and ``m(v)``
the mass of ``p_v`` on the children of ``v``,

    ``exit ~ P(v) (1 - m(v))``   over the root and all nodes,
    ``continuation ~ p_exit``    without the exit's children, renormalised.

Both are drawn by inverting the distribution function in float64: the first index whose cumulative mass exceeds
``uniform * total``.  ``1 - m(v)`` is summed from what the children leave, never by subtraction, and an entry without
mass is never drawn.  Source: "Where Draft Trees Lose Target Mass: Exit-Guided Speculative Decoding" (TEV).

Two launches: sums of blocks of every row with the children left out (one pass over the vocabulary), then one program
per request that does the rest and reads one more block, the one in which the continuation lies.  Rows are
probabilities, or logits with each row's log-sum-exp.  Greedy requests need their rows' argmax only.

``R`` requests, ``T`` rows, ``V`` vocabulary, ``B`` tree nodes, ``D`` levels.  Where a shape is ``[R, B + 1]``, 0 is the
root and ``b + 1`` is node ``b``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, power_of_two

BLOCK = 4096
"""Entries of a row that are summed, and later searched, by one program."""

_SAMPLED, _GREEDY, _MIXED = 0, 1, 2


class Exits(NamedTuple):
    """The verifier's decision, int64."""

    exit_node: Tensor  # [R] 0 for the root, b + 1 for node b
    path: Tensor  # [R, D] accepted nodes, root side first, -1 behind them
    length: Tensor  # [R] accepted tokens
    continuation: Tensor  # [R] token
    emitted: Tensor  # [R, D + 1] accepted tokens, then the continuation, then -1


@triton.jit
def _divide(x, y):
    """``x / y`` within a last bit for positive ``y``; the correctly rounded division is a call that costs registers."""
    inverse = 1.0 / y
    quotient = x * inverse
    better = tl.fma(tl.fma(-quotient, y, x), inverse, quotient)
    return tl.where(x == float("-inf"), x, better)


@triton.jit
def _probability(
    rows, row, offset, mask, row_stride, normaliser, temperature, LOGITS: tl.constexpr, TEMPERATURE: tl.constexpr
):
    """float32 probabilities of entries ``offset`` of row(s) ``row``; 0 outside ``mask``."""
    if LOGITS:
        x = tl.load(rows + row * row_stride + offset, mask=mask, other=float("-inf")).to(tl.float32)
        if TEMPERATURE:
            x = _divide(x, tl.zeros_like(x) + temperature)
        x = tl.exp(x - tl.load(normaliser + row))
    else:
        x = tl.load(rows + row * row_stride + offset, mask=mask, other=0.0)
    return x


@triton.jit
def _without_children(p, tokens, parents, size, node, start, B: tl.constexpr, BLOCK: tl.constexpr):
    """Zero the entries of ``p``, which begins at token ``start``, that are children of ``node`` (0 is the root)."""
    j = tl.arange(0, B)
    token = tl.load(tokens + j, mask=j < size, other=-1)
    parent = tl.load(parents + j, mask=j < size, other=-2)
    place = (token - start).to(tl.int32)
    child = (parent == node - 1) & (place >= 0) & (place < BLOCK)
    if tl.sum(child.to(tl.int32), 0) > 0:
        p = tl.where(tl.histogram(tl.where(child, place, 0), BLOCK, mask=child) > 0, 0.0, p)
    return p


@triton.jit
def _draw(mass, uniform, index, NONE: tl.constexpr):
    """First index whose cumulative mass exceeds ``uniform * total``, ``NONE`` without any mass."""
    cumulative = tl.cumsum(mass, 0)
    return _search(mass, cumulative, uniform * _total(mass, cumulative), index, NONE)


@triton.jit
def _total(mass, cumulative):
    # A parallel scan need not be monotone to the last bit, so its largest value is the total.
    return tl.max(tl.where(mass > 0, cumulative, 0.0), 0)


@triton.jit
def _search(mass, cumulative, target, index, NONE: tl.constexpr):
    total = _total(mass, cumulative)
    # A target that rounds up to the total would find no entry: the next float64 below it is the largest allowed.
    below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    target = tl.where(total > 0, tl.minimum(target, below), 0.0)
    return tl.min(tl.where((mass > 0) & (cumulative > target), index, NONE), 0)


@triton.jit
def _masses_kernel(
    rows,
    tokens,
    parents,
    sizes,
    row_of,
    greedy,
    normaliser,
    temperature,
    partial,
    row_stride,
    tree_stride,
    row_of_stride,
    vocabulary,
    nodes,
    blocks,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    LOGITS: tl.constexpr,
    TEMPERATURE: tl.constexpr,
):
    """Program (request and node, block): the block's mass without the node's children, in float64."""
    place = tl.program_id(0).to(tl.int64)
    request = place // (nodes + 1)
    node = (place % (nodes + 1)).to(tl.int32)
    size = tl.load(sizes + request).to(tl.int32)
    wanted = node <= size
    if MODE == 2:
        wanted = wanted & (tl.load(greedy + request) == 0)
    if wanted:
        start = tl.program_id(1) * BLOCK
        offset = start + tl.arange(0, BLOCK)
        row = tl.load(row_of + request * row_of_stride + node).to(tl.int64)
        heat = 1.0
        if TEMPERATURE:
            heat = tl.load(temperature + request)
        inside = offset < vocabulary
        p = _probability(rows, row, offset, inside, row_stride, normaliser, heat, LOGITS, TEMPERATURE)
        tree = request * tree_stride
        p = _without_children(p, tokens + tree, parents + tree, size, node, start, B, BLOCK)
        tl.store(partial + place * blocks + tl.program_id(1), tl.sum(p.to(tl.float64), 0))


@triton.jit
def _exit_kernel(
    rows,
    tokens,
    parents,
    sizes,
    row_of,
    argmax,
    greedy,
    normaliser,
    temperature,
    partial,
    uniforms,
    out_exit,
    out_path,
    out_length,
    out_continuation,
    out_emitted,
    row_stride,
    tree_stride,
    row_of_stride,
    vocabulary,
    nodes,
    blocks,
    levels,
    N: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_CHUNK: tl.constexpr,
    LEVEL_CHUNK: tl.constexpr,
    MODE: tl.constexpr,
    LOGITS: tl.constexpr,
    TEMPERATURE: tl.constexpr,
):
    """Program (request): path products, exit, accepted path and continuation."""
    request = tl.program_id(0).to(tl.int64)
    tokens += request * tree_stride
    parents += request * tree_stride
    row_of += request * row_of_stride
    size = tl.load(sizes + request).to(tl.int32)
    is_greedy = tl.full([], 1 if MODE == 1 else 0, tl.int32)
    if MODE == 2:
        is_greedy = (tl.load(greedy + request) != 0).to(tl.int32)
    heat = 1.0
    if TEMPERATURE:
        heat = tl.load(temperature + request)

    # Each edge's probability in the parent's row.  The root points at itself, with product 1 and depth 0.
    u = tl.arange(0, N)
    node = (u >= 1) & (u <= size)
    token = tl.load(tokens + u - 1, mask=node, other=-1)
    up = tl.load(parents + u - 1, mask=node, other=-1).to(tl.int32) + 1
    row = tl.load(row_of + up, mask=node, other=0).to(tl.int64)
    edge = tl.zeros([N], tl.float64)
    if MODE != 1:
        sampled = node.to(tl.int32) > is_greedy
        edge = _probability(rows, row, token, sampled, row_stride, normaliser, heat, LOGITS, TEMPERATURE).to(tl.float64)
    if MODE != 0:
        sure = node.to(tl.int32) * is_greedy > 0
        hit = tl.load(argmax + row, mask=sure, other=-2) == token
        edge = tl.where(sure, hit.to(tl.float64), edge)

    # Products and depths by pointer doubling.
    product = tl.where(u == 0, 1.0, edge)
    depth = node.to(tl.int32)
    hop = up
    while tl.max(hop, 0) > 0:
        product = product * tl.gather(product, hop, 0)
        depth = depth + tl.gather(depth, hop, 0)
        hop = tl.gather(hop, hop, 0)

    # The exit.  A greedy walk's nodes have product 1 and form a path, whose end comes last.
    chosen = tl.max(tl.where(product > 0, u, 0), 0)
    if MODE != 1:
        partial += request * (nodes + 1) * blocks
        if is_greedy == 0:
            residual = tl.zeros([N], tl.float64)
            for begin in range(0, blocks, BLOCK_CHUNK):
                column = begin + tl.arange(0, BLOCK_CHUNK)
                inside = (u <= size)[:, None] & (column < blocks)[None, :]
                residual += tl.sum(tl.load(partial + u[:, None] * blocks + column[None, :], mask=inside, other=0.0), 1)
            law = tl.where(u <= size, product * residual, 0.0)
            chosen = _draw(law, tl.load(uniforms + request * 2).to(tl.float64), u, N)
            chosen = tl.where(chosen == N, 0, chosen)

    # The continuation.
    exit_row = tl.load(row_of + chosen).to(tl.int64)
    continuation = tl.full([], 0, tl.int64)
    if MODE != 0:
        continuation = tl.load(argmax + exit_row, mask=is_greedy > 0, other=0).to(tl.int64)
    if MODE != 1:  # noqa: SIM102 - a constant and a run-time condition
        if is_greedy == 0:
            column = tl.arange(0, BLOCKS)
            part = tl.load(partial + chosen * blocks + column, mask=column < blocks, other=0.0)
            cumulative = tl.cumsum(part, 0)
            target = tl.load(uniforms + request * 2 + 1).to(tl.float64) * _total(part, cumulative)
            block = _search(part, cumulative, target, column, BLOCKS)
            block = tl.where(block == BLOCKS, 0, block)
            target -= tl.sum(tl.where(column < block, part, 0.0), 0)
            offset = tl.arange(0, BLOCK)
            start = block * BLOCK
            inside = start + offset < vocabulary
            p = _probability(rows, exit_row, start + offset, inside, row_stride, normaliser, heat, LOGITS, TEMPERATURE)
            p = _without_children(p, tokens, parents, size, chosen, start, B, BLOCK).to(tl.float64)
            # Rounding may put the target a last bit outside the block: its first or last entry with mass then.
            found = _search(p, tl.cumsum(p, 0), target, offset, BLOCK)
            continuation = (start + tl.where(found == BLOCK, 0, found)).to(tl.int64)

    # The accepted path: in preorder the ancestor at a depth is the last node of that depth up to the exit.
    length = tl.sum(tl.where(u == chosen, depth, 0), 0)
    tl.store(out_exit + request, chosen.to(tl.int64))
    tl.store(out_length + request, length.to(tl.int64))
    tl.store(out_continuation + request, continuation)
    for begin in range(0, levels + 1, LEVEL_CHUNK):
        level = begin + tl.arange(0, LEVEL_CHUNK)
        candidate = (depth[None, :] == level[:, None] + 1) & (u <= chosen)[None, :]
        last = tl.max(tl.where(candidate, u[None, :], 0), 1) - 1
        accepted = level < length
        last = tl.where(accepted, last, -1)
        tl.store(out_path + request * levels + level, last.to(tl.int64), mask=level < levels)
        value = tl.load(tokens + last, mask=accepted, other=-1)
        value = tl.where(level == length, continuation, value)
        tl.store(out_emitted + request * (levels + 1) + level, value, mask=level <= levels)


def exit_law(
    rows: Tensor | None,
    tokens: Tensor,
    parents: Tensor,
    sizes: Tensor,
    row_of: Tensor,
    uniforms: Tensor | None,
    levels: int,
    argmax: Tensor | None = None,
    greedy: Tensor | None = None,
    normaliser: Tensor | None = None,
    temperature: Tensor | None = None,
    block: int = BLOCK,
) -> Exits:
    """Draw every request's exit and continuation.

    Args:
        rows: ``[T, V]``, entries next to each other: float32 probabilities, or with ``normaliser`` logits (bfloat16,
            float16 or float32; ``-inf`` is allowed).  ``None`` when all requests are greedy.
        tokens, parents: int64 ``[R, B]`` trees in depth-first preorder, parent -1 for a child of the root; equal row
            strides.  What stands behind ``sizes`` is not read.
        sizes: int32 or int64 ``[R]``, nodes of each tree.
        row_of: int32 or int64 ``[R, B + 1]``, row of the root and of each node.
        uniforms: float64 or float32 ``[R, 2]`` in ``[0, 1)``, contiguous: for the exit and for the continuation.  Not
            read for greedy requests; ``None`` when all are.
        levels: ``D``, at least the depth of the deepest tree.
        argmax: int64 ``[T]``, rows' tokens, for greedy requests.
        greedy: bool ``[R]``; without it all requests are greedy when ``rows`` is ``None`` and none otherwise.
        normaliser: float32 ``[T]``, log-sum-exp of each row of ``logits / temperature``.
        temperature: float32 ``[R]``, with ``normaliser`` only; 1 without it.
        block: entries that are summed by one program, a power of two.

    Raises:
        ValueError: rows, argmax and uniforms do not go together, or a tensor is laid out otherwise.
    """
    requests, nodes = tokens.shape
    if rows is None and argmax is None:
        raise ValueError("rows and argmax are both None: allowed are rows, argmax of greedy rows, or both")
    if greedy is not None and argmax is None:
        raise ValueError("greedy requests need argmax")
    if rows is not None and uniforms is None:
        raise ValueError("sampled requests need uniforms")
    if rows is not None and normaliser is None and rows.dtype != torch.float32:
        raise ValueError(f"probabilities of dtype {rows.dtype}; allowed: torch.float32 (logits need normaliser)")
    if temperature is not None and normaliser is None:
        raise ValueError("temperature applies to logits, which need normaliser")
    if rows is not None and rows.stride(1) != 1:
        raise ValueError(f"rows of stride {rows.stride(1)} along the vocabulary; allowed: 1")
    if nodes and (tokens.stride() != parents.stride() or (nodes > 1 and tokens.stride(1) != 1)):
        raise ValueError(f"tokens of strides {tokens.stride()}, parents {parents.stride()}; allowed: equal, columns 1")
    blocks = 0 if rows is None else -(-rows.shape[1] // block)
    device = tokens.device
    partial = torch.empty((requests, nodes + 1, blocks), dtype=torch.float64, device=device)
    out = Exits(
        torch.empty(requests, dtype=torch.int64, device=device),
        torch.empty((requests, levels), dtype=torch.int64, device=device),
        torch.empty(requests, dtype=torch.int64, device=device),
        torch.empty(requests, dtype=torch.int64, device=device),
        torch.empty((requests, levels + 1), dtype=torch.int64, device=device),
    )
    for launch in exit_law_launches(
        rows, tokens, parents, sizes, row_of, uniforms, argmax, greedy, normaliser, temperature, partial, out, block
    ):
        launch.run()
    return out


def exit_law_launches(
    rows: Tensor | None,
    tokens: Tensor,
    parents: Tensor,
    sizes: Tensor,
    row_of: Tensor,
    uniforms: Tensor | None,
    argmax: Tensor | None,
    greedy: Tensor | None,
    normaliser: Tensor | None,
    temperature: Tensor | None,
    partial: Tensor,
    out: Exits,
    block: int = BLOCK,
) -> list[Launch]:
    """Launches of ``exit_law``: two, or one when all requests are greedy.

    Args:
        partial: float64 ``[R, B + 1, ceil(V / block)]`` for the blocks' masses.
        out: the outputs, contiguous.
    """
    requests, nodes = tokens.shape
    vocabulary = 1 if rows is None else rows.shape[1]
    blocks = -(-vocabulary // block)
    mode = _GREEDY if rows is None else _SAMPLED if greedy is None else _MIXED
    size = power_of_two(nodes + 1, 16)

    def given(tensor: Tensor | None) -> Tensor:
        return partial if tensor is None else tensor  # stands for what is never read

    common = {
        "rows": given(rows),
        "tokens": tokens,
        "parents": parents,
        "sizes": sizes,
        "row_of": row_of,
        "greedy": partial if greedy is None else greedy.view(torch.uint8),
        "normaliser": given(normaliser),
        "temperature": given(temperature),
        "partial": partial,
        "row_stride": 0 if rows is None else rows.stride(0),
        "tree_stride": tokens.stride(0),
        "row_of_stride": row_of.stride(0),
        "vocabulary": vocabulary,
        "nodes": nodes,
        "blocks": blocks,
        "B": power_of_two(nodes, 16),
        "BLOCK": block,
        "MODE": mode,
        "LOGITS": normaliser is not None,
        "TEMPERATURE": temperature is not None,
    }
    last = {
        "argmax": given(argmax),
        "uniforms": given(uniforms),
        "out_exit": out.exit_node,
        "out_path": out.path,
        "out_length": out.length,
        "out_continuation": out.continuation,
        "out_emitted": out.emitted,
        "levels": out.path.shape[1],
        "N": size,
        "BLOCKS": power_of_two(blocks, 2),
        "BLOCK_CHUNK": max(1, min(power_of_two(blocks, 1), 4096 // size)),
        "LEVEL_CHUNK": max(1, min(power_of_two(out.path.shape[1] + 1, 1), 4096 // size)),
    }
    launches = [Launch(_exit_kernel, (requests,), {**common, **last}, num_warps=8)]
    if rows is not None:
        launches.insert(0, Launch(_masses_kernel, (requests * (nodes + 1), blocks), common, num_warps=8))
    return launches


def exit_law_reference(
    rows: Tensor,
    tokens: Tensor,
    parents: Tensor,
    sizes: Tensor,
    row_of: Tensor,
    uniforms: Tensor,
    levels: int,
) -> Exits:
    """``exit_law`` for rows of probabilities, one request after the other, in float64.

    Greedy rows are point masses, logits are to be turned into probabilities first.
    """
    requests = len(sizes)
    out = Exits(
        torch.zeros(requests, dtype=torch.int64),
        torch.full((requests, levels), -1, dtype=torch.int64),
        torch.zeros(requests, dtype=torch.int64),
        torch.zeros(requests, dtype=torch.int64),
        torch.full((requests, levels + 1), -1, dtype=torch.int64),
    )
    for r in range(requests):
        size = int(sizes[r])
        product, left, paths = [1.0], [rows[int(row_of[r, 0])].double().clone()], [list[int]()]
        for b in range(size):
            parent, token = int(parents[r, b]), int(tokens[r, b])
            product.append(product[parent + 1] * float(rows[int(row_of[r, parent + 1]), token]))
            left.append(rows[int(row_of[r, b + 1])].double().clone())
            left[parent + 1][token] = 0
            paths.append([*paths[parent + 1], b])
        law = torch.tensor([p * float(row.sum()) for p, row in zip(product, left, strict=True)], dtype=torch.float64)
        leave = _draw_reference(law, float(uniforms[r, 0]))
        continuation = _draw_reference(left[leave], float(uniforms[r, 1]))
        path = paths[leave]
        out.exit_node[r], out.length[r], out.continuation[r] = leave, len(path), continuation
        out.path[r, : len(path)] = torch.tensor(path, dtype=torch.int64)
        emitted = [*(int(tokens[r, b]) for b in path), continuation]
        out.emitted[r, : len(emitted)] = torch.tensor(emitted)
    return out


def _draw_reference(mass: Tensor, uniform: float) -> int:
    """First index with mass whose cumulative mass exceeds ``uniform * total``."""
    cumulative = mass.cumsum(0)
    found = (cumulative > uniform * float(cumulative[-1])) & (mass > 0)
    return int(found.nonzero()[0]) if bool(found.any()) else int(mass.nonzero()[-1])
