# SPDX-License-Identifier: Apache-2.0
"""Attention of prefill chunks and draft trees over a paged cache, in one launch for the batch.

``out = softmax(mask(cap * tanh(scale * q k^T / cap))) v`` per query row and head, where a row of a tree sees the
context, the root and its own ancestors.  Online softmax in float32 with powers of two (FlashAttention-2, arXiv
2307.08691); long contexts are split over programs, and the parts are merged by their log-sum-exp (Flash-Decoding).  The
bits come from ``tree_mask``.

A request has ``rows = query_start[r + 1] - query_start[r]`` rows in this step:

    row        0 ... before - 2     before - 1     before + i            behind the tree
    is         ordinary tokens      the root       node i                ignored: zeros are written
    sees       positions up to      all of the     context, root and     -
               its own              context        itself + ancestors

The step's keys and values are in the cache already, in row order: row ``j`` at cache position ``computed + j`` with
``computed = seq_len - rows``, whatever a node's depth.  The *logical* position of a node is that of the root plus its
depth; a sliding window counts logical positions.  A request without a tree is only ordinary rows.

Because parents come before children, no row sees anything behind its own cache position.  So a tile of rows walks over
two ranges: keys that all of its rows see (no masks at all but the window's), and from the root or the tile's first row
on, keys under the causal limit and the bits.

GQA is packed: the rows of a tile are (query row, query head of the group) pairs, so that a tile of keys and values is
read once for the whole group and for all query rows of the tile.

Shapes: ``T`` rows, ``R`` requests, ``N`` nodes, ``D`` head size, ``S`` splits.

* ``query``, ``out`` ``[T, Hq, D]``; ``key_cache``, ``value_cache`` ``[blocks, block_size, Hkv, D]``: views with any
  strides (last dimension contiguous), so both NHD and HND layouts, keys and values apart or side by side in one tensor;
* bfloat16, float16 or float32; a cache may also be float8_e4m3fn, float8_e4m3fnuz, or uint8 that holds e4m3fn;
* ``block_table`` int32 ``[R, max_blocks]``, ``seq_lens`` and ``before`` int32 ``[R]``, ``query_start`` int32
  ``[R + 1]``;
* ``bits`` int64 ``[R, N + 1, W]`` and ``depth`` int32 ``[R, N]`` of ``tree_mask``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Launch

LOG2_E = 1.4426950408889634
HEAD_SIZES = (32, 64, 80, 96, 128, 256)
SHORTEST_SPLIT = 256  # positions: a shorter split costs more in the merge than it gives


@triton.jit
def _decode(x, dtype: tl.constexpr, E4M3_BITS: tl.constexpr):
    """A tile of the cache in the type of the products.

    e4m3fn bytes without hardware support: sign and the other seven bits land in the fields of a float16, which is then
    too small by 2 ** 8, the difference of the two exponent biases.  Subnormal numbers come out right as well.
    """
    if E4M3_BITS:
        wide = x.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        half = tl.where((wide & 0x7F) == 0x7F, 0x7E00, half).to(tl.uint16)  # not a number
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return value.to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def _product(a, b, acc, UPCAST: tl.constexpr):
    """``acc + a b``, accumulated in float32."""
    if UPCAST:  # the interpreter multiplies the bit patterns of bfloat16; the products are exact in float32 anyway
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _pages(table, start, last, n, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """Page numbers of the positions ``start + n`` below ``last``; one number where one page holds them all."""
    if PAGE % BLOCK_N == 0:
        return tl.load(table + start // PAGE, mask=start < last, other=0).to(tl.int64)
    else:
        position = start + n
        return tl.load(table + position // PAGE, mask=position < last, other=0).to(tl.int64)


@triton.jit
def _attend(
    q,
    top,
    total,
    acc,
    first,
    last,
    key_base,
    value_base,
    table,
    key_block,
    key_position,
    value_block,
    value_position,
    factor,
    softcap,
    window,
    query_position,
    limit,
    first_node,
    row_bits,
    tree_words,
    row_depth,
    nodes,
    in_tree,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    E4M3_BITS: tl.constexpr,
    UPCAST: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Go over the cache positions ``first .. last - 1``; ``first`` is a multiple of ``BLOCK_N``.

    Not ``MASKED``: ``last`` is one too, and every row sees every position (but for the window).
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, HEAD_PAD)
    # The pages of a step are loaded one step earlier, so that loading keys and values waits for no other load.
    pages = _pages(table, first, last, n, BLOCK_N, PAGE)
    for start in range(first, last, BLOCK_N):
        position = start + n
        inside = (start % PAGE + n if PAGE % BLOCK_N == 0 else position % PAGE).to(tl.int64)
        key_rows = pages * key_block + inside * key_position
        value_rows = pages * value_block + inside * value_position
        pages = _pages(table, start + BLOCK_N, last, n, BLOCK_N, PAGE)
        keys = key_base + key_rows[None, :] + d[:, None]
        values = value_base + value_rows[:, None] + d[None, :]
        if MASKED:
            held = position < last
            if HEAD == HEAD_PAD:
                k = tl.load(keys, mask=held[None, :], other=0.0)
                v = tl.load(values, mask=held[:, None], other=0.0)
            else:
                k = tl.load(keys, mask=held[None, :] & (d < HEAD)[:, None], other=0.0)
                v = tl.load(values, mask=held[:, None] & (d < HEAD)[None, :], other=0.0)
        elif HEAD == HEAD_PAD:
            k = tl.load(keys)
            v = tl.load(values)
        else:
            k = tl.load(keys, mask=(d < HEAD)[:, None], other=0.0)
            v = tl.load(values, mask=(d < HEAD)[None, :], other=0.0)

        # Scores in units of log 2.
        score = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        score = _product(q, _decode(k, q.dtype, E4M3_BITS), score, UPCAST)
        score = score * factor
        if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), and ``factor`` makes the exponent
            score = softcap * (1.0 - 2.0 / (tl.exp2(score) + 1.0))

        if MASKED:
            # The bits of this tile's positions, moved so that bit ``n`` belongs to position ``start + n``.  The tile
            # may begin before the root (bit 0 of a row), so the word's number starts at -1.
            column = tl.maximum(start - first_node + 1, -64)  # -64: wholly before the root
            word = (column + 64) // 64 - 1
            shift = (column - word * 64).to(tl.uint64)
            low_word = tl.where(in_tree, word, -2)  # neither word of a row outside a tree exists
            high_word = low_word + 1
            low = tl.load(row_bits + low_word, mask=(low_word >= 0) & (low_word < tree_words), other=0)
            high = tl.load(row_bits + high_word, mask=(high_word >= 0) & (high_word < tree_words), other=0)
            moved = (low.to(tl.uint64, bitcast=True) >> shift) | (
                (high.to(tl.uint64, bitcast=True) << 1) << (63 - shift)
            )
            word_low = (moved & 0xFFFFFFFF).to(tl.uint32)
            bit = (word_low[:, None] >> (n & 31).to(tl.uint32)[None, :]) & 1
            if BLOCK_N > 32:
                word_high = (moved >> 32).to(tl.uint32)
                bit_high = (word_high[:, None] >> (n & 31).to(tl.uint32)[None, :]) & 1
                bit = tl.where((n < 32)[None, :], bit, bit_high)
            seen = (position[None, :] <= limit[:, None]) | ((bit != 0) & (position >= first_node)[None, :])
            seen = seen & held[None, :]
            if WINDOW:
                node = position - first_node
                below = tl.load(row_depth + node, mask=held & (node >= 0) & (node < nodes), other=0)
                key_logical = tl.where(node >= 0, first_node - 1 + below, position)
                seen = seen & (query_position[:, None] - key_logical[None, :] < window)
            score = tl.where(seen, score, float("-inf"))
        elif WINDOW:
            score = tl.where(query_position[:, None] - position[None, :] < window, score, float("-inf"))

        higher = tl.maximum(top, tl.max(score, axis=1))
        base = higher
        if MASKED or WINDOW:  # a row may have seen nothing yet
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None]
        acc = _product(weight.to(q.dtype), _decode(v, q.dtype, E4M3_BITS), acc, UPCAST)
        top = higher
    return top, total, acc


@triton.jit
def _tree_attention_kernel(
    query,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    query_start,
    before,
    bits,
    depth,
    sinks,
    k_scale,
    v_scale,
    out,
    partial,
    lse,
    factor,
    softcap,
    window,
    requests,
    tokens,
    nodes,
    tree_words,
    query_row,
    query_head,
    key_block,
    key_position,
    key_head,
    value_block,
    value_position,
    value_head,
    table_row,
    out_row,
    out_head,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    E4M3_BITS: tl.constexpr,
    UPCAST: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program: a tile of query rows of one request, one KV head, one split of the positions it sees."""
    ROWS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)

    # Request ``r`` has the tiles from ``query_start[r] // ROWS + r`` on: never too few.  The last one that begins at or
    # before this tile owns it.
    request = tl.full((), 0, dtype=tl.int32)
    behind = request + requests
    while request < behind:
        middle = (request + behind + 1) // 2
        begins = tl.load(query_start + middle) // ROWS + middle
        if begins <= tile:
            request = middle
        else:
            behind = middle - 1
    if request >= requests:
        return
    first_row = tl.load(query_start + request)
    rows = tl.load(query_start + request + 1) - first_row
    tile_row = (tile - first_row // ROWS - request) * ROWS
    if tile_row >= rows:
        return

    seq_len = tl.load(seq_lens + request)
    ordinary = tl.load(before + request)
    computed = seq_len - rows
    first_node = computed + ordinary  # cache position; the root's is one less
    m = tl.arange(0, BLOCK_M)
    row = tile_row + m // GROUP
    head = kv_head * GROUP + m % GROUP
    real = (m < ROWS * GROUP) & (row < rows)
    node = row - ordinary
    request_long = request.to(tl.int64)
    row_depth = depth + request_long * nodes
    levels = tl.load(row_depth + node, mask=real & (node >= 0) & (node < nodes), other=0)
    in_tree = levels > 0
    live = real & ((node < 0) | in_tree)
    query_position = tl.where(node < 0, computed + row, first_node - 1 + levels)
    limit = computed + tl.minimum(row, ordinary - 1)
    row_bits = bits + (request_long * (nodes + 1) + node + 1) * tree_words

    # Positions that some row of the tile sees, then this split's share of them.
    end = tl.minimum(computed + tile_row + ROWS, seq_len)
    begin = 0
    if WINDOW:
        begin = tl.maximum(computed + tl.minimum(tile_row, ordinary) - window + 1, 0) // BLOCK_N * BLOCK_N
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), tl.num_programs(2)) * BLOCK_N
        begin += split * share
        end = tl.minimum(begin + share, end)
    everyone = (computed + tl.minimum(tile_row, ordinary - 1) + 1) // BLOCK_N * BLOCK_N
    border = tl.maximum(tl.minimum(everyone, end // BLOCK_N * BLOCK_N), begin)

    d = tl.arange(0, HEAD_PAD)
    q_at = query + (first_row.to(tl.int64) + row)[:, None] * query_row + head[:, None] * query_head + d[None, :]
    q = tl.load(q_at, mask=real[:, None] & (d < HEAD)[None, :], other=0)
    if k_scale is not None:
        factor = factor * tl.load(k_scale)

    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if sinks is not None:  # one more logit in the denominator, in one of the splits
        sink = tl.load(sinks + head, mask=real, other=0).to(tl.float32) * 1.4426950408889634
        top = tl.where(split == 0, sink, top)
        total += (split == 0).to(tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_PAD), dtype=tl.float32)
    key_base = key_cache + kv_head * key_head
    value_base = value_cache + kv_head * value_head
    table = block_table + request_long * table_row
    top, total, acc = _attend(
        q, top, total, acc, begin, border, key_base, value_base, table, key_block, key_position, value_block,
        value_position, factor, softcap, window, query_position, limit, first_node, row_bits, tree_words, row_depth,
        nodes, in_tree, HEAD, HEAD_PAD, BLOCK_M, BLOCK_N, PAGE, SOFTCAP, WINDOW, E4M3_BITS, UPCAST, False,
    )  # fmt: skip
    top, total, acc = _attend(
        q, top, total, acc, border, end, key_base, value_base, table, key_block, key_position, value_block,
        value_position, factor, softcap, window, query_position, limit, first_node, row_bits, tree_words, row_depth,
        nodes, in_tree, HEAD, HEAD_PAD, BLOCK_M, BLOCK_N, PAGE, SOFTCAP, WINDOW, E4M3_BITS, UPCAST, True,
    )  # fmt: skip

    has_any = live & (total > 0)
    total = tl.where(total > 0, total, 1.0)
    acc = acc / total[:, None]
    if v_scale is not None:
        acc = acc * tl.load(v_scale)
    token = first_row.to(tl.int64) + row
    if SPLIT:
        heads = tl.num_programs(1) * GROUP
        slot = (split.to(tl.int64) * tokens + token) * heads + head
        tl.store(lse + slot, tl.where(has_any, top + tl.log2(total), float("-inf")), mask=real)
        held = has_any[:, None] & (d < HEAD)[None, :]
        tl.store(partial + slot[:, None] * HEAD + d[None, :], acc, mask=held)
    else:
        o_at = out + token[:, None] * out_row + head[:, None] * out_head + d[None, :]
        result = tl.where(live[:, None], acc, 0.0).to(out.dtype.element_ty)
        tl.store(o_at, result, mask=real[:, None] & (d < HEAD)[None, :])


@triton.jit
def _merge_kernel(
    partial,
    lse,
    query_start,
    out,
    requests,
    tokens,
    splits,
    out_row,
    out_head,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: one row and head.  Weighs its parts by ``2 ** lse``."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if row >= tl.load(query_start + requests):  # padding behind the last request
        return
    heads = tl.num_programs(1)
    d = tl.arange(0, HEAD_PAD)
    s = tl.arange(0, SPLITS_PAD)
    every = tl.load(lse + (s.to(tl.int64) * tokens + row) * heads + head, mask=s < splits, other=float("-inf"))
    top = tl.max(every, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(every - top), axis=0)
    acc = tl.zeros((HEAD_PAD,), dtype=tl.float32)
    for first in tl.static_range(0, SPLITS_PAD, CHUNK):
        part = first + tl.arange(0, CHUNK)
        slot = (part.to(tl.int64) * tokens + row) * heads + head
        size = tl.load(lse + slot, mask=part < splits, other=float("-inf"))
        held = (size > float("-inf"))[:, None] & (d < HEAD)[None, :]
        tile = tl.load(partial + slot[:, None] * HEAD + d[None, :], mask=held, other=0.0)
        acc += tl.sum(tl.exp2(size - top)[:, None] * tile, axis=0)
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + row * out_row + head * out_head + d, acc.to(out.dtype.element_ty), mask=d < HEAD)


class Tile(NamedTuple):
    """Sizes of a program: packed query rows, positions per step, warps, pipeline stages."""

    rows: int
    positions: int
    warps: int
    stages: int


# Kind of product -> padded head size -> most packed rows -> positions per step, warps, stages.
_TILES: dict[str, dict[int, dict[int, tuple[int, int, int]]]] = {
    "large": {
        64: {16: (64, 4, 5), 64: (64, 4, 4), 128: (64, 8, 3)},
        128: {32: (64, 4, 4), 64: (64, 4, 2), 128: (64, 8, 3)},
        256: {32: (32, 4, 3), 64: (32, 8, 3), 128: (32, 8, 2)},
    },
    "cuda": {
        64: {16: (64, 4, 3), 32: (64, 4, 2), 64: (64, 4, 3), 128: (64, 8, 3)},
        128: {64: (32, 4, 3), 128: (32, 8, 3)},
        256: {32: (32, 4, 2), 64: (32, 8, 2)},
    },
    "hip": {
        64: {64: (64, 4, 1), 128: (64, 8, 1)},
        128: {64: (32, 4, 1), 128: (32, 8, 1)},
        256: {32: (32, 4, 1), 64: (32, 8, 1)},
    },
    # Decoding the bits of an 8-bit cache takes registers.
    "cuda bits": {64: {128: (32, 8, 3)}, 128: {64: (32, 4, 3)}, 256: {16: (32, 4, 2), 32: (32, 8, 2)}},
    "hip bits": {64: {128: (32, 8, 1)}, 128: {64: (32, 4, 1)}, 256: {32: (32, 4, 1)}},
    # No matrix unit computes in float32.
    "float32": {64: {16: (16, 8, 1), 32: (8, 8, 1)}, 128: {32: (16, 8, 1)}, 256: {16: (16, 8, 1)}},
}
_LARGE_CHIPS = ("90", "100", "103")  # 227 KiB of shared memory; other NVIDIA chips have 99 KiB at least


def tile_for(head: int, dtype: torch.dtype, cache: torch.dtype, packed_rows: int, chip: str) -> Tile:
    """The sizes for ``packed_rows`` = query rows of a request x heads of the group.

    Chosen so that nothing spills and, for small tiles on a large chip, so that two programs fit a multiprocessor with
    enough loads under way to keep the memory busy.

    Args:
        head: head size.
        dtype: of the query.
        cache: dtype of the cache.
        packed_rows: rows that one tile would need.
        chip: CUDA capability such as ``"90"``, or an AMD architecture such as ``"gfx942"``.
    """
    maker = "hip" if chip.startswith("gfx") else "large" if chip in _LARGE_CHIPS else "cuda"
    eight_bits = cache.itemsize == 1
    if dtype == torch.float32:
        kind = "float32"
    elif eight_bits and not converts_e4m3(chip):
        kind = f"{maker} bits"
    else:
        kind = maker
    sizes = _TILES[kind][max(triton.next_power_of_2(head), 64)]
    most = 64 if eight_bits and head == 256 else 128
    wanted = min(max(triton.next_power_of_2(packed_rows), 16), most, max(sizes))
    return Tile(wanted, *sizes[min(limit for limit in sizes if limit >= wanted)])


def default_splits(programs: int, positions: int, processors: int) -> int:
    """Context splits that fill the GPU twice, as long as each has enough positions.

    Args:
        programs: tiles x KV heads.
        positions: longest possible context.
        processors: multiprocessors of the GPU.
    """
    return max(1, min(2 * processors // max(programs, 1), positions // SHORTEST_SPLIT, 64))


def launches(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    before: torch.Tensor,
    bits: torch.Tensor,
    depth: torch.Tensor,
    *,
    scale: float,
    sliding_window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    out: torch.Tensor,
    partial: torch.Tensor | None,
    lse: torch.Tensor | None,
    tile: Tile,
    native_fp8: bool,
) -> list[Launch]:
    """The launches of one call: the attention and, when ``lse`` ``[S, T, Hq]`` is given, the merge of its parts.

    ``partial`` float32 ``[S, T, Hq, D]`` and ``lse`` float32 are written by the first and read by the second.
    """
    tokens, heads, head = query.shape
    _, page, kv_heads, _ = key_cache.shape
    requests, nodes = depth.shape
    group = heads // kv_heads
    splits = 1 if lse is None else lse.shape[0]
    bytes_held = key_cache.dtype in (torch.uint8, torch.float8_e4m3fn) and not native_fp8
    if key_cache.dtype == torch.uint8 and native_fp8:
        key_cache, value_cache = key_cache.view(torch.float8_e4m3fn), value_cache.view(torch.float8_e4m3fn)
    elif bytes_held:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    padded = triton.next_power_of_2(head)
    constants: dict[str, Any] = {"HEAD": head, "HEAD_PAD": padded}
    arguments: dict[str, Any] = {
        "query": query,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": block_table,
        "seq_lens": seq_lens,
        "query_start": query_start,
        "before": before,
        "bits": bits,
        "depth": depth,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "out": out,
        "partial": partial,
        "lse": lse,
        "factor": 2 * scale * LOG2_E / softcap if softcap else scale * LOG2_E,
        "softcap": softcap * LOG2_E,
        "window": sliding_window,
        "requests": requests,
        "tokens": tokens,
        "nodes": nodes,
        "tree_words": bits.shape[2],
        "query_row": query.stride(0),
        "query_head": query.stride(1),
        "key_block": key_cache.stride(0),
        "key_position": key_cache.stride(1),
        "key_head": key_cache.stride(2),
        "value_block": value_cache.stride(0),
        "value_position": value_cache.stride(1),
        "value_head": value_cache.stride(2),
        "table_row": block_table.stride(0),
        "out_row": out.stride(0),
        "out_head": out.stride(1),
        "GROUP": group,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.positions,
        "PAGE": page,
        "SOFTCAP": softcap > 0,
        "WINDOW": sliding_window > 0,
        "E4M3_BITS": bytes_held,
        "UPCAST": query.dtype == torch.bfloat16 and not isinstance(_tree_attention_kernel, triton.runtime.JITFunction),
        "SPLIT": lse is not None,
        **constants,
    }
    tiles = tokens // (tile.rows // group) + requests if tokens else 0
    result = [
        Launch(
            _tree_attention_kernel, (tiles, kv_heads, splits), arguments, num_warps=tile.warps, num_stages=tile.stages
        )
    ]
    if lse is not None:
        splits_padded = triton.next_power_of_2(splits)
        merge: dict[str, Any] = {
            "partial": partial,
            "lse": lse,
            "query_start": query_start,
            "out": out,
            "requests": requests,
            "tokens": tokens,
            "splits": splits,
            "out_row": out.stride(0),
            "out_head": out.stride(1),
            "SPLITS_PAD": splits_padded,
            "CHUNK": min(splits_padded, 16),
            **constants,
        }
        result.append(Launch(_merge_kernel, (tokens, heads, 1), merge, num_warps=4, num_stages=1))
    return result


def tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    before: torch.Tensor,
    bits: torch.Tensor,
    depth: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    request_rows: int | None = None,
    max_seq_len: int | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention of all rows of a step.  Nothing is read back to the host: every size comes from shapes and arguments.

    Args:
        query: ``[T, Hq, D]``, heads contiguous inside.
        key_cache, value_cache: ``[blocks, block_size, Hkv, D]``, any strides but a contiguous last dimension.
        block_table: int32 ``[R, max_blocks]`` blocks of each request, in order.
        seq_lens: int32 ``[R]`` tokens in the cache, those of this step included.
        query_start: int32 ``[R + 1]`` first row of each request.  Rows from ``query_start[R]`` on are left as they are.
        before: int32 ``[R]`` rows of a request up to and including the root, at least 1.
        bits: int64 ``[R, N + 1, W]``, contiguous.
        depth: int32 ``[R, N]``, contiguous; 0 behind the tree.
        scale: factor of the logits.
        sliding_window: a key is seen when its logical position is less than this far behind; 0 = no window.
        softcap: 0 = none.
        sinks: ``[Hq]`` a further logit of each head in the denominator, any float dtype.
        k_scale, v_scale: float32 tensors of one element that keys and values are multiplied by.
        out: like ``query``; made when ``None``.
        request_rows: rows that a request usually has (budget + 1); the mean by default.  Only the speed depends on it.
        max_seq_len: bound of ``seq_lens``; what the block table holds by default.  Only the speed depends on it.
        splits: context splits, by default chosen from the shapes.

    Returns:
        ``out`` ``[T, Hq, D]``; zeros in rows behind a tree.

    Raises:
        ValueError: a wrong shape, dtype or layout.
    """
    if out is None:
        out = torch.empty_like(query)
    _check(query, key_cache, value_cache, block_table, seq_lens, query_start, before, bits, depth, out)
    if sinks is not None and (sinks.shape != query.shape[1:2] or not sinks.is_contiguous()):
        raise ValueError(f"sinks must be contiguous [{query.shape[1]}], not {list(sinks.shape)}")
    tokens, heads, head = query.shape
    _, page, kv_heads, _ = key_cache.shape
    requests = depth.shape[0]
    if requests == 0 or tokens == 0:
        return out
    group = heads // kv_heads
    usual_rows = request_rows or triton.cdiv(tokens, requests)
    tile = tile_for(head, query.dtype, key_cache.dtype, usual_rows * group, _chip(query.device))
    if tile.rows < group:
        raise ValueError(f"{group} query heads per KV head: at most {tile.rows} are supported")
    longest = max_seq_len or block_table.shape[1] * page
    if splits is None:
        programs = triton.cdiv(usual_rows, tile.rows // group) * requests * kv_heads
        splits = default_splits(programs, longest, _processors(query.device))
    partial = lse = None
    if splits > 1:
        lse = torch.empty((splits, tokens, heads), dtype=torch.float32, device=query.device)
        partial = torch.empty((splits, tokens, heads, head), dtype=torch.float32, device=query.device)
    for launch in launches(
        query, key_cache, value_cache, block_table, seq_lens, query_start, before, bits, depth, scale=scale,
        sliding_window=sliding_window, softcap=softcap, sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=out,
        partial=partial, lse=lse, tile=tile, native_fp8=query.is_cuda and converts_e4m3(_chip(query.device)),
    ):  # fmt: skip
        launch.run()
    return out


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _chip(device: torch.device) -> str:
    """``"90"``, ``"gfx942"``, ...; off the GPU the name of a common one, since nothing depends on it but the tiles."""
    if device.type != "cuda":
        return "80"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}{minor}"


def converts_e4m3(chip: str) -> bool:
    """Whether the chip converts float8_e4m3fn by itself; its bits are decoded otherwise."""
    return not chip.startswith("gfx") and int(chip) >= 89


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    before: torch.Tensor,
    bits: torch.Tensor,
    depth: torch.Tensor,
    out: torch.Tensor,
) -> None:
    if query.dim() != 3 or query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"query must be bfloat16, float16 or float32 [T, Hq, D], not {query.dtype} {list(query.shape)}"
        )
    _, heads, head = query.shape
    if head not in HEAD_SIZES:
        raise ValueError(f"head size {head} is not one of {', '.join(map(str, HEAD_SIZES))}")
    if key_cache.shape != value_cache.shape or key_cache.dim() != 4 or key_cache.shape[3] != head:
        raise ValueError(
            f"key_cache and value_cache must both be [blocks, block_size, Hkv, {head}], "
            f"not {list(key_cache.shape)} and {list(value_cache.shape)}"
        )
    eight_bits = (torch.uint8, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in (query.dtype, *eight_bits):
        raise ValueError(f"a cache of {key_cache.dtype} and {value_cache.dtype} does not go with a {query.dtype} query")
    if heads % key_cache.shape[2]:
        raise ValueError(f"{heads} query heads do not divide over {key_cache.shape[2]} KV heads")
    if out.shape != query.shape:
        raise ValueError(f"out must be {list(query.shape)}, not {list(out.shape)}")
    for name, value in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache), ("out", out)):
        if value.stride(-1) != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous")
    requests, nodes = depth.shape
    words = (nodes + 64) // 64
    expected: tuple[tuple[str, torch.Tensor, torch.dtype, tuple[int, ...]], ...] = (
        ("seq_lens", seq_lens, torch.int32, (requests,)),
        ("query_start", query_start, torch.int32, (requests + 1,)),
        ("before", before, torch.int32, (requests,)),
        ("bits", bits, torch.int64, (requests, nodes + 1, words)),
        ("depth", depth, torch.int32, (requests, nodes)),
    )
    for name, value, dtype, shape in expected:
        if value.dtype != dtype or value.shape != shape or not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous {dtype} {list(shape)}, not {value.dtype} {list(value.shape)}")
    if block_table.dtype != torch.int32 or block_table.dim() != 2 or block_table.shape[0] != requests:
        raise ValueError(
            f"block_table must be int32 [{requests}, blocks], not {block_table.dtype} {list(block_table.shape)}"
        )
    if block_table.stride(1) != 1:
        raise ValueError("the blocks of a request must be contiguous in block_table")


def tree_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    before: torch.Tensor,
    bits: torch.Tensor,
    depth: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """The same row by row in float64, on the CPU.  Returns float64 ``[T, Hq, D]``, rows of no request as nan."""
    tokens, heads, head = query.shape
    _, page, kv_heads, _ = key_cache.shape
    group = heads // kv_heads
    if key_cache.dtype == torch.uint8:
        key_cache, value_cache = key_cache.view(torch.float8_e4m3fn), value_cache.view(torch.float8_e4m3fn)
    out = torch.full((tokens, heads, head), math.nan, dtype=torch.float64)
    for r in range(depth.shape[0]):
        start, stop = int(query_start[r]), int(query_start[r + 1])
        length, ordinary = int(seq_lens[r]), int(before[r])
        computed = length - (stop - start)
        root = computed + ordinary - 1
        positions = torch.arange(length)
        blocks = block_table[r].cpu()[positions // page].long()
        k = key_cache.cpu().double()[blocks, positions % page] * k_scale
        v = value_cache.cpu().double()[blocks, positions % page] * v_scale
        for j in range(stop - start):
            node = j - ordinary
            if node >= 0 and (node >= depth.shape[1] or int(depth[r, node]) == 0):
                out[start + j] = 0
                continue
            if node < 0:
                visible, here = list(range(computed + j + 1)), computed + j
            else:
                words = [int(word) & (2**64 - 1) for word in bits[r, node + 1]]
                ancestors = [i for i in range(node + 1) if words[(i + 1) // 64] >> ((i + 1) % 64) & 1]
                visible, here = list(range(root + 1)) + [root + 1 + i for i in ancestors], root + int(depth[r, node])
            if sliding_window:
                logical = [p if p <= root else root + int(depth[r, p - root - 1]) for p in visible]
                visible = [p for p, at in zip(visible, logical, strict=True) if here - at < sliding_window]
            for h in range(heads):
                score = k[visible, h // group] @ query[start + j, h].cpu().double() * scale
                if softcap:
                    score = softcap * torch.tanh(score / softcap)
                if sinks is not None:
                    score = torch.cat((score, sinks[h].cpu().double()[None]))
                weight = torch.softmax(score, dim=0)[: len(visible)]
                out[start + j, h] = weight @ v[visible, h // group]
    return out
