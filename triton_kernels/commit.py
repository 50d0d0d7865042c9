# SPDX-License-Identifier: Apache-2.0
"""Committing the accepted path: its keys and values move to the committed slots, all layers in one launch.

    ``cache[destination[r, i]] = cache[source[r, i]]``   for ``i < length[r]``, every layer, keys and values

A slot is ``block * block_size + place in the block``.  Bytes move, whatever their type.  A program owns a few words of
one head of one layer's keys or values and reads them at all of a request's sources before it writes any, so the two
lists of one request may overlap in any way.  (The engine's moves go down: in preorder a node of depth ``d`` is at least
node ``d - 1``, so ``destination[i] <= source[i]`` with both ascending.)  Different requests own different slots.

``R`` requests, ``D`` levels, ``L`` layers.  Caches are views ``[blocks, block_size, heads, head size]`` of any strides
but a unit last one, which covers the NHD and HND layouts of vLLM's FlashAttention and Triton back ends, keys and
values packed together or apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch

MAX_LEVELS = 1024
TILE = 2048
"""Words that one program holds."""

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True)
class Caches:
    """The keys and values of all layers as addresses, made once when the caches are allocated.

    Attributes:
        address: int64 ``[2 * L]`` on the device: each layer's keys, then each layer's values.
        word: bytes of the integers that are moved: the widest that divide all distances.
        block_size: slots of a block.
        heads: KV heads.
        words: words of one head at one slot, of keys and of values.
        strides: words between blocks, slots of a block and heads, of keys and of values.
    """

    address: Tensor
    word: int
    block_size: int
    heads: int
    words: tuple[int, int]
    strides: tuple[tuple[int, int, int], tuple[int, int, int]]


def caches(keys: Sequence[Tensor], values: Sequence[Tensor]) -> Caches:
    """Take in the layers' caches, which must stay where they are.

    Args:
        keys, values: one view ``[blocks, block_size, heads, head size]`` per layer, unit last stride.  All keys have
            one shape, dtype and strides, all values have one, and they agree in block size and heads.

    Raises:
        ValueError: the layers differ (give each group its own ``Caches``) or the last stride is not 1.
    """
    for kind, tensors in (("keys", keys), ("values", values)):
        layouts = {(t.shape, t.stride(), t.dtype, t.device) for t in tensors}
        if len(layouts) != 1:
            raise ValueError(f"{kind} of {len(layouts)} layouts; allowed: layers of one shape, strides and dtype")
        if tensors[0].dim() != 4 or tensors[0].stride(3) != 1:
            raise ValueError(
                f"{kind} of shape {tuple(tensors[0].shape)} and strides {tensors[0].stride()}; allowed: "
                "[blocks, block_size, heads, head size] with last stride 1"
            )
    first = (keys[0], values[0])
    if len(keys) != len(values) or first[0].shape[1:3] != first[1].shape[1:3]:
        raise ValueError("keys and values differ in layers, block size or heads; allowed: the same for both")
    # Fake tensors have no address; allocations begin at multiples of 256 bytes.
    addresses = [t.storage_offset() * t.element_size() if t.is_meta else t.data_ptr() for t in (*keys, *values)]
    bytes_of = [[t.element_size() * n for n in (t.shape[3], *t.stride()[:3])] for t in first]
    word = math.gcd(8, *addresses, *bytes_of[0], *bytes_of[1])
    counts = [[n // word for n in numbers] for numbers in bytes_of]
    device = keys[0].device
    if device.type == "meta":
        address = torch.empty(len(addresses), dtype=torch.int64, device=device)
    else:
        address = torch.tensor(addresses, dtype=torch.int64).to(device)
    return Caches(
        address=address,
        word=word,
        block_size=first[0].shape[1],
        heads=first[0].shape[2],
        words=(counts[0][0], counts[1][0]),
        strides=((counts[0][1], counts[0][2], counts[0][3]), (counts[1][1], counts[1][2], counts[1][3])),
    )


@triton.jit
def _commit_kernel(
    address,
    sample,
    source,
    destination,
    lengths,
    source_stride,
    destination_stride,
    block_size,
    layers,
    tiles,
    levels,
    key_words,
    key_block,
    key_slot,
    key_head,
    value_words,
    value_block,
    value_slot,
    value_head,
    LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (cache and words, head, request)."""
    request = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int32)
    if length > 0:
        cache = tl.program_id(0) // tiles
        tile = tl.program_id(0) % tiles
        is_key = cache < layers
        words = tl.where(is_key, key_words, value_words)
        block_stride = tl.where(is_key, key_block, value_block).to(tl.int64)
        slot_stride = tl.where(is_key, key_slot, value_slot).to(tl.int64)
        head_stride = tl.where(is_key, key_head, value_head).to(tl.int64)
        memory = tl.load(address + cache).to(sample.dtype) + tl.program_id(1) * head_stride

        level = tl.arange(0, LEVELS)
        taken = (level < length) & (level < levels)
        from_slot = tl.load(source + request * source_stride + level, mask=taken, other=0).to(tl.int64)
        to_slot = tl.load(destination + request * destination_stride + level, mask=taken, other=0).to(tl.int64)
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        moved = (taken & (from_slot != to_slot))[:, None] & (column < words)[None, :]
        from_place = (from_slot // block_size) * block_stride + (from_slot % block_size) * slot_stride
        to_place = (to_slot // block_size) * block_stride + (to_slot % block_size) * slot_stride
        row = tl.load(memory + from_place[:, None] + column[None, :], mask=moved, other=0)
        tl.debug_barrier()  # all is read before anything is written
        tl.store(memory + to_place[:, None] + column[None, :], row, mask=moved)


def commit(caches: Caches, source: Tensor, destination: Tensor, lengths: Tensor) -> None:
    """Move the accepted paths' keys and values, in place.

    Args:
        caches: from ``caches``.
        source: int64 or int32 ``[R, D]`` slots of the accepted nodes, root side first; unit last stride.
        destination: int64 or int32 ``[R, D]`` slots that they move to, distinct.  No request's destination may be
            another's source or destination.
        lengths: int64 or int32 ``[R]``; what lies behind a request's length is not read.

    Raises:
        ValueError: more than 1,024 levels, or a list without unit last stride.
    """
    for launch in commit_launches(caches, source, destination, lengths):
        launch.run()


def commit_launches(caches: Caches, source: Tensor, destination: Tensor, lengths: Tensor) -> list[Launch]:
    """The one launch of ``commit``."""
    requests, levels = source.shape
    if levels > MAX_LEVELS:
        raise ValueError(f"{levels} levels; allowed: up to {MAX_LEVELS}")
    if levels > 1 and (source.stride(1) != 1 or destination.stride(1) != 1):
        raise ValueError("source or destination without unit last stride; allowed: 1")
    rows = max(1, 1 << max(levels - 1, 0).bit_length())
    widest = max(caches.words)
    columns = min(1 << (widest - 1).bit_length(), max(1, TILE // rows))
    tiles = -(-widest // columns)
    layers = len(caches.address) // 2
    (key_block, key_slot, key_head), (value_block, value_slot, value_head) = caches.strides
    arguments = {
        "address": caches.address,
        # Only the type of this pointer is used: the type of the words.
        "sample": torch.empty(1, dtype=WORDS[caches.word], device=source.device),
        "source": source,
        "destination": destination,
        "lengths": lengths,
        "source_stride": source.stride(0),
        "destination_stride": destination.stride(0),
        "block_size": caches.block_size,
        "layers": layers,
        "tiles": tiles,
        "levels": levels,
        "key_words": caches.words[0],
        "key_block": key_block,
        "key_slot": key_slot,
        "key_head": key_head,
        "value_words": caches.words[1],
        "value_block": value_block,
        "value_slot": value_slot,
        "value_head": value_head,
        "LEVELS": rows,
        "COLUMNS": columns,
    }
    grid = (2 * layers * tiles, caches.heads, requests) if levels else (0,)
    return [Launch(_commit_kernel, grid, arguments, num_warps=4 if rows * columns >= 512 else 1)]


def commit_reference(
    keys: Sequence[Tensor], values: Sequence[Tensor], source: Tensor, destination: Tensor, lengths: Tensor
) -> None:
    """``commit`` on the caches themselves, one slot after the other, all read before any is written."""
    for cache in (*keys, *values):
        size = cache.shape[1]
        for r in range(len(lengths)):
            count = int(lengths[r])
            rows = [cache[slot // size, slot % size].clone() for slot in source[r, :count].tolist()]
            for slot, row in zip(destination[r, :count].tolist(), rows, strict=True):
                cache[slot // size, slot % size] = row
