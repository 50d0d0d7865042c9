# SPDX-License-Identifier: Apache-2.0
"""The distillation loss against the formula written with autograd."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_targetrows.drafters import distillation
from vllm_targetrows.drafters.distillation import Vocabulary, distillation_loss, teacher_rows


def reference_loss(hidden, head, shift, teacher, weights):
    return -(weights[:, None] * teacher * (hidden @ head.T + shift).log_softmax(-1)).sum()


@given(
    rows=st.integers(0, 9), vocabulary=st.integers(1, 12), size=st.integers(1, 5), seed=st.integers(0, 2**31),
    at_once=st.integers(1, 10), frozen=st.booleans(),
)  # fmt: skip
def test_loss_and_gradients_are_the_formulas(rows, vocabulary, size, seed, at_once, frozen):
    chance = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=chance, dtype=torch.float64)

    hidden, head = normal(rows, size).requires_grad_(), normal(vocabulary, size).requires_grad_(not frozen)
    teacher = normal(rows, vocabulary).softmax(-1)
    weights = torch.rand(rows, generator=chance).round(decimals=1)
    shift = normal(vocabulary)
    inputs = (hidden,) if frozen else (hidden, head)
    before, distillation.ROWS = distillation.ROWS, at_once
    try:
        loss = distillation_loss(hidden, head, shift, teacher, weights)
    finally:
        distillation.ROWS = before
    expected = reference_loss(hidden, head, shift, teacher, weights)
    torch.testing.assert_close(loss, expected)
    for got, wanted in zip(
        torch.autograd.grad(3 * loss, inputs), torch.autograd.grad(3 * expected, inputs), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_loss_in_bfloat16_is_close():
    chance = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=chance).requires_grad_()
    head = (torch.randn(500, 64, generator=chance) / 8).requires_grad_()
    teacher = torch.randn(300, 500, generator=chance).mul(3).softmax(-1).bfloat16()
    weights, shift = torch.ones(300), torch.zeros(500)
    loss = distillation_loss(hidden, head, shift, teacher, weights)
    expected = reference_loss(hidden, head, shift, teacher.float(), weights)
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=0)
    loss.backward()
    got = hidden.grad.clone(), head.grad.clone()
    hidden.grad = head.grad = None
    expected.backward()
    for a, b in zip(got, (hidden.grad, head.grad), strict=True):
        assert (a - b).norm() / b.norm() < 0.02


def test_teacher_rows_are_renormalised_rows():
    chance = torch.Generator().manual_seed(1)
    last, head = (torch.randn(n, 4, generator=chance, dtype=torch.float64) for n in (7, 10))
    kept = torch.tensor([0, 3, 4, 9])
    full = (last @ head.T).softmax(-1)[:, kept]
    shift = torch.zeros(4)
    torch.testing.assert_close(teacher_rows(last, head[kept], shift), full / full.sum(-1, keepdim=True))
    assert teacher_rows(last[:0], head, torch.zeros(10)).shape == (0, 10)


@given(
    size=st.integers(1, 30), certain=st.sets(st.integers(0, 29)), others=st.integers(0, 31), seed=st.integers(0, 2**31)
)
def test_a_sampled_vocabulary_holds_what_is_certain(size, certain, others, seed):
    certain = sorted(token for token in certain if token < size)
    chance = torch.Generator().manual_seed(seed)
    found = Vocabulary.sample(torch.tensor(certain, dtype=torch.int64), size, others, chance)
    tokens, rest = found.tokens.tolist(), size - len(certain)
    assert tokens == sorted(set(tokens)) and set(certain) <= set(tokens) <= set(range(size))
    assert len(tokens) == len(certain) + min(others, rest)
    for token, shift in zip(tokens, found.shift.tolist(), strict=True):
        raised = 0.0 if token in certain else math.log(rest / min(others, rest))
        assert math.isclose(shift, raised, abs_tol=1e-6)


def test_a_sampled_normaliser_is_unbiased():
    """Over many samples the mean of the estimated normaliser is the whole one."""
    chance = torch.Generator().manual_seed(2)
    logits = torch.randn(40, generator=chance, dtype=torch.float64)
    estimates = []
    for _ in range(4000):
        found = Vocabulary.sample(torch.tensor([3, 17, 30]), 40, 12, chance)
        estimates.append((logits[found.tokens] + found.shift).exp().sum())
    estimates = torch.stack(estimates)
    error = estimates.std() / len(estimates) ** 0.5
    assert abs(estimates.mean() - logits.exp().sum()) < 4 * error
