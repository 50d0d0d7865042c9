# SPDX-License-Identifier: Apache-2.0
"""Growing a pool's frontier, and choosing the tree out of the pool.

*Children* (``topk_log_softmax``): a drafter's row ``x`` gives its ``k`` most likely children,

    ``log q_i = x_i - log sum_j exp x_j``   for the ``k`` largest ``x_i``, larger first, ties to the smaller id,

in one pass over the vocabulary.  Each lane of a program keeps the best entry that it has met and an online sum
``sum exp(x - best)`` (one exponential per entry: the smaller of the two is scaled by ``exp(-|x - best|)``; Milakov and
Gimelshein, arXiv 1805.02867).  An entry that is not in one of the ``k`` lanes with the best heads has ``k`` better ones
before it, so only those lanes' entries, a ``k / lanes`` part of the row, are looked at again.

*Levels* (``expand``): path scores ``score(parent) + log q`` of the ``k`` children of ``k`` frontier nodes, and the best
``k`` of them as the next frontier (EAGLE-2, arXiv 2406.16858).  Ties go to the smaller index.

*Selection* (``select``): the rules ``draft``, ``root``, ``root_draw`` and ``pearl`` (arXiv 2610.29210), one program per
request: path scores in float64, a bitonic sort by (score, pool order), then depth-first preorder.  A node's place in
preorder is the number of nodes whose paths are lexicographically smaller.

``R`` requests, ``k`` children, ``N`` pool nodes, ``B`` tree nodes, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, power_of_two

MAX_K = 16
LANES = 2048
"""Entries of a row that a program looks at together."""
ROUNDS = 32
"""Most times that it does so."""
PROGRAMS = 264
"""Rows are split over programs until there are about this many (two for each multiprocessor of a large GPU)."""
RULES = {"draft": 0, "root": 1, "root_draw": 2, "pearl": 3}
NEVER = float("-inf")

_NO_KEY = tl.constexpr(-(2**63))
_NEVER_KEY = tl.constexpr(-0x7FF0000000000001)  # _order64 of -inf
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_LOG2_E = tl.constexpr(1.4426950408889634)


# ---------------------------------------------------------------------- order


@triton.jit
def _pack(value, index):
    """One int64 key of a float32 value and a non-negative index: larger value first, then smaller index."""
    value = tl.where(value == 0, 0.0, value)  # -0.0 ties with 0.0
    bits = value.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _unpack(key):
    order = (key >> 32).to(tl.int32)
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    index = 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
    return bits.to(tl.float32, bitcast=True), index


@triton.jit
def _order64(value):
    """int64 in the order of the float64 values."""
    value = tl.where(value == 0, 0.0, value)
    bits = value.to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@triton.jit
def _bit(DIMS: tl.constexpr, BIT: tl.constexpr):
    """Bit ``BIT`` of the position, shaped for a hypercube of ``DIMS`` dimensions (the last one is bit 0)."""
    return tl.reshape(tl.arange(0, 2), [1] * (DIMS - BIT - 1) + [2] + [1] * BIT) == 1


@triton.jit
def _partner(x, AXIS: tl.constexpr):
    """The other of two integers along an axis of length 2 (overflow of the sum cancels)."""
    return tl.sum(x, AXIS, keep_dims=True) - x


@triton.jit
def _order_keys(cube, DIMS: tl.constexpr, BIT: tl.constexpr, STAGE: tl.constexpr):
    """Order keys whose positions differ in ``BIT``: descending, or ascending where bit ``STAGE`` is set."""
    other = _partner(cube, DIMS - 1 - BIT)
    swap = (other > cube) ^ _bit(DIMS, BIT)
    if STAGE < DIMS:
        swap = swap ^ _bit(DIMS, STAGE)
    return tl.where(swap, other, cube)


@triton.jit
def _merge_keys(cube, DIMS: tl.constexpr, STAGE: tl.constexpr):
    """Sort bitonic runs of ``2 ** STAGE`` keys: descending, every second run ascending."""
    for step in tl.static_range(STAGE):
        cube = _order_keys(cube, DIMS, STAGE - 1 - step, STAGE)
    return cube


@triton.jit
def _halve_keys(cube, DIMS: tl.constexpr, LOG_K: tl.constexpr):
    """A descending run of ``2 ** LOG_K`` keys against its ascending neighbour: the larger of each pair, sorted."""
    cube = tl.max(cube, axis=DIMS - 1 - LOG_K)
    return _merge_keys(cube, DIMS - 1, LOG_K)


@triton.jit
def _top_keys(key, LOG_N: tl.constexpr, LOG_K: tl.constexpr):
    """The ``2 ** LOG_K`` largest of ``2 ** LOG_N`` keys, descending; ``1 <= LOG_K <= LOG_N``."""
    cube = tl.reshape(key, [2] * LOG_N)
    for stage in tl.static_range(1, LOG_K + 1):
        cube = _merge_keys(cube, LOG_N, stage)
    for halving in tl.static_range(LOG_N - LOG_K):
        cube = _halve_keys(cube, LOG_N - halving, LOG_K)
    return tl.reshape(cube, [2**LOG_K])


@triton.jit
def _order_pairs(cube, where, DIMS: tl.constexpr, BIT: tl.constexpr, STAGE: tl.constexpr):
    other = _partner(cube, DIMS - 1 - BIT)
    other_where = _partner(where, DIMS - 1 - BIT)
    better = (other > cube) | ((other == cube) & (other_where < where))
    swap = better ^ _bit(DIMS, BIT)
    if STAGE < DIMS:
        swap = swap ^ _bit(DIMS, STAGE)
    return tl.where(swap, other, cube), tl.where(swap, other_where, where)


@triton.jit
def _merge_pairs(cube, where, DIMS: tl.constexpr, STAGE: tl.constexpr):
    for step in tl.static_range(STAGE):
        cube, where = _order_pairs(cube, where, DIMS, STAGE - 1 - step, STAGE)
    return cube, where


@triton.jit
def _halve_pairs(cube, where, DIMS: tl.constexpr, LOG_K: tl.constexpr):
    best = tl.max(cube, axis=DIMS - 1 - LOG_K, keep_dims=True)
    where = tl.min(tl.where(cube == best, where, 0x7FFFFFFF), axis=DIMS - 1 - LOG_K)
    return _merge_pairs(tl.max(cube, axis=DIMS - 1 - LOG_K), where, DIMS - 1, LOG_K)


@triton.jit
def _top_pairs(key, index, LOG_N: tl.constexpr, LOG_K: tl.constexpr):
    """``_top_keys`` of int64 keys together with distinct int32 indices; ties to the smaller index."""
    cube = tl.reshape(key, [2] * LOG_N)
    where = tl.reshape(index, [2] * LOG_N)
    for stage in tl.static_range(1, LOG_K + 1):
        cube, where = _merge_pairs(cube, where, LOG_N, stage)
    for halving in tl.static_range(LOG_N - LOG_K):
        cube, where = _halve_pairs(cube, where, LOG_N - halving, LOG_K)
    return tl.reshape(cube, [2**LOG_K]), tl.reshape(where, [2**LOG_K])


def _log2(n: int) -> int:
    return n.bit_length() - 1


# ---------------------------------------------------------------------- children


@triton.jit
def _store_children(key, best, total, row, log_q, token, d2t, k, K: tl.constexpr, MAPPED: tl.constexpr):
    slot = tl.arange(0, K)
    value, index = _unpack(key)
    # In this order large logits lose nothing: the first difference is exact where it matters.
    scaled = (value - best) - tl.log(total)
    tl.store(log_q + row * k + slot, tl.where(value == float("-inf"), value, scaled), mask=slot < k)
    chosen = index.to(tl.int64)
    if MAPPED:
        chosen = tl.load(d2t + index, mask=slot < k, other=0).to(tl.int64)
    tl.store(token + row * k + slot, chosen.to(token.dtype.element_ty), mask=slot < k)


@triton.jit
def _children_kernel(
    logits,
    keys,
    sums,
    log_q,
    token,
    d2t,
    row_stride,
    vocabulary,
    splits,
    k,
    BLOCK: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    LOG_SPAN: tl.constexpr,
    K: tl.constexpr,
    LOG_K: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Program (row, split): the split's best ``K`` keys and its part of the normaliser."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    x_row = logits + row * row_stride
    start = split * (BLOCK * SPAN)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    when = tl.zeros([BLOCK], tl.int32)
    rounds = tl.minimum(SPAN, tl.cdiv(vocabulary - start, BLOCK))
    for i in range(rounds):
        offset = start + i * BLOCK + lane
        x = tl.load(x_row + offset, mask=offset < vocabulary, other=float("-inf")).to(tl.float32)
        scale = tl.exp2(-tl.abs(x - tl.maximum(best, _LOWEST)) * _LOG2_E)
        better = x > best
        total = tl.where(better, total * scale + 1.0, total + scale)
        when = tl.where(better, i, when)
        best = tl.where(better, x, best)
    key = tl.where(start + lane < vocabulary, _pack(best, start + when * BLOCK + lane), _NO_KEY)
    key = _top_keys(key, LOG_BLOCK, LOG_K)
    if SPAN > 1:
        _, index = _unpack(key)
        chosen_lane = (index - start) % BLOCK
        turn = tl.arange(0, SPAN)
        offset = start + chosen_lane[:, None] + turn[None, :] * BLOCK
        inside = (key != _NO_KEY)[:, None] & (offset < vocabulary)
        x = tl.load(x_row + offset, mask=inside, other=float("-inf")).to(tl.float32)
        again = tl.where(inside, _pack(x, offset), _NO_KEY)
        key = _top_keys(tl.reshape(again, [K * SPAN]), LOG_K + LOG_SPAN, LOG_K)
    head = tl.maximum(tl.max(best, 0), _LOWEST)
    mass = tl.sum(total * tl.exp2((best - head) * _LOG2_E), 0)
    if ONE_SPLIT:
        _store_children(key, head, mass, row, log_q, token, d2t, k, K, MAPPED)
    else:
        part = row * splits + split
        tl.store(keys + part * K + tl.arange(0, K), key)
        tl.store(sums + part * 2, head)
        tl.store(sums + part * 2 + 1, mass)


@triton.jit
def _merge_kernel(
    keys,
    sums,
    log_q,
    token,
    d2t,
    splits,
    k,
    SPLITS: tl.constexpr,
    LOG_SPLITS: tl.constexpr,
    K: tl.constexpr,
    LOG_K: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Program (row): join its splits."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    head = tl.load(sums + (row * splits + split) * 2, mask=split < splits, other=_LOWEST)
    mass = tl.load(sums + (row * splits + split) * 2 + 1, mask=split < splits, other=0.0)
    best = tl.max(head, 0)
    total = tl.sum(mass * tl.exp2((head - best) * _LOG2_E), 0)
    entry = tl.arange(0, SPLITS * K)
    key = tl.load(keys + row * splits * K + entry, mask=entry < splits * K, other=_NO_KEY)
    key = _top_keys(key, LOG_SPLITS + LOG_K, LOG_K)
    _store_children(key, best, total, row, log_q, token, d2t, k, K, MAPPED)


class Splits(NamedTuple):
    """How the rows are split over programs, from shapes only."""

    block: int  # lanes of a program
    span: int  # entries that a lane meets at most
    splits: int  # programs for each row


def row_splits(rows: int, vocabulary: int, lanes: int = LANES) -> Splits:
    """Splits for ``rows`` rows over ``vocabulary`` entries."""
    block = min(lanes, power_of_two(vocabulary, MAX_K))
    wanted = min(-(-PROGRAMS // max(rows, 1)), -(-vocabulary // block))
    span = min(ROUNDS, power_of_two(-(-vocabulary // (wanted * block)), 1))
    return Splits(block, span, -(-vocabulary // (block * span)))


def topk_log_softmax(
    logits: Tensor, k: int, d2t: Tensor | None = None, lanes: int = LANES, token_dtype: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor]:
    """The ``k`` most likely entries of each row and their log-probabilities, larger first, ties to the smaller id.

    Args:
        logits: bfloat16, float16 or float32 ``[n, V]``, rows at any distance, entries next to each other; ``-inf`` is
            allowed, nan and ``+inf`` are not.  Logits of a draft vocabulary where ``d2t`` is given.
        k: at most 16 and at most ``V``.
        d2t: int32 or int64 ``[V]``, the target's id of each draft id; ids are the target's own without it.
        lanes: entries that a program looks at together, a power of two and at least 16.
        token_dtype: int64 or int32.

    Returns:
        log_q: float32 ``[n, k]``; ``-inf`` for a logit of ``-inf``, in a row of nothing else too.
        token: ``[n, k]`` ids in the target's vocabulary.

    Raises:
        ValueError: ``k`` is out of range or ``logits`` has no unit stride.
    """
    rows, vocabulary = logits.shape
    if not 1 <= k <= min(MAX_K, vocabulary):
        raise ValueError(f"k={k}; allowed: 1 to {min(MAX_K, vocabulary)} (16, or the vocabulary)")
    if vocabulary > 1 and logits.stride(1) != 1:
        raise ValueError(f"logits of stride {logits.stride(1)} along the vocabulary; allowed: 1")
    plan = row_splits(rows, vocabulary, lanes)
    log_q = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    token = torch.empty((rows, k), dtype=token_dtype, device=logits.device)
    keys, sums = topk_scratch(rows, k, plan, logits.device)
    for launch in topk_log_softmax_launches(logits, d2t, log_q, token, keys, sums, plan):
        launch.run()
    return log_q, token


def topk_scratch(rows: int, k: int, plan: Splits, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the splits leave for the merge: int64 keys ``[n, splits, K]`` and float32 sums ``[n, splits, 2]``."""
    splits = plan.splits if plan.splits > 1 else 0
    keys = torch.empty((rows, splits, power_of_two(k, 2)), dtype=torch.int64, device=device)
    return keys, torch.empty((rows, splits, 2), dtype=torch.float32, device=device)


