# SPDX-License-Identifier: Apache-2.0
"""The exact joint law of a request's first tokens, and a chi-square test of drawn tokens against it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.stats import chi2

Settings = dict[str, float]


@dataclass(frozen=True)
class Law:
    """``mass[x1, ..., xn]``, float64 ``[V] * n``, sums to 1; ``support`` is false where a token can never be drawn."""

    mass: np.ndarray
    support: np.ndarray


@dataclass(frozen=True)
class Fit:
    """Pearson's statistic, its degrees of freedom and the upper tail probability."""

    statistic: float
    freedom: int
    p_value: float

    def __str__(self) -> str:
        return f"chi-square {self.statistic:.1f} on {self.freedom} degrees of freedom, p = {self.p_value:.3g}"


def exact_logits(target: Path, prompt: Sequence[int], length: int) -> list[torch.Tensor]:
    """The target's logits after the prompt and every prefix of up to ``length - 1`` tokens.

    Returns:
        ``length`` float64 tensors; the one at ``k`` has the shape ``[V] * (k + 1)``: ``k`` prefix tokens, then the
        next one.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
    vocabulary = model.config.vocab_size
    prefixes = torch.cartesian_prod(*[torch.arange(vocabulary)] * (length - 1)).reshape(-1, length - 1)
    sequences = torch.cat([torch.tensor(prompt).expand(len(prefixes), -1), prefixes], dim=1)
    with torch.inference_mode():
        last = [model(part, logits_to_keep=length).logits for part in sequences.split(2048)]
    logits = torch.cat(last)  # [V ** (length - 1), length, V]
    rows = []
    for k in range(length):
        step = vocabulary ** (length - 1 - k)  # prefixes that agree in their first k tokens are neighbours
        rows.append(logits[::step, k].reshape([vocabulary] * (k + 1)).clone())
    return rows


def exact_law(rows: Sequence[torch.Tensor], prompt: Sequence[int], settings: Settings) -> Law:
    """The joint law of the first ``len(rows)`` tokens of a request with vLLM's sampling parameters ``settings``."""
    mass, support = torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.bool)
    for logits in rows:
        probability = _transformed(logits, prompt, settings, slack=0.0)
        # A top-p set computed in float32 may differ when a cumulative sum falls on the bound: only what is outside by
        # a margin counts as impossible.
        possible = _transformed(logits, prompt, settings, slack=1e-4) > 0
        mass, support = mass[..., None] * probability, support[..., None] & possible
    return Law(mass.numpy(), support.numpy())


def _transformed(logits: torch.Tensor, prompt: Sequence[int], settings: Settings, slack: float) -> torch.Tensor:
    """Rows after penalties, temperature, min-p, top-k and top-p, in vLLM's order; the shape of ``logits``."""
    vocabulary = logits.shape[-1]
    prefix_length = logits.dim() - 1
    rows = logits.reshape(-1, vocabulary)
    prefixes = torch.tensor(list(itertools.product(range(vocabulary), repeat=prefix_length)), dtype=torch.long)
    written = torch.zeros_like(rows).scatter_add_(1, prefixes, torch.ones_like(prefixes, dtype=rows.dtype))
    seen = written > 0
    seen[:, list(prompt)] = True
    repetition = settings.get("repetition_penalty", 1.0)
    rows = torch.where(seen, torch.where(rows > 0, rows / repetition, rows * repetition), rows)
    rows = rows - settings.get("frequency_penalty", 0.0) * written
    rows = rows - settings.get("presence_penalty", 0.0) * (written > 0)
    rows = (rows / settings.get("temperature", 1.0)).softmax(-1)
    if min_p := settings.get("min_p", 0.0):
        rows = rows.masked_fill(rows < min_p * rows.amax(-1, keepdim=True) * (1 - slack), 0.0)
    if top_k := int(settings.get("top_k", 0)):
        rows = rows.masked_fill(rows < rows.topk(top_k).values[:, -1:], 0.0)
    rows = rows / rows.sum(-1, keepdim=True)
    if (top_p := settings.get("top_p", 1.0)) < 1:
        ordered, order = rows.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # a token stays while the more probable ones do not reach top-p
        rows = rows.masked_fill(
            torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= top_p + slack), 0.0
        )
    return (rows / rows.sum(-1, keepdim=True)).reshape(logits.shape)


def fit(draws: Iterable[Sequence[int]], law: Law, smallest: float = 5.0) -> Fit:
    """Chi-square test of drawn token sequences against ``law``.

    A cell whose expectation is below ``smallest`` is merged with the other such cells that share all its tokens but
    the last one, and what is still too small then with those that share one token less, and so on: the test keeps its
    power at every depth.  A draw outside the support gives p = 0.
    """
    draws = np.asarray(list(draws))
    length = law.mass.ndim
    observed = np.zeros(law.mass.shape)
    np.add.at(observed, tuple(draws[:, :length].T), 1)
    if observed[~law.support].any():
        return Fit(float("inf"), 1, 0.0)
    expected = law.mass * len(draws)
    statistic, cells = 0.0, 0
    while True:
        alone = expected >= smallest
        statistic += float(((observed - expected)[alone] ** 2 / expected[alone]).sum())
        cells += int(alone.sum())
        expected, observed = np.where(alone, 0, expected), np.where(alone, 0, observed)
        if expected.ndim == 0:
            break
        expected, observed = expected.sum(-1), observed.sum(-1)
    if expected > 0:  # what is left of the whole law is too small to stand alone: one more cell, its weight bounded
        statistic += float((observed - expected) ** 2 / max(float(expected), 1.0))
        cells += 1
    freedom = cells - 1
    return Fit(statistic, freedom, float(chi2.sf(statistic, freedom)))
