# SPDX-License-Identifier: Apache-2.0
"""An attention back end for the CPU with the GPU's KV layout, whose steps with trees go through our Triton kernels.

Interpreted (``TRITON_INTERPRET=1``), so that the wiring that a GPU gets runs in a whole engine without one.  Steps
without trees are dense attention in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm_targetrows.engine.kernel_attention import TreeKernelAttention, TreeSlots

LAUNCHES = {"tree": 0, "plain": 0}


class DenseImpl(CPUAttentionBackendImpl):
    """Plain causal attention over ``[blocks, block_size, kv_heads, head_size]`` caches."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        size = kv_cache.shape[2]
        real = slot_mapping >= 0
        slots = slot_mapping[real]
        for cache, new in zip(kv_cache.transpose(1, 2).split(self.head_size, dim=-1), (key, value), strict=True):
            cache[slots // size, slots % size] = new[: len(slot_mapping)][real]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        LAUNCHES["plain"] += 1
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        group = self.num_heads // self.num_kv_heads
        for r, length in enumerate(lengths[: len(starts) - 1]):
            rows = slice(starts[r], starts[r + 1])
            count = starts[r + 1] - starts[r]
            if not count:
                continue
            blocks = kv_cache[attn_metadata.block_table[r, : -(-length // kv_cache.shape[2])].long()].transpose(1, 2)
            keys, values = blocks.flatten(0, 1)[:length].split(self.head_size, dim=-1)
            sees = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            out = torch.nn.functional.scaled_dot_product_attention(
                query[rows].view(count, self.num_heads, -1).transpose(0, 1),
                keys.transpose(0, 1).repeat_interleave(group, 0),
                values.transpose(0, 1).repeat_interleave(group, 0),
                attn_mask=sees,
                scale=self.scale,
            )
            output[rows] = out.transpose(0, 1).reshape(output[rows].shape)
        return output


class KernelImpl(TreeKernelAttention, DenseImpl):
    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        LAUNCHES["tree"] += getattr(attn_metadata, "tree", None) is not None
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)


class KernelBackend(CPUAttentionBackend):
    tree_layout = TreeSlots

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return KernelImpl
