# SPDX-License-Identifier: Apache-2.0
"""Recorded rounds as padded arrays, some hundred at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_targetrows.recording import Recording
from vllm_targetrows.selection import NEVER, path_scores
from vllm_targetrows.trees import Pool

ROUNDS_IN_BATCH = 256
POOL_COLUMNS = ("pool_token", "pool_parent", "pool_log_q", "pool_p", "token_match_p", "ancestor_p")


@dataclass(frozen=True)
class Batch:
    """``R`` rounds whose pools are padded to ``N`` nodes.

    Attributes:
        requests: ``[R]`` request ids.
        temperature: float64 ``[R]``.
        pool: float64 ``[R, N]`` scores, sums of log q; ``-inf`` for padding.  Its ``width`` is not the same for all
            rounds, so it is that of the widest.
        log_q: float64 ``[R, N]``.
        log_p: float64 ``[R, N]``.
        reach: float64 ``[R, N]`` ``P(v)``, the product of the target's probabilities along the path; 0 for padding.
        token_match_p, ancestor_p: float32 ``[R, N]``; NaN = no such row.
        root_entropy: ``[R]`` nats.
        root_top: int64 ``[R]`` the target's likeliest first token; -1 if none was recorded.
        verified: bool ``[R, N]`` the tree that the engine verified.
        drawn_reach: float64 ``[R]`` ``P`` of the drawn token; 1 without one, NaN if it is not in the first level.
        accepted: int64 ``[R]``.
        address_variation, token_variation: float64 ``[R]``; NaN = no such row.
    """

    requests: list[str]
    temperature: NDArray[np.float64]
    pool: Pool
    log_q: Tensor
    log_p: Tensor
    reach: Tensor
    token_match_p: Tensor
    ancestor_p: Tensor
    root_entropy: NDArray[np.float64]
    root_top: Tensor
    verified: Tensor
    drawn_reach: Tensor
    accepted: NDArray[np.int64]
    address_variation: NDArray[np.float64]
    token_variation: NDArray[np.float64]

    @property
    def exists(self) -> Tensor:
        """bool ``[R, N]``: not padding."""
        return self.pool.score > NEVER

    @property
    def parent_score(self) -> Tensor:
        """float64 ``[R, N]``: the parent's sum of log q, 0 for a child of the root."""
        return with_root(self.pool.score, 0.0).gather(1, self.pool.parents + 1)


def with_root(values: Tensor, root: float | bool) -> Tensor:
    """``[R, N]`` to ``[R, 1 + N]``: the root's own value in front, so that parent ``-1`` can be looked up."""
    return torch.cat((values.new_full((values.shape[0], 1), root), values), dim=1)


def batches(recording: Recording, size: int = ROUNDS_IN_BATCH) -> Iterator[Batch]:
    """All rounds of a recording, in its order.

    Raises:
        ValueError: a round contradicts the format; the message names the file, the request and its position.
    """
    for start in range(0, recording.rounds.num_rows, size):
        try:
            yield _batch(recording.rounds.slice(start, size))
        except ValueError as error:
            raise ValueError(f"{recording.path!r}: {error}") from None


