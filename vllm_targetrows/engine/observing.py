# SPDX-License-Identifier: Apache-2.0
"""What a round tells the metrics.

``Observer.look`` takes what is needed from the device, the runner brings it to the host with everything else, and
``Observer.count`` counts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_targetrows.coverage import next_root_match, total_variation
from vllm_targetrows.engine import transfer
from vllm_targetrows.engine.batch import Batch, RootRows
from vllm_targetrows.engine.config import DRAWING_RULES
from vllm_targetrows.engine.metrics import Round, RoundMetrics
from vllm_targetrows.engine.rows import TargetRows
from vllm_targetrows.trees import Pool
from vllm_targetrows.verification import expected_length

if TYPE_CHECKING:
    from vllm_targetrows.engine.runner import TreeRounds


@dataclass(frozen=True)
class Observed:
    """What the metrics need from the device.  ``R`` requests, ``G`` of them get a pool."""

    rows: TargetRows
    expected: torch.Tensor  # float64 [R] accepted tokens that the rows let expect; only of sampled requests
    top: torch.Tensor  # int64 [R] likeliest token of the root's row
    first_level: torch.Tensor  # int64 [G, k] of the new pools
    root_top: torch.Tensor  # int64 [n] likeliest token of each row of the root pass
    compared: list[tuple[str, str]]  # request and match of each retained row
    distance: torch.Tensor  # float64, its total variation distance from the root's row

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them as int64."""
        numbers = (self.expected.view(torch.int64), self.distance.view(torch.int64))
        return (self.top, self.first_level, self.root_top, *numbers)


class Retained(NamedTuple):
    """A row that is compared with the next root row: ``[V]`` each, or the token ``[]`` of a point mass."""

    match: str
    row: torch.Tensor
    root_row: torch.Tensor | None  # None: the next step's


class Observer:
    """Watches the rounds of ``runner`` for its ``metrics``."""

    def __init__(self, runner: TreeRounds, metrics: RoundMetrics) -> None:
        self.metrics = metrics
        self.retained: dict[str, Retained] = {}  # rows to compare with the next root row, by request
        self._runner = runner

    def look(self, rows: TargetRows, batch: Batch, pool: Pool | None, root: RootRows | None) -> Observed:
        """What the metrics need from the device; brought to the host with everything else."""
        runner = self._runner
        root_row, requests = batch.row_of[:, 0], len(batch.before)
        expected = torch.zeros(requests, dtype=torch.float64, device=runner.device)
        if rows.probs is not None and batch.plan is not None:
            acceptable = batch.acceptable
            expected = expected_length(rows.probs, acceptable.tree, acceptable.row_of, int(batch.room.max()))
        none = torch.zeros(0, dtype=torch.int64, device=runner.device)
        compared, distance = [], []
        for r, req_id in enumerate(runner.input_batch.req_ids):
            retained = self.retained.pop(req_id, None)
            if retained is not None and batch.kept[r]:
                next_row = retained.root_row
                if next_row is None:
                    next_row = _row(rows, root_row[r], runner._is_greedy(r))
                compared.append((req_id, retained.match))
                distance.append(_distance(next_row, retained.row))
        return Observed(
            rows=rows,
            expected=expected,
            top=_likeliest(rows, root_row),
            first_level=none if pool is None else pool.tokens[:, : pool.width],
            root_top=none
            if root is None
            else _likeliest(root.rows, torch.arange(len(root.request), device=runner.device)),
            compared=compared,
            distance=torch.stack(distance) if distance else none.double(),
        )

    def count(
        self,
        batch: Batch,
        observed: Observed,
        length: np.ndarray,
        emitted: np.ndarray,
        growing: np.ndarray,
        root: RootRows | None,
        exit_node: np.ndarray,
        top: np.ndarray,
        first_level: np.ndarray,
        root_top: np.ndarray,
        expected: np.ndarray,
        distance: np.ndarray,
    ) -> None:
        """Count the step in vLLM's metrics; arrays as of ``Observed``."""
        metrics, runner = self.metrics, self._runner
        req_ids = runner.input_batch.req_ids
        place = {}  # of the root rows that a token was drawn from
        if root is not None and runner.options.selection in DRAWING_RULES:
            place = {r: i for i, r in enumerate(root.request.tolist()) if emitted[r, length[r] + 1] >= 0}
        sampled = expected.view(np.float64)
        for (_, match), value in zip(observed.compared, distance.view(np.float64).tolist(), strict=True):
            metrics.variation(match, value)
        for r in np.flatnonzero(batch.decoding & batch.kept):
            nodes, accepted = int(batch.tree_sizes[r]), int(length[r])
            if not nodes:
                metrics.no_tree(batch.reasons[r] or "not_scheduled")
                continue
            tokens, parents = (part[r, : batch.sizes[r]].tolist() for part in (batch.tokens, batch.parents))
            match, node = next_root_match(tokens, parents, int(exit_node[r]), int(emitted[r, accepted]))
            mean = float(accepted) if runner._is_greedy(r) else float(sampled[r])
            metrics.round(Round(nodes, accepted, int((emitted[r] >= 0).sum()), mean, match))
            first = batch.first_levels[r]
            if first is not None:
                metrics.first_token(_rank(first, int(emitted[r, 0])), first[0] == top[r])
            if node is not None and metrics.samples_a_row():
                greedy = runner._is_greedy(r)
                root_row = _row(root.rows, place[r], greedy) if root is not None and r in place else None
                kept = _row(observed.rows, batch.row_of[r, node + 1], greedy)
                self.retained[req_ids[r]] = Retained(match, kept, root_row)
        for i, r in enumerate(growing.tolist()):
            level = first_level[i].tolist()
            if r in place:  # the pool's own root is no root of a tree
                drawn = int(emitted[r, length[r] + 1])
                metrics.first_token(_rank(level, drawn), level[0] == root_top[place[r]])
            else:
                runner._proposed[req_ids[r]].first_level = level


def _rank(first_level: list[int], token: int) -> int | None:
    """Place of ``token``, counted from 1."""
    return first_level.index(token) + 1 if token in first_level else None


def _likeliest(rows: TargetRows, row: torch.Tensor) -> torch.Tensor:
    """int64 ``[n]`` likeliest token of each ``row``, int64 ``[n]``."""
    if rows.argmax is not None:  # of all rows, before the temperature
        return rows.argmax[row]
    assert rows.probs is not None
    if transfer.looking_is_free(row.device):  # torch's argmax takes ten times as long, and the rows a copy
        probs = rows.probs.numpy()
        return torch.tensor([probs[r].argmax() for r in row.tolist()], dtype=torch.int64)
    return rows.probs[row].argmax(dim=1)


def _row(rows: TargetRows, row: torch.Tensor | int, greedy: bool) -> torch.Tensor:
    """A copy of one row: ``[V]``, or the token ``[]`` of a greedy request's point mass."""
    if greedy:
        assert rows.argmax is not None
        return rows.argmax[row].clone()
    assert rows.probs is not None
    return rows.probs[row].clone()


def _distance(row: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Total variation distance of two rows, or of two point masses given as tokens: float64 ``[]``."""
    return total_variation(row, other) if row.dim() else (row != other).double()
