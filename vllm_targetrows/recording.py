# SPDX-License-Identifier: Apache-2.0
"""Recorded rounds: what the study needs to know of a round, one row of a Parquet file each.

Parquet (pyarrow) because it is compact, keeps lists of different length side by side and is read by everything.  A file
is written in parts, which ``close`` joins: a process that is killed loses only its last, unfinished part.

``N`` pool nodes, first level first, each level best first, parents before children.  A node's index in the lists is its
number; ``-1`` is the root.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

ROUNDS_IN_PART = 500
METADATA = b"targetrows"
JOINED = b"targetrows_joined"
"""Number of the last part in a closed file: should the process end before it has removed them, they count once."""
Ints = Sequence[int] | np.ndarray
Floats = Sequence[float] | np.ndarray


@dataclass
class RecordedRound:
    """One round of one request.  ``p`` is the request's own row: after temperature, top-p, penalties, ..."""

    request: str
    """Request id.  What stands before its first ``/`` is the task."""
    position: int
    """Tokens of the committed context, the root included."""
    temperature: float
    """0 for greedy requests, whose rows are point masses."""
    pool_token: Ints
    """``[N]`` target token ids."""
    pool_parent: Ints
    """``[N]``."""
    pool_log_q: Floats
    """``[N]`` log q(node | its parent's prefix)."""
    pool_p: Floats
    """``[N]`` p(node | its parent's prefix): the target's row at exactly that address."""
    token_match_p: Floats
    """``[N]`` the node's probability in the last verification's first row whose last token is that of the node's
    parent, at temperature 1 and without transforms; NaN where there is none.  It is a row at another address."""
    ancestor_p: Floats
    """``[N]`` the same in the last verification's row at the exit, the root's own parent."""
    root_entropy: float
    """Entropy in nats of the target's root row, at temperature 1 and without transforms."""
    root_top_token: Ints
    """The ten likeliest tokens of that row, likeliest first (fewer where the vocabulary has fewer)."""
    root_top_p: Floats
    """Their probabilities in it."""
    drawn: int
    """Token drawn from the root row before the tree was chosen (``root_draw``, ``pearl``); -1 = none."""
    tree: Ints
    """Pool nodes that were verified and could be accepted: those below ``drawn`` where there is one."""
    accepted: int
    """Nodes of ``tree`` that were accepted."""
    emitted: Ints
    """Accepted tokens and the continuation, without ``drawn``."""
    address_variation: float
    """Total variation distance from the next root row to the row at the pool's node with its address; NaN = no such
    row (only the pool's inner nodes have one)."""
    token_variation: float
    """The same for the first inner pool node with only its last token; NaN = none."""


class Recording(NamedTuple):
    """A file's rounds."""

    path: str
    settings: dict[str, Any]  # model, drafter, and the options of speculative_config
    rounds: pa.Table  # one row per ``RecordedRound``, columns of its names


def schema() -> pa.Schema:
    """The columns: int32 and float32, lists of them, and the request's id."""
    import pyarrow as pa

    kinds = {"str": pa.string(), "int": pa.int32(), "float": pa.float32()}
    kinds |= {"Ints": pa.list_(pa.int32()), "Floats": pa.list_(pa.float32())}
    return pa.schema([(each.name, kinds[str(each.type)]) for each in fields(RecordedRound)])


class Recorder:
    """Writes recorded rounds.

    Args:
        path: the file; replaced if it exists.
        settings: kept in the file, must be JSON.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._schema = schema().with_metadata({METADATA: json.dumps(dict(settings)).encode()})
        self._waiting: list[RecordedRound] = []
        self._parts = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        for part in (*parts(self.path), *self.path.parent.glob(f"{self.path.name}.*ing")):
            part.unlink()

    def add(self, recorded: RecordedRound) -> None:
        """Record a round."""
        self._waiting.append(recorded)
        if len(self._waiting) >= ROUNDS_IN_PART:
            self._write_part()

    def close(self) -> None:
        """Join the parts into the file.  More rounds may follow, and another ``close``."""
        import pyarrow.parquet as pq

        self._write_part()
        sources = _sources(self.path)
        if sources == [self.path]:
            return
        joined = self.path.with_name(self.path.name + ".joining")
        metadata = {**self._schema.metadata, JOINED: str(self._parts).encode()}
        with pq.ParquetWriter(joined, self._schema.with_metadata(metadata), compression="zstd") as writer:
            for source in sources:
                with pq.ParquetFile(source) as file:
                    for group in range(file.num_row_groups):
                        writer.write_table(file.read_row_group(group).replace_schema_metadata(metadata))
        joined.replace(self.path)
        for part in sources:
            if part != self.path:
                part.unlink()

    def _write_part(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._waiting and (self._parts or self.path.exists()):
            return
        rows = [vars(each) for each in self._waiting]
        self._waiting = []
        self._parts += 1
        part = self.path.with_name(f"{self.path.name}.part{self._parts:05d}")
        unfinished = part.with_name(part.name + ".writing")
        pq.write_table(pa.Table.from_pylist(rows, schema=self._schema), unfinished, compression="zstd")
        unfinished.replace(part)


def parts(path: Path) -> list[Path]:
    """The finished parts of a file that was not closed."""
    return sorted(path.parent.glob(f"{path.name}.part[0-9][0-9][0-9][0-9][0-9]"))


def read(path: str | Path) -> Recording:
    """Read a file, and the parts of it that were not joined.

    Raises:
        ValueError: nothing is there, or it is no recording.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    try:
        sources = _sources(path)
        if not sources:
            raise ValueError(f"no recording at {str(path)!r}")
        tables = [pq.read_table(source) for source in sources]
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{str(path)!r} is no recording: {str(error).splitlines()[0]}") from None
    metadata = tables[0].schema.metadata or {}
    if METADATA not in metadata or not tables[0].schema.equals(schema()):
        raise ValueError(f"{str(path)!r} is no recording of this version: its columns are others")
    return Recording(str(path), json.loads(metadata[METADATA]), pa.concat_tables(tables))


def _sources(path: Path) -> list[Path]:
    """The file, if it is there, and the parts that are not in it."""
    import pyarrow.parquet as pq

    if not path.is_file():
        return parts(path)
    joined = int((pq.read_schema(path).metadata or {}).get(JOINED, 0))
    return [path, *(part for part in parts(path) if int(part.name[-5:]) > joined)]