@dataclass(frozen=True)
class Group:
    """Rounds that are reported together: one temperature of recordings with the same settings."""

    name: str
    temperature: float
    recordings: list[Recording]

    @property
    def rounds(self) -> int:
        return sum(recording.rounds.num_rows for recording in self.recordings)

    @property
    def batch_count(self) -> int:
        return sum(-(-recording.rounds.num_rows // ROUNDS_IN_BATCH) for recording in self.recordings)

    def batches(self) -> Iterator[Batch]:
        for recording in self.recordings:
            yield from batches(recording)


def groups(recordings: Sequence[Recording]) -> list[Group]:
    """Recordings by settings, in order of appearance, and by temperature.

    Raises:
        ValueError: a recording is empty.
    """
    parts: dict[tuple[str, float], list[Recording]] = {}
    for recording in recordings:
        if not recording.rounds.num_rows:
            raise ValueError(f"{recording.path!r} holds no rounds")
        temperatures = _exact(recording.rounds.column("temperature").to_numpy())
        settings = json.dumps({**recording.settings, "record": None}, sort_keys=True)  # every run has its own path
        for temperature in np.unique(temperatures).tolist():
            rounds = recording.rounds.filter(temperatures == temperature)
            parts.setdefault((settings, temperature), []).append(recording._replace(rounds=rounds))
    # Recordings of several settings are told apart by their first file, by its folder too where that is needed.
    first = {settings: Path(part[0].path) for (settings, _), part in parts.items()}
    stems = [path.stem for path in first.values()]
    names = {
        settings: "" if len(first) == 1 else f"{path.stem if stems.count(path.stem) == 1 else path}, "
        for settings, path in first.items()
    }
    return [
        Group(f"{names[settings]}temperature {temperature:g}", temperature, part)
        for (settings, temperature), part in parts.items()
    ]


def _exact(temperature: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """0.7 that was recorded as 0.69999999, its float32."""
    return temperature.astype(np.float64).round(6)


def _batch(table: Any) -> Batch:
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}

    def floats(name: str) -> NDArray[np.float64]:
        return np.asarray(columns[name].to_numpy(zero_copy_only=False), dtype=np.float64)

    def refuse(bad: NDArray[np.bool_], what: str) -> None:
        """``bad``: ``[R]``, or ``[R, N]`` of the pools."""
        if bad.any():
            first = int(bad.reshape(len(bad), -1).any(axis=1).argmax())
            request, position = (columns[name][first] for name in ("request", "position"))
            raise ValueError(f"request {request.as_py()!r} at position {position}: {what}")

    lengths = {name: np.asarray(columns[name].value_lengths()) for name in POOL_COLUMNS}
    sizes = lengths["pool_token"]
    for name in POOL_COLUMNS:
        refuse(lengths[name] != sizes, f"{name} is not as long as pool_token")
    width = max(int(sizes.max(initial=0)), 1)
    exists = np.arange(width) < sizes[:, None]

    def padded(name: str, fill: float, dtype: Any) -> NDArray[Any]:
        values = np.full(exists.shape, fill, dtype=dtype)
        values[exists] = columns[name].flatten().to_numpy(zero_copy_only=False)
        return values

    parents = padded("pool_parent", -1, np.int64)
    p, log_q = padded("pool_p", 0.0, np.float64), padded("pool_log_q", 0.0, np.float64)
    refuse((parents < -1) | (parents >= np.arange(width)), "a pool node's parent does not come before it")
    refuse(~((p >= 0) & (p < 1.001)), "pool_p holds something that is no probability")
    refuse(~(log_q < 1e-3), "pool_log_q holds something that is no log probability")
    pool = _pool(padded("pool_token", -1, np.int64), parents, exists)
    refuse((pool.depth.diff(dim=1) < 0).numpy(), "the pool is not in order of depth")

    # float32 may have rounded a sum above one, and a child must never outscore its parent.
    edge_q, edge_p = torch.from_numpy(log_q).clamp(max=0.0), torch.from_numpy(p).log().clamp(max=0.0)
    pool = replace(pool, score=path_scores(pool, edge_q))
    reach = path_scores(pool, edge_p).exp()

    tree, in_tree = columns["tree"].flatten().to_numpy(zero_copy_only=False), np.zeros(exists.shape, dtype=bool)
    rounds = np.repeat(np.arange(len(sizes)), np.asarray(columns["tree"].value_lengths()))
    outside = np.zeros(len(sizes), dtype=bool)
    outside[rounds[(tree < 0) | (tree >= sizes[rounds])]] = True
    refuse(outside, "tree names a node that is not in the pool")
    in_tree[rounds, tree] = True

    drawn = torch.from_numpy(floats("drawn").astype(np.int64))
    found = (pool.tokens == drawn[:, None]) & (pool.parents < 0) & (pool.score > NEVER)
    drawn_reach = torch.where(found.any(dim=1), (reach * found).sum(dim=1), float("nan"))

    top_lengths = np.asarray(columns["root_top_token"].value_lengths())
    root_top = np.full(len(sizes), -1, dtype=np.int64)
    firsts = (np.cumsum(top_lengths) - top_lengths)[top_lengths > 0]
    root_top[top_lengths > 0] = columns["root_top_token"].flatten().to_numpy(zero_copy_only=False)[firsts]
    return Batch(
        requests=columns["request"].to_pylist(),
        temperature=_exact(floats("temperature")),
        pool=pool,
        log_q=edge_q,
        log_p=edge_p,
        reach=reach,
        token_match_p=torch.from_numpy(padded("token_match_p", np.nan, np.float32)),
        ancestor_p=torch.from_numpy(padded("ancestor_p", np.nan, np.float32)),
        root_entropy=floats("root_entropy"),
        root_top=torch.from_numpy(root_top),
        verified=torch.from_numpy(in_tree),
        drawn_reach=torch.where(drawn < 0, 1.0, drawn_reach),
        accepted=floats("accepted").astype(np.int64),
        address_variation=floats("address_variation"),
        token_variation=floats("token_variation"),
    )


def _pool(tokens: NDArray[np.int64], parents: NDArray[np.int64], exists: NDArray[np.bool_]) -> Pool:
    """Depths and branches from the parents; all existing nodes score 0 for now."""
    parent = torch.from_numpy(parents)
    depth, branch = torch.ones_like(parent), torch.arange(parent.shape[1]).expand_as(parent)
    up = parent
    while (has_parent := up >= 0).any():
        depth, branch = depth + has_parent, torch.where(has_parent, up, branch)
        up = torch.where(has_parent, parent.gather(1, up.clamp(min=0)), -1)
    real = torch.from_numpy(exists)
    depth = torch.where(real, depth, depth.amax(dim=1, keepdim=True))  # padding is behind the last level
    score = torch.where(real, torch.tensor(0.0, dtype=torch.float64), NEVER)
    width = int(((parent < 0) & real).sum(dim=1).max())
    return Pool(torch.from_numpy(tokens), parent, depth, score, branch, width)
