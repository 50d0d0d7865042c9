# SPDX-License-Identifier: Apache-2.0
"""Means over prompts and their 95 % prompt-bootstrap intervals.

A quantity's value is *the mean over prompts of each prompt's mean over its rounds*, everywhere in the study; a prompt
without a round that counts (in a subset, say) is left out of that mean.  A resample draws prompts with replacement and
the same resamples serve all quantities, so ratios and differences of quantities are paired.

A *sample* is an array ``[1 + S, …]``: the value first, then that of each of ``S`` resamples.  Arithmetic on samples is
arithmetic on quantities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval.  NaN = it does not exist."""

    value: float
    low: float
    high: float

    def text(self, form: str = ".3f") -> str:
        """``value [low, high]``."""
        if np.isnan(self.value):
            return "-"
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


class Prompts:
    """The prompts of some rounds.

    Args:
        requests: each round's request; one request is one prompt.
        resamples: ``S``.
        seed: of the resamples.
    """

    def __init__(self, requests: Sequence[str], resamples: int, seed: int) -> None:
        names, self._prompt = np.unique(np.asarray(requests, dtype=str), return_inverse=True)
        self.names: list[str] = names.tolist()
        self._order = np.argsort(self._prompt, kind="stable")
        count = len(names)
        drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
        self._weights = np.concatenate((np.ones((1, count)), drawn))

    def sample(self, values: Floats, where: NDArray[np.bool_] | None = None) -> Floats:
        """Means over prompts of ``values`` (``[rounds, …]``), as a sample.

        Rounds with NaN, and those outside ``where`` (bool ``[rounds]``), do not count.
        """
        means = self._means(values, where)
        known = ~np.isnan(means)
        columns = means.reshape(len(means), -1)
        total = self._weights @ np.nan_to_num(columns)
        result = divide(total, self._weights @ known.reshape(columns.shape).astype(np.float64))
        return result.reshape(-1, *means.shape[1:])

    def _means(self, values: Floats, where: NDArray[np.bool_] | None) -> Floats:
        """``[prompts, …]``, NaN where no round counts."""
        counts = ~np.isnan(values)
        if where is not None:
            counts &= where.reshape(-1, *[1] * (values.ndim - 1))
        starts = np.searchsorted(self._prompt[self._order], np.arange(len(self.names)))
        total = np.add.reduceat(np.where(counts, values, 0.0)[self._order], starts, axis=0)
        return divide(total, np.add.reduceat(counts[self._order].astype(np.float64), starts, axis=0))


def divide(numerator: NDArray[Any], denominator: NDArray[Any]) -> Floats:
    """``numerator / denominator``, NaN where the denominator is 0 (or NaN)."""
    result: Floats = np.full(np.broadcast_shapes(numerator.shape, denominator.shape), np.nan)
    np.divide(numerator, denominator, out=result, where=denominator != 0)
    return result


def estimate(sample: Floats, *, whole: bool = False) -> Estimate:
    """Value and percentile interval of a sample ``[1 + S]``.

    A resample in which the quantity does not exist is left out.  ``whole``: take the interval's ends from the resamples
    themselves instead of interpolating, for counts, which may be infinite.
    """
    resampled = sample[1:][~np.isnan(sample[1:])]
    value = float(sample[0])
    if np.isnan(value) or not len(resampled):
        return Estimate(value, float("nan"), float("nan"))
    low, high = np.percentile(resampled, [2.5, 97.5], method="inverted_cdf" if whole else "linear")
    return Estimate(value, float(low), float(high))


def estimates(sample: Floats) -> list[Estimate]:
    """Each column of a sample ``[1 + S, K]``."""
    return [estimate(sample[:, column]) for column in range(sample.shape[1])]
