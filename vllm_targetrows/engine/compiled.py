# SPDX-License-Identifier: Apache-2.0
"""numba, which vLLM depends on, made safe to import before an engine starts."""

from numba import njit

from vllm_targetrows.engine.compat import shield_llvmlite

__all__ = ["njit"]

shield_llvmlite()
