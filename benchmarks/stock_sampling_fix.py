# SPDX-License-Identifier: Apache-2.0
"""A correction that stock speculative sampling needs on the CPU, for the stock rows of our benchmarks and tests only.

vLLM 0.32's CPU build replaces the kernel that expands per-request temperature and top-p to per-token values by
``_expand_kernel_impl`` in ``vllm/utils/cpu_triton_utils.py``.  That function casts its output to an int64 copy and
never writes the output itself, so stock speculation above temperature 0 samples with uninitialised values.  An engine
started with ``worker_cls=WORKER_CLS`` (this folder on ``sys.path``) has that one function corrected.  Our own method
does not pass through it.
"""

from __future__ import annotations

import torch
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.worker.cpu_worker import CPUWorker

#: The value of ``worker_cls`` for the engines of stock rows.
WORKER_CLS = "stock_sampling_fix.CorrectedCPUWorker"


class CorrectedCPUWorker(CPUWorker):
    """vLLM's CPU worker with ``expand_kernel`` corrected."""

    def init_device(self) -> None:
        register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})
        super().init_device()


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write each request's value to all its tokens, ``replace_from`` replaced by ``replace_to``.

    Args:
        output: ``[tokens]``, the type of ``input_val``; written in place.
        input_val: ``[requests]``.
        cu_num_tokens: int ``[requests]`` cumulative number of tokens.
        replace_from, replace_to: the value to replace and its replacement.
        MAX_NUM_TOKENS: the stock kernel's block size, not needed.
    """
    value = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    output.copy_(value.repeat_interleave(counts, output_size=output.shape[0]))