def topk_log_softmax_launches(
    logits: Tensor, d2t: Tensor | None, log_q: Tensor, token: Tensor, keys: Tensor, sums: Tensor, plan: Splits
) -> list[Launch]:
    """Launches of ``topk_log_softmax``: one, or two where rows are split.

    Args:
        log_q, token: the outputs, contiguous ``[n, k]``.
        keys, sums, plan: from ``topk_scratch`` and ``row_splits``.
    """
    rows, k = log_q.shape
    width = power_of_two(k, 2)
    mapped = d2t is not None
    common = {
        "keys": keys,
        "sums": sums,
        "log_q": log_q,
        "token": token,
        "d2t": d2t if mapped else log_q,  # never read
        "splits": plan.splits,
        "k": k,
        "K": width,
        "LOG_K": _log2(width),
        "MAPPED": mapped,
    }
    rounds = {
        "logits": logits,
        "row_stride": logits.stride(0),
        "vocabulary": logits.shape[1],
        "BLOCK": plan.block,
        "LOG_BLOCK": _log2(plan.block),
        "SPAN": plan.span,
        "LOG_SPAN": _log2(plan.span),
        "ONE_SPLIT": plan.splits == 1,
    }
    warps = 8 if plan.block >= 2048 else 4
    launches = [Launch(_children_kernel, (rows, plan.splits), {**common, **rounds}, num_warps=warps)]
    if plan.splits > 1:
        splits = power_of_two(plan.splits, 2)
        joined = {**common, "SPLITS": splits, "LOG_SPLITS": _log2(splits)}
        launches.append(Launch(_merge_kernel, (rows,), joined, num_warps=4))
    return launches


