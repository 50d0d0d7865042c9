# SPDX-License-Identifier: Apache-2.0
"""The vLLM adapter: the only package here that imports vLLM."""
