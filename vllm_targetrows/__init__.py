# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding in vLLM with draft trees chosen and verified through the target's rows."""

__version__ = "0.1.0"
