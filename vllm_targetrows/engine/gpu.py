# SPDX-License-Identifier: Apache-2.0
"""Worker, runner and attention back ends for CUDA.

The layout, the attention and the commit are tested on the CPU, with the kernels interpreted.  **No GPU has run this
yet**, so ``compat`` refuses the device unless ``TARGETROWS_UNTESTED_DEVICES=1`` is set.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_targetrows.engine.compat import register_attention_backends
from vllm_targetrows.engine.kernel_attention import TreeKernelAttention, TreeSlots
from vllm_targetrows.engine.runner import SCRATCH_SHARE, TreeRounds


class TreeFlashAttentionImpl(TreeKernelAttention, FlashAttentionImpl):
    """FlashAttention, with steps with trees served by ``tree_attention``."""


class TreeFlashAttentionBackend(FlashAttentionBackend):
    """The FlashAttention back end with ``TreeFlashAttentionImpl``."""

    tree_layout = TreeSlots

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return TreeFlashAttentionImpl


class TreeTritonAttentionImpl(TreeKernelAttention, TritonAttentionImpl):
    """vLLM's Triton attention, with steps with trees served by ``tree_attention``."""


class TreeTritonAttentionBackend(TritonAttentionBackend):
    """The Triton back end with ``TreeTritonAttentionImpl``."""

    tree_layout = TreeSlots

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return TreeTritonAttentionImpl


class TargetRowsGPURunner(TreeRounds, GPUModelRunner):
    """Model Runner V1 with trees."""


class TargetRowsGPUWorker(Worker):
    """GPU worker whose requests are decoded with trees."""

    def init_device(self) -> None:
        register_attention_backends()
        super().init_device()

    def _make_model_runner(self) -> GPUModelRunner:
        return TargetRowsGPURunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """Memory for the scheduler's blocks; the rest is for the scratch blocks."""
        return int(super().determine_available_memory() / (1 + SCRATCH_SHARE))

    def targetrows_state(self) -> dict[str, Any]:
        """For ``collective_rpc("targetrows_state")``: see ``TreeRounds.targetrows_state``."""
        return self.model_runner.targetrows_state()