def topk_log_softmax_reference(logits: Tensor, k: int, d2t: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``topk_log_softmax`` in float64 torch, by a stable sort of the whole row."""
    x = logits.double()
    best, index = x.sort(dim=1, descending=True, stable=True)
    log_q = best[:, :k] - x.logsumexp(dim=1, keepdim=True)
    log_q = log_q.masked_fill(best[:, :k] == NEVER, NEVER)
    return log_q, index[:, :k] if d2t is None else d2t.long()[index[:, :k]]


# ---------------------------------------------------------------------- levels


class Level(NamedTuple):
    """One level of the pool: ``[R, k * k]`` each, the children of frontier node ``i`` in columns ``i * k`` and on."""

    tokens: Tensor  # int64
    parents: Tensor  # int64, pool index
    depth: Tensor  # int64
    score: Tensor  # float32
    branch: Tensor  # int64, pool index of the ancestor in the first level


class Frontier(NamedTuple):
    """The ``k`` best nodes of a level, best first: ``[R, k]`` each."""

    token: Tensor  # int64
    score: Tensor  # float32
    node: Tensor  # int64, pool index
    branch: Tensor  # int64
    parent: Tensor  # int64, place of the node's parent in the frontier before, 0..k-1


@triton.jit
def _expand_kernel(
    log_q,
    token,
    frontier_score,
    frontier_node,
    frontier_branch,
    level_token,
    level_parent,
    level_depth,
    level_score,
    level_branch,
    next_token,
    next_score,
    next_node,
    next_branch,
    next_parent,
    level_stride,
    base,
    depth,
    k,
    KK: tl.constexpr,
    LOG_KK: tl.constexpr,
    K: tl.constexpr,
    LOG_K: tl.constexpr,
):
    """Program (request)."""
    request = tl.program_id(0).to(tl.int64)
    child = tl.arange(0, KK)
    inside = child < k * k
    parent = request * k + child // k
    entry = request * k * k + child
    score = tl.load(frontier_score + parent, mask=inside, other=0.0) + tl.load(log_q + entry, mask=inside, other=0.0)
    out = request * level_stride + child
    tl.store(level_score + out, score, mask=inside)
    tl.store(level_token + out, tl.load(token + entry, mask=inside, other=0).to(tl.int64), mask=inside)
    tl.store(level_parent + out, tl.load(frontier_node + parent, mask=inside, other=0), mask=inside)
    tl.store(level_branch + out, tl.load(frontier_branch + parent, mask=inside, other=0), mask=inside)
    tl.store(level_depth + out, tl.full([KK], 0, tl.int64) + depth, mask=inside)
    key = _top_keys(tl.where(inside, _pack(score, child), _NO_KEY), LOG_KK, LOG_K)
    value, best = _unpack(key)
    slot = tl.arange(0, K)
    chosen = slot < k
    best = tl.where(chosen, best, 0)
    out = request * k + slot
    tl.store(next_score + out, value, mask=chosen)
    tl.store(next_token + out, tl.load(token + request * k * k + best, mask=chosen, other=0).to(tl.int64), mask=chosen)
    tl.store(next_node + out, best.to(tl.int64) + base, mask=chosen)
    tl.store(next_branch + out, tl.load(frontier_branch + request * k + best // k, mask=chosen, other=0), mask=chosen)
    tl.store(next_parent + out, (best // k).to(tl.int64), mask=chosen)


def expand(
    log_q: Tensor,
    token: Tensor,
    frontier_score: Tensor,
    frontier_node: Tensor,
    frontier_branch: Tensor,
    base: int,
    depth: int,
    out: Level | None = None,
) -> tuple[Level, Frontier]:
    """Score the children of a frontier and choose the next one; among equal scores the smaller index comes first.

    Args:
        log_q: float32 ``[R, k, k]``, contiguous: of child ``j`` of frontier node ``i``.
        token: int32 or int64 ``[R, k, k]``, contiguous.
        frontier_score: float32 ``[R, k]``, path scores; the three frontier tensors are contiguous.
        frontier_node, frontier_branch: int64 ``[R, k]``, pool indices.
        base: pool index of the level's first node.
        depth: the level's depth, 1 for children of the root.
        out: where the level is written, each of row stride equal to that of ``out.tokens`` (columns of the pool);
            allocated without it.

    Raises:
        ValueError: ``k`` is above 16 or a tensor is laid out otherwise.
    """
    requests, k, children = log_q.shape
    if k > MAX_K or children != k:
        raise ValueError(f"log_q of shape {tuple(log_q.shape)}; allowed: [R, k, k] with k up to {MAX_K}")
    for name, tensor in (("log_q", log_q), ("token", token), ("frontier_score", frontier_score)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} of strides {tensor.stride()}; allowed: contiguous")
    frontier_node, frontier_branch = frontier_node.contiguous(), frontier_branch.contiguous()
    if out is None:
        whole = [torch.empty((requests, k * k), dtype=torch.int64, device=log_q.device) for _ in range(4)]
        out = Level(whole[0], whole[1], whole[2], torch.empty_like(whole[0], dtype=torch.float32), whole[3])
    elif any(tensor.stride() != (out.tokens.stride(0), 1) for tensor in out):
        raise ValueError("the tensors of out have different strides; allowed: equal row strides, unit column strides")
    ids = [torch.empty((requests, k), dtype=torch.int64, device=log_q.device) for _ in range(4)]
    chosen = Frontier(ids[0], torch.empty_like(ids[0], dtype=torch.float32), ids[1], ids[2], ids[3])
    for launch in expand_launches(
        log_q, token, frontier_score, frontier_node, frontier_branch, base, depth, out, chosen
    ):
        launch.run()
    return out, chosen


def expand_launches(
    log_q: Tensor,
    token: Tensor,
    frontier_score: Tensor,
    frontier_node: Tensor,
    frontier_branch: Tensor,
    base: int,
    depth: int,
    out: Level,
    chosen: Frontier,
) -> list[Launch]:
    """The one launch of ``expand``; ``chosen`` is contiguous."""
    requests, k, _ = log_q.shape
    width = power_of_two(k, 2)
    size = power_of_two(k * k, width)
    arguments = {
        "log_q": log_q,
        "token": token,
        "frontier_score": frontier_score,
        "frontier_node": frontier_node,
        "frontier_branch": frontier_branch,
        "level_token": out.tokens,
        "level_parent": out.parents,
        "level_depth": out.depth,
        "level_score": out.score,
        "level_branch": out.branch,
        "next_token": chosen.token,
        "next_score": chosen.score,
        "next_node": chosen.node,
        "next_branch": chosen.branch,
        "next_parent": chosen.parent,
        "level_stride": out.tokens.stride(0),
        "base": base,
        "depth": depth,
        "k": k,
        "KK": size,
        "LOG_KK": _log2(size),
        "K": width,
        "LOG_K": _log2(width),
    }
    return [Launch(_expand_kernel, (requests,), arguments, num_warps=2)]


def expand_reference(
    log_q: Tensor,
    token: Tensor,
    frontier_score: Tensor,
    frontier_node: Tensor,
    frontier_branch: Tensor,
    base: int,
    depth: int,
) -> tuple[Level, Frontier]:
    """``expand`` in torch."""
    requests, k, _ = log_q.shape
    score = (frontier_score[:, :, None] + log_q).view(requests, k * k)
    tokens = token.view(requests, k * k).long()
    branch = frontier_branch.repeat_interleave(k, dim=1)
    level = Level(tokens, frontier_node.repeat_interleave(k, dim=1), torch.full_like(tokens, depth), score, branch)
    value, best = score.sort(dim=1, descending=True, stable=True)
    value, best = value[:, :k], best[:, :k]
    return level, Frontier(tokens.gather(1, best), value, base + best, branch.gather(1, best), best // k)


# ---------------------------------------------------------------------- selection


class Selected(NamedTuple):
    """Trees in depth-first preorder with the best child first; behind ``size`` nodes -1, -1 and 0."""

    tokens: Tensor  # int64 [R, B]
    parents: Tensor  # int64 [R, B] index into the tree, -1 for a child of the root
    depth: Tensor  # int64 [R, B] 1 for a child of the root
    size: Tensor  # int64 [R]


@triton.jit
def _select_kernel(
    tokens,
    parents,
    depth,
    score,
    branch,
    root_log_p,
    drawn,
    has_row,
    out_tokens,
    out_parents,
    out_depth,
    out_size,
    tokens_stride,
    parents_stride,
    depth_stride,
    score_stride,
    branch_stride,
    root_stride,
    nodes,
    width,
    budget,
    columns,
    RULE: tl.constexpr,
    SOME_ROWS: tl.constexpr,
    N: tl.constexpr,
    LOG_N: tl.constexpr,
    WIDTH: tl.constexpr,
    B: tl.constexpr,
    LOG_B: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (request).  Everything between the loads of the pool and the stores of the tree stays in registers."""
    request = tl.program_id(0).to(tl.int64)
    tokens += request * tokens_stride
    parents += request * parents_stride
    depth += request * depth_stride
    score += request * score_stride
    branch += request * branch_stride

    # Path scores.
    node = tl.arange(0, N)
    inside = node < nodes
    value = tl.load(score + node, mask=inside, other=float("-inf")).to(tl.float64)
    rerooted = 0
    first = -1
    if RULE == 1:
        ancestor = tl.load(branch + node, mask=inside, other=0)
        below = value - tl.load(score + ancestor, mask=inside, other=0.0).to(tl.float64)
        log_p = tl.load(root_log_p + request * root_stride + ancestor, mask=inside, other=0.0)
        rescored = log_p.to(tl.float64) + below
        rescored = tl.where(value == float("-inf"), value, rescored)  # -inf - -inf is no number
        if SOME_ROWS:
            rescored = tl.where(tl.load(has_row + request) != 0, rescored, value)
        value = rescored
    if RULE >= 2:
        token = tl.load(drawn + request)
        rerooted = (token >= 0).to(tl.int32)
        column = tl.arange(0, WIDTH)
        exists = tl.load(score + column, mask=column < width, other=float("-inf")) > float("-inf")
        drawn_here = exists & (tl.load(tokens + column, mask=column < width, other=-1) == token)
        first = tl.min(tl.where(drawn_here, column, WIDTH), 0)
        first = tl.where(first < WIDTH, first, -1)  # -1: absent, which is no node's branch
    if RULE == 2:
        under = (tl.load(branch + node, mask=inside, other=-1) == first) & (
            tl.load(parents + node, mask=inside, other=-1) >= 0
        )
        value = tl.where(under.to(tl.int32) >= rerooted, value, float("-inf"))

    # The best nodes, best first.
    key, node = _top_pairs(_order64(value), node, LOG_N, LOG_B)
    rank = tl.arange(0, B)
    real = (key > _NEVER_KEY) & (rank < columns)
    if RULE == 2:
        real = real & (rank < budget - rerooted)  # the drawn token takes one node of the budget
    if RULE == 3:
        under = (tl.load(branch + node, mask=real, other=-1) == first) & (
            tl.load(parents + node, mask=real, other=-1) >= 0
        )
        real = real & (under.to(tl.int32) >= rerooted)
    node = tl.where(real, node, -2)
    reach = tl.max(tl.where(real, rank + 1, 0), 0)

    # Parents as ranks.
    parent = tl.load(parents + node, mask=real, other=-1).to(tl.int32)
    above = tl.full([B], -1, tl.int32)
    for begin in range(0, reach, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        other_node = tl.gather(node, other, 0)
        match = parent[:, None] == other_node[None, :]
        above = tl.maximum(above, tl.max(tl.where(match, other[None, :], -1), 1))

    # Places.  `here` is each node's ancestor at depth `level`, or the node itself where it is not that deep; going up,
    # the last level at which two nodes' ancestors differ decides, and an ancestor's rank is below its descendants'.
    level_of = tl.load(depth + node, mask=real, other=0).to(tl.int32)
    level_of = tl.where(real, level_of - rerooted, 0)
    deepest = tl.max(level_of, 0)
    links = (level_of << 16) | (above + 1)
    place = tl.zeros([B], tl.int32)
    for begin in range(0, reach, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        counted = tl.gather(real.to(tl.int32), other, 0)
        here = rank
        before = tl.zeros([B, CHUNK], tl.int32)
        for step in range(deepest):
            link = tl.gather(links, here, 0)
            here = tl.where((link >> 16) > deepest - step, (link & 0xFFFF) - 1, here)
            there = tl.gather(here, other, 0)
            earlier = (there[None, :] < here[:, None]).to(tl.int32)
            before = tl.where(here[:, None] == there[None, :], before, earlier)
        place += tl.sum(before * counted[None, :], 1)

    moved = tl.where(above >= 0, tl.gather(place, tl.maximum(above, 0), 0), -1)
    size = tl.sum(real.to(tl.int32), 0)
    tl.store(out_size + request, size.to(tl.int64))
    token = tl.load(tokens + node, mask=real, other=-1)
    out = request * columns
    tl.store(out_tokens + out + place, token, mask=real)
    tl.store(out_parents + out + place, moved.to(tl.int64), mask=real)
    tl.store(out_depth + out + place, level_of.to(tl.int64), mask=real)
    padding = (rank >= size) & (rank < columns)
    nothing = tl.full([B], -1, tl.int64)
    tl.store(out_tokens + out + rank, nothing, mask=padding)
    tl.store(out_parents + out + rank, nothing, mask=padding)
    tl.store(out_depth + out + rank, nothing + 1, mask=padding)


def select(
    tokens: Tensor,
    parents: Tensor,
    depth: Tensor,
    score: Tensor,
    branch: Tensor,
    width: int,
    budget: int,
    rule: str,
    root_log_p: Tensor | None = None,
    drawn: Tensor | None = None,
    has_row: Tensor | None = None,
) -> Selected:
    """Choose each request's tree out of its pool, all requests in one launch.

    The pool is stored level by level; a node of score ``-inf`` does not exist; ``score`` never grows from parent to
    child.  Ties go to the smaller pool index.  Under ``root_draw`` and ``pearl`` the drawn token is the new root.

    Args:
        tokens, parents, depth, branch: int64 ``[R, N]`` of the pool, unit column stride.
        score: float32 ``[R, N]``.
        width: nodes of the first level.
        budget: node budget ``B``, at least 1.
        rule: ``draft``, ``root``, ``root_draw`` or ``pearl``.
        root_log_p: float32 ``[R, width]``, for ``root``: log of the root row at the first level's tokens.
        drawn: int64 ``[R]``, for ``root_draw`` and ``pearl``: token drawn from the root row, ``-1`` without a row.
        has_row: bool ``[R]``, for ``root``: which requests have a root row; all of them when ``None``.

    Returns:
        Trees of ``min(B, N)`` columns.

    Raises:
        ValueError: the rule is unknown or lacks its root row, or a tensor has another dtype or layout.
    """
    if rule not in RULES:
        raise ValueError(f"unknown selection rule {rule!r}; allowed: {', '.join(RULES)}")
    if rule == "root" and root_log_p is None:
        raise ValueError("selection rule 'root' needs root_log_p")
    if rule in ("root_draw", "pearl") and drawn is None:
        raise ValueError(f"selection rule {rule!r} needs the drawn tokens")
    if score.dtype != torch.float32:
        raise ValueError(f"score of dtype {score.dtype}; allowed: torch.float32")
    for tensor in (tokens, parents, depth, score, branch):
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(f"a pool tensor of column stride {tensor.stride(1)}; allowed: 1")
    requests, nodes = tokens.shape
    shape = (requests, min(budget, nodes))
    out_tokens, out_parents, out_depth = (torch.empty(shape, dtype=torch.int64, device=tokens.device) for _ in range(3))
    out = Selected(out_tokens, out_parents, out_depth, out_depth.new_empty(requests))
    for launch in select_launches(
        tokens, parents, depth, score, branch, width, budget, rule, root_log_p, drawn, has_row, out
    ):
        launch.run()
    return out


def select_launches(
    tokens: Tensor,
    parents: Tensor,
    depth: Tensor,
    score: Tensor,
    branch: Tensor,
    width: int,
    budget: int,
    rule: str,
    root_log_p: Tensor | None,
    drawn: Tensor | None,
    has_row: Tensor | None,
    out: Selected,
) -> list[Launch]:
    """The one launch of ``select``; ``out`` is contiguous."""
    requests, nodes = tokens.shape
    size = power_of_two(nodes, 16)
    columns = out.tokens.shape[1]
    tree = power_of_two(columns, 16)
    some_rows = rule == "root" and has_row is not None
    arguments = {
        "tokens": tokens,
        "parents": parents,
        "depth": depth,
        "score": score,
        "branch": branch,
        "root_log_p": score if root_log_p is None else root_log_p,  # read under its rule only, like the next two
        "drawn": tokens if drawn is None else drawn,
        "has_row": has_row.view(torch.uint8) if some_rows and has_row is not None else tokens,
        "out_tokens": out.tokens,
        "out_parents": out.parents,
        "out_depth": out.depth,
        "out_size": out.size,
        "tokens_stride": tokens.stride(0),
        "parents_stride": parents.stride(0),
        "depth_stride": depth.stride(0),
        "score_stride": score.stride(0),
        "branch_stride": branch.stride(0),
        "root_stride": 0 if root_log_p is None else root_log_p.stride(0),
        "nodes": nodes,
        "width": width,
        "budget": budget,
        "columns": columns,
        "RULE": RULES[rule],
        "SOME_ROWS": some_rows,
        "N": size,
        "LOG_N": _log2(size),
        "WIDTH": power_of_two(width, 2),
        "B": tree,
        "LOG_B": _log2(tree),
        "CHUNK": min(tree, max(16, 8192 // tree)),
    }
    return [Launch(_select_kernel, (requests,), arguments, num_warps=4 if size <= 512 else 8)]


def select_reference(
    tokens: Tensor,
    parents: Tensor,
    depth: Tensor,
    score: Tensor,
    branch: Tensor,
    width: int,
    budget: int,
    rule: str,
    root_log_p: Tensor | None = None,
    drawn: Tensor | None = None,
    has_row: Tensor | None = None,
) -> Selected:
    """``select`` on the host, one request after the other, by the definition."""
    requests, nodes = tokens.shape
    columns = min(budget, nodes)
    out = [torch.full((requests, columns), fill, dtype=torch.int64) for fill in (-1, -1, 0)]
    size = torch.zeros(requests, dtype=torch.int64)
    for r in range(requests):
        value = [float(s) for s in score[r]]
        if rule == "root" and (has_row is None or bool(has_row[r])):
            assert root_log_p is not None
            for n in range(nodes):
                if value[n] > NEVER:
                    first = int(branch[r, n])
                    value[n] = float(root_log_p[r, first]) + (float(score[r, n]) - float(score[r, first]))
        root, room, allowed = -1, budget, set(range(nodes))
        if drawn is not None and rule in ("root_draw", "pearl") and int(drawn[r]) >= 0:
            found = [n for n in range(width) if tokens[r, n] == drawn[r] and value[n] > NEVER]
            root = found[0] if found else -2  # -2: the drawn token is not in the pool
            room = budget - 1 if rule == "root_draw" else budget
            allowed = {n for n in range(nodes) if branch[r, n] == root and parents[r, n] >= 0}
        ranked = sorted((n for n in range(nodes) if value[n] > NEVER), key=lambda n: (-value[n], n))
        if rule == "pearl":
            chosen = [n for n in ranked[:budget] if n in allowed]
        else:
            chosen = [n for n in ranked if n in allowed][:room]
        stack = [(n, -1, 1) for n in reversed(chosen) if int(parents[r, n]) == root]
        place = 0
        while stack:
            n, parent, level = stack.pop()
            for column, entry in zip(out, (int(tokens[r, n]), parent, level), strict=True):
                column[r, place] = entry
            stack += [(c, place, level + 1) for c in reversed(chosen) if int(parents[r, c]) == n]
            place += 1
        size[r] = place
    return Selected(out[0], out[1], out[2], size)
