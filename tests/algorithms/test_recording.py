# SPDX-License-Identifier: Apache-2.0
"""Recorded rounds come back as they were, from closed files, unclosed ones and replaced ones."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vllm_targetrows import recording
from vllm_targetrows.recording import RecordedRound, Recorder, parts, read

ROUND = RecordedRound(
    request="math/1",
    position=12,
    temperature=0.5,
    pool_token=[5, 6, 7],
    pool_parent=[-1, -1, 0],
    pool_log_q=[-0.5, -1.0, -0.25],
    pool_p=[0.5, 0.25, 1.0],
    token_match_p=[math.nan, 0.125, math.nan],
    ancestor_p=[0.0, 0.5, math.nan],
    root_entropy=1.5,
    root_top_token=[5, 9],
    root_top_p=[0.5, 0.25],
    drawn=-1,
    tree=[0, 2],
    accepted=1,
    emitted=[5, 3],
    address_variation=math.nan,
    token_variation=0.75,
)


def rounds_of(path):
    return read(path).rounds.to_pylist()


def positions(path):
    return [each["position"] for each in rounds_of(path)]


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(recording, "ROUNDS_IN_PART", 3)


def test_a_round_comes_back_as_it_was(tmp_path):
    path = tmp_path / "new" / "rounds.parquet"
    recorder = Recorder(path, {"model": "target", "tree_topk": 10})
    recorder.add(ROUND)
    recorder.add(replace(ROUND, **{name: np.array(getattr(ROUND, name)) for name in ("pool_token", "pool_p", "tree")}))
    recorder.add(replace(ROUND, pool_token=[], pool_parent=[], pool_log_q=[], pool_p=[], tree=[]))
    recorder.close()
    assert read(path).settings == {"model": "target", "tree_topk": 10}
    first, second, empty = rounds_of(path)
    assert repr(first) == repr(asdict(ROUND))  # NaN is not equal to itself
    assert repr(second) == repr(first)
    assert empty["pool_token"] == empty["tree"] == []
    assert not parts(path)


@pytest.mark.parametrize("count", [0, 1, 3, 7, 9])
def test_parts_are_joined_in_order(tmp_path, small_parts, count):
    path = tmp_path / "rounds.parquet"
    recorder = Recorder(path, {})
    for position in range(count):
        recorder.add(replace(ROUND, position=position))
        assert len(parts(path)) == (position + 1) // 3
    recorder.close()
    assert positions(path) == list(range(count))
    assert [each.name for each in tmp_path.iterdir()] == ["rounds.parquet"]


def test_an_unclosed_file_keeps_its_finished_parts(tmp_path, small_parts):
    path = tmp_path / "rounds.parquet"
    recorder = Recorder(path, {"model": "target"})
    for position in range(8):
        recorder.add(replace(ROUND, position=position))
    assert positions(path) == list(range(6))
    assert read(path).settings == {"model": "target"}


def test_recording_goes_on_after_close(tmp_path, small_parts):
    path = tmp_path / "rounds.parquet"
    recorder = Recorder(path, {"model": "target"})
    for position in range(10):
        recorder.add(replace(ROUND, position=position))
        if position in (1, 2, 5):
            recorder.close()
            recorder.close()
            assert positions(path) == list(range(position + 1))
    assert positions(path) == list(range(9))
    recorder.close()
    assert positions(path) == list(range(10))
    assert read(path).settings == {"model": "target"}


def test_a_new_recorder_replaces_file_and_parts(tmp_path, small_parts):
    path = tmp_path / "rounds.parquet"
    for last in (5, 4):
        recorder = Recorder(path, {"last": last})
        for position in range(last):
            recorder.add(replace(ROUND, position=position))
        if last == 5:
            recorder.close()
            for position in range(4):
                recorder.add(replace(ROUND, position=position))
    recorder.close()
    assert positions(path) == [0, 1, 2, 3]
    assert read(path).settings == {"last": 4}


def test_what_is_no_recording_is_refused_by_name(tmp_path):
    (tmp_path / "text").write_text("text")
    pq.write_table(pa.table({"request": ["a"]}), tmp_path / "table")
    for name, message in (("absent", "no recording at"), ("text", "is no recording"), ("table", "is no recording")):
        with pytest.raises(ValueError, match=message) as caught:
            read(tmp_path / name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_folder_named_like_a_partition_adds_no_column(tmp_path):
    path = tmp_path / "temperature=1" / "rounds.parquet"
    recorder = Recorder(path, {})
    recorder.add(ROUND)
    recorder.close()
    assert rounds_of(path)[0]["temperature"] == 0.5


def test_parts_that_were_joined_but_not_removed_count_once(tmp_path, small_parts):
    path = tmp_path / "rounds.parquet"
    recorder = Recorder(path, {})
    for position in range(3):
        recorder.add(replace(ROUND, position=position))
    (part,) = parts(path)
    kept = part.read_bytes()
    recorder.close()
    part.write_bytes(kept)
    assert positions(path) == [0, 1, 2]
    for position in range(3, 6):
        recorder.add(replace(ROUND, position=position))
    assert positions(path) == list(range(6))
    recorder.close()
    assert positions(path) == list(range(6))
