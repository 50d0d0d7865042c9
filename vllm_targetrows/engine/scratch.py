# SPDX-License-Identifier: Apache-2.0
"""Scratch KV blocks: private block copies for the paths of a tree.

A tree needs several continuations of one context in the KV cache at once.  The runner therefore appends a few
*scratch* blocks to every layer's KV cache, behind the blocks that the scheduler knows of.  A path of the tree is then
an ordinary sequence: its block table holds the context's own full blocks and, at the end, scratch blocks that carry a
copy of the context's last, partly filled block and the path's own keys and values.

Blocks are copied whole.  No code here looks inside a block, so this is right for every block layout: on the CPU the
``vec`` (K transposed) layout was tested; ``vec16``, ``amx``, ``neon`` and fp8 store a block in one piece as well.
"""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_targetrows.engine import transfer


def tail_blocks(block_size: int, new_tokens: int) -> int:
    """Most blocks that ``new_tokens`` further tokens can touch, starting anywhere inside a block."""
    return (block_size - 1 + new_tokens - 1) // block_size + 1


def append_blocks(config: KVCacheConfig, count: int) -> KVCacheConfig:
    """Return a copy of ``config`` in which every layer has ``count`` more blocks at its end.

    The scheduler keeps the old configuration, so it never hands out one of the new block numbers.

    Args:
        config: the configuration that the engine core computed.
        count: number of scratch blocks.
    """
    config = deepcopy(config)
    old = config.num_blocks
    config.num_blocks = old + count
    for tensor in config.kv_cache_tensors:
        layer_outermost = tensor.layer_stride >= old * tensor.block_stride
        if layer_outermost:  # every layer is one run of blocks: each run grows
            assert tensor.layer_stride % old == 0 and tensor.offset % old == 0 and tensor.size % old == 0
            tensor.layer_stride = tensor.layer_stride // old * (old + count)
            tensor.offset = tensor.offset // old * (old + count)
            tensor.size = tensor.size // old * (old + count)
        else:  # every block holds all layers: the run of blocks grows
            tensor.size += count * tensor.block_stride
    return config


def bytes_per_block(config: KVCacheConfig) -> int:
    """Bytes that one more block costs, over all layers."""
    return sum(tensor.size for tensor in config.kv_cache_tensors[:1]) // config.num_blocks


class BlockCopier:
    """Copies whole KV blocks, for all given layers in one operation.

    Args:
        kv_caches: the layers' caches, each ``[num_blocks, heads, block_size, 2 * head_size]`` (or any other shape whose
            first dimension is the block), as views of one allocation or of several.
    """

    def __init__(self, kv_caches: list[torch.Tensor]) -> None:
        self._stacks = [_stack(group) for group in _groups_of_equal_stride(kv_caches)]

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy block ``source[i]`` to block ``destination[i]``, all at once.

        Every source is read before any destination is written, so the two lists may overlap.

        Args:
            source: int64 ``[n]``, block numbers.
            destination: int64 ``[n]``, distinct block numbers.
        """
        if source.numel() == 0:
            return
        for stack in self._stacks:
            stack.index_copy_(1, destination, stack.index_select(1, source))

    def copy_apart(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """As ``copy``, with block numbers of which none is in both lists.

        On a CPU that saves the detour: copied one by one, the blocks are read and written once, and in order.
        """
        if transfer.looking_is_free(self._stacks[0].device):
            for stack in self._stacks:
                for origin, copy in zip(source.tolist(), destination.tolist(), strict=True):
                    stack.select(1, copy).copy_(stack.select(1, origin))
        else:
            self.copy(source, destination)


def _groups_of_equal_stride(kv_caches: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split the caches into runs that lie at equal distances in one storage."""
    groups: list[list[torch.Tensor]] = []
    for cache in sorted(kv_caches, key=lambda cache: (cache.untyped_storage().data_ptr(), cache.data_ptr())):
        if groups:
            last = groups[-1]
            same = last[0].untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
            alike = last[0].shape == cache.shape and last[0].stride() == cache.stride()
            step = cache.storage_offset() - last[-1].storage_offset()
            regular = len(last) < 2 or step == last[1].storage_offset() - last[0].storage_offset()
            if same and alike and regular and last[0].dtype == cache.dtype:
                last.append(cache)
                continue
        groups.append([cache])
    return groups


def _stack(caches: list[torch.Tensor]) -> torch.Tensor:
    """View caches at equal distances as ``[layers, blocks, elements of a block]`` without copying."""
    first = caches[0]
    distance = caches[1].storage_offset() - first.storage_offset() if len(caches) > 1 else first.numel()
    block = first[0]
    elements = block.numel()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(block.shape, block.stride(), strict=True))
    shape = [len(caches), *first.shape]
    stride = [distance, *first.stride()]
    if extent == elements:  # a block is one run of memory, whatever the order of its dimensions
        shape, stride = [len(caches), first.shape[0], elements], [distance, first.stride(0), 1]
    assert math.prod(shape) == len(caches) * first.numel()
    return first.as_strided(shape, stride, first.storage_offset())
