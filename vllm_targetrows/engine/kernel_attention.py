# SPDX-License-Identifier: Apache-2.0
"""Tree attention by our own kernels: the nodes of a tree lie in the request's own slots, in preorder.

vLLM has room there for every draft token and writes their keys and values itself.  A step with trees puts ``tree`` on
its attention metadata, and the layers then call ``tree_attention``; every other step is the back end's own.  A commit
moves the accepted path's slots to the front.  Nothing is read back from the device.

Works with every back end whose caches are ``[blocks, kv_heads, block_size, 2 * head_size]`` with keys and values side
by side, in any order of memory: FlashAttention and Triton attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_targetrows.engine.attention import Nodes, depths, flat_nodes
from vllm_targetrows.engine.kernel_steps import KernelSteps
from vllm_targetrows.engine.steps import Exits, Steps
from vllm_targetrows.engine.transfer import on_device
from vllm_targetrows.triton_kernels.commit import caches, commit
from vllm_targetrows.triton_kernels.tree_attention import tree_attention
from vllm_targetrows.triton_kernels.tree_mask import tree_mask

FP8 = ("fp8", "fp8_e4m3")
"""Names of the quantised KV cache types that the kernel reads, with one scale for all keys and one for all values."""


@dataclass(frozen=True)
class KernelStep:
    """One step's trees: ``nodes`` on the host, the rest on the device."""

    nodes: Nodes
    parents: torch.Tensor  # int32 [R, N] -1 = child of the root, and behind the tree
    sizes: torch.Tensor  # int32 [R]
    before: torch.Tensor  # int32 [R] tokens up to and including the root
    slots: torch.Tensor  # int64 [R, N] KV slots of the positions behind the root


@dataclass(frozen=True)
class TreeRows:
    """What ``tree_attention`` needs beside the back end's own metadata, on the device."""

    before: torch.Tensor  # int32 [R]
    bits: torch.Tensor  # int64 [R, N + 1, words]
    depth: torch.Tensor  # int32 [R, N]


class TreeSlots:
    """The layout for ``tree_attention``; the layers' implementation mixes in ``TreeKernelAttention``.

    Args:
        kv_caches: all layers' caches.
        scratch: numbers of the scratch blocks; not used.
        block_size: tokens in a KV block.
    """

    def __init__(self, kv_caches: list[torch.Tensor], scratch: np.ndarray, block_size: int) -> None:
        del scratch
        self.steps: Steps = KernelSteps()
        halves = [kv_cache.transpose(1, 2).chunk(2, dim=-1) for kv_cache in kv_caches]
        self._caches = caches([key for key, _ in halves], [value for _, value in halves])
        self._block_size = block_size
        self._device = kv_caches[0].device

    def plan(
        self,
        parents: np.ndarray,
        sizes: np.ndarray,
        computed: np.ndarray,
        scheduled: np.ndarray,
        drafts: np.ndarray,
        block_table: np.ndarray,
    ) -> KernelStep:
        before = scheduled - drafts
        request, index, node_parent = flat_nodes(parents, sizes)
        rows = (np.cumsum(scheduled) - scheduled + before)[request] + index
        position = (computed + before)[:, None] + np.arange(parents.shape[1])
        column = np.minimum(position // self._block_size, block_table.shape[1] - 1)
        block = np.take_along_axis(block_table.astype(np.int64), column, axis=1)
        trees = on_device(
            self._device,
            *(array.astype(np.int32) for array in (parents, sizes, before)),
            block * self._block_size + position % self._block_size,
        )
        return KernelStep(Nodes(rows, depths(node_parent), request, sizes), *trees)

    def metadata(
        self,
        step: KernelStep,
        base: CommonAttentionMetadata,
        per_layer: dict[str, Any],
        build: Callable[[CommonAttentionMetadata], dict[str, Any]],
    ) -> dict[str, Any]:
        del base, build
        depth, _, bits = tree_mask(step.parents, step.sizes)
        rows = TreeRows(step.before, bits, depth)
        for metadata in {id(m): m for m in per_layer.values()}.values():
            metadata.tree = rows
        return per_layer

    def commit(self, step: KernelStep, exits: Exits) -> None:
        levels = min(exits.path.shape[1], step.slots.shape[1])
        source = step.slots.gather(1, exits.path[:, :levels].clamp(min=0))
        commit(self._caches, source, step.slots[:, :levels], exits.length)


class TreeKernelAttention:
    """Mixed into an attention implementation: serves steps with trees by ``tree_attention``."""

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
        """As the implementation's own; ``kv_cache`` is ``[blocks, kv_heads, block_size, 2 * head_size]``."""
        rows: TreeRows | None = getattr(attn_metadata, "tree", None)
        if rows is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)  # type: ignore[misc, no-any-return]
        return attend(self, layer, query, kv_cache, attn_metadata, rows, output)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: steps with trees write their output as it is."""
        return False


def attend(
    impl: Any,
    layer: Any,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Any,
    rows: TreeRows,
    output: torch.Tensor,
) -> torch.Tensor:
    """Attention of a step with trees, by the settings of ``impl`` (window, soft cap, sinks, scales)."""
    tokens, requests = metadata.num_actual_tokens, len(rows.before)
    key_cache, value_cache = kv_cache.transpose(1, 2).split(impl.head_size, dim=-1)
    quantised = impl.kv_cache_dtype in FP8
    if quantised:
        key_cache, value_cache = key_cache.view(torch.float8_e4m3fn), value_cache.view(torch.float8_e4m3fn)
    query = query[:tokens]
    if query.dtype == torch.float8_e4m3fn:  # vLLM's layer has quantised it for the back end's own kernel
        query = (query.float() * layer._q_scale).to(output.dtype)
    tree_attention(
        query.view(tokens, impl.num_heads, impl.head_size),
        key_cache,
        value_cache,
        metadata.block_table[:requests],
        metadata.seq_lens[:requests],
        metadata.query_start_loc[: requests + 1],
        rows.before,
        rows.bits,
        rows.depth,
        scale=impl.scale,
        sliding_window=sliding_window(impl),
        softcap=float(impl.logits_soft_cap or 0),
        sinks=impl.sinks,
        k_scale=layer._k_scale if quantised else None,
        v_scale=layer._v_scale if quantised else None,
        out=output[:tokens].view(tokens, impl.num_heads, impl.head_size),
        request_rows=rows.depth.shape[1] + 1,
        max_seq_len=metadata.max_seq_len,
    )
    return output


def sliding_window(impl: Any) -> int:
    """Tokens that a token sees, itself included; 0 = all.  vLLM's back ends write ``w``, ``-1`` or ``(w - 1, 0)``."""
    window = impl.sliding_window
    return window[0] + 1 if isinstance(window, tuple) else max(window, 0)
