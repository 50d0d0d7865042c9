# SPDX-License-Identifier: Apache-2.0
"""The distillation loss, its rows and gradients made a few rows at a time.

A row over a vocabulary is by far the largest thing in training a small drafter.  No row is kept for the backward pass:
the gradient of the cross-entropy is known as soon as the row is (``softmax(logits) - teacher``), so it is taken while
the row is at hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS = 256
"""Rows at a time: with 16,384 tokens 16 MB in float32."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens that stand for a whole vocabulary in one batch's rows.

    A row's cost is in proportion to its tokens, though nearly all of its mass is on few.  So a batch's rows are over
    the tokens that matter most and a uniform sample of the others.  A sampled token stands for those that were not:
    its logit is raised by ``-log(probability of being sampled)``, in the drafter's rows as in the target's, which makes
    both normalisers unbiased estimates of the whole ones (importance sampling, as in sampled softmax, Jean et al. 2015,
    arXiv 1412.2007).
    """

    tokens: Tensor
    """``[V]``, int64, increasing."""
    shift: Tensor
    """``[V]``, float32: what is added to their logits."""

    @classmethod
    def sample(cls, certain: Tensor, size: int, others: int, chance: torch.Generator) -> Vocabulary:
        """All of ``certain`` and ``others`` (or all there are) of the remaining tokens below ``size``."""
        is_certain = torch.zeros(size, dtype=torch.bool)
        is_certain[certain] = True
        rest = (~is_certain).nonzero()[:, 0]
        sampled = rest[torch.randperm(len(rest), generator=chance)[:others]]
        shift = torch.zeros(size)
        shift[sampled] = math.log(len(rest) / max(len(sampled), 1)) if len(rest) else 0.0
        is_certain[sampled] = True
        tokens = is_certain.nonzero()[:, 0]
        return cls(tokens, shift[tokens])


def distillation_loss(hidden: Tensor, head: Tensor, shift: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum over rows of the cross-entropy ``-sum_v teacher(v) log softmax(hidden head^T + shift)(v)``.

    Args:
        hidden: ``[N, H]``, the drafter's normed hidden states; gradients flow into it.
        head: ``[V, H]``, the drafter's head; gradients flow into it unless it is frozen.
        shift: ``[V]``, added to the logits.
        teacher: ``[N, V]``, the target's probabilities over the drafter's vocabulary; each row sums to one.
        weights: ``[N]``, float32; rows of weight zero may hold anything finite.

    Returns:
        A scalar, float32 (float64 if ``hidden`` is).
    """
    loss: Tensor = _Distillation.apply(hidden, head, shift, teacher, weights)  # type: ignore[no-untyped-call]
    return loss


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, shift: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
        exact = hidden.dtype == torch.float64
        work, wide = (torch.float64,) * 2 if exact else (teacher.dtype, torch.float32)
        head16, hidden16 = head.detach().to(work), hidden.detach().to(work)
        by_hidden = torch.empty_like(hidden16)
        by_head = torch.zeros_like(head, dtype=wide) if ctx.needs_input_grad[1] else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, len(hidden), ROWS):
            some = slice(start, start + ROWS)
            logits = (hidden16[some] @ head16.T).to(wide) + shift
            q, weight = teacher[some].to(wide), weights[some, None].to(wide)
            normaliser = logits.logsumexp(-1, keepdim=True)
            loss += (weight * (normaliser - (q * logits).sum(-1, keepdim=True))).sum()
            by_logits = ((logits.sub_(normaliser).exp_() - q) * weight).to(work)
            torch.mm(by_logits, head16, out=by_hidden[some])
            if by_head is not None:
                by_head += by_logits.T @ hidden16[some]
        ctx.save_for_backward(by_hidden.to(hidden.dtype), None if by_head is None else by_head.to(head.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *by_loss: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden, by_head = ctx.saved_tensors
        return by_hidden * by_loss[0], None if by_head is None else by_head * by_loss[0], None, None, None


@torch.no_grad()
def teacher_rows(last: Tensor, head: Tensor, shift: Tensor) -> Tensor:
    """The target's probabilities over some tokens, renormalised.

    Args:
        last: ``[N, H]``, the target's last hidden states.
        head: ``[V, H]``, the target's head for those tokens.
        shift: ``[V]``, added to the logits.

    Returns:
        ``[N, V]`` in the type of ``last``.
    """
    rows = torch.empty(len(last), len(head), dtype=last.dtype, device=last.device)
    for start in range(0, len(last), ROWS):
        some = slice(start, start + ROWS)
        logits = (last[some] @ head.T).to(torch.promote_types(last.dtype, torch.float32)) + shift
        rows[some] = logits.softmax(-1).to(last.dtype)
    return rows
