# SPDX-License-Identifier: Apache-2.0
"""The study: what recorded rounds say about selection rules, coverage and the reuse of rows.

``python -m vllm_targetrows.study PATH…``.  The data's way: ``rounds`` (recording to padded arrays) → ``quantities``
(a round's own numbers) → ``estimates`` (means over prompts with intervals) → ``charts`` and ``report``; ``reranking``
trains and compares the learned reranker.  Never imports vLLM.
"""
