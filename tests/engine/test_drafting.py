# SPDX-License-Identifier: Apache-2.0
"""What the drafter reads and where its paths lie, against plain lists of one request at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_targetrows.engine.host_steps import HostSteps
from vllm_targetrows.engine.steps import StepRows, TorchSteps

BLOCK = 4
BOTH = pytest.mark.parametrize("steps", [HostSteps(), TorchSteps()], ids=["host", "torch"])


@BOTH
@settings(max_examples=200)
@given(data=st.data())
def test_committed(steps: TorchSteps, data: st.DataObject) -> None:
    """Each request is a text with a root pass before it or not, a step's own tokens, a tree and a path through it."""
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    requests, levels = number(1, 4), 3
    step: dict[str, list] = {name: [] for name in ("begin", "before", "computed", "room", "carry", "prompt_token")}
    paths, lengths, emitted, input_ids, expected = [], [], [], [], []
    table = np.random.default_rng(0).permutation(requests * 16).reshape(requests, 16).astype(np.int32)
    for r in range(requests):
        before, nodes, computed, complete = number(1, 4), number(0, 5), number(1, 30), number(0, 1) == 1
        nodes = nodes if complete else 0
        carry, room = number(0, 1) == 1, number(0, min(levels, nodes))
        length = number(0, room)
        path = sorted(data.draw(st.permutations(range(nodes)))[:length])
        begin = len(input_ids)
        text = [100 * r + i for i in range(before)]  # the step's own tokens
        tree = [100 * r + 50 + node for node in range(nodes)]
        prompt_token = -1 if complete else 100 * r + 80
        input_ids += text + tree
        tokens = [tree[node] for node in path] + [100 * r + 90]  # accepted ones and the continuation
        follow = [*text, *(tokens if complete else [prompt_token])]
        place = [*range(begin, begin + before), *(begin + before + node for node in path)]
        read = [(row, token, computed + i) for i, (row, token) in enumerate(zip(place, follow[1:], strict=True))]
        if carry:
            read.insert(0, (begin, follow[0], computed - 1))
        expected.append(
            [
                (row, token, p, table[r, p // BLOCK] * BLOCK + p % BLOCK, computed + before + room)
                for row, token, p in read
            ]
        )
        paths.append(path + [-1] * (levels - length))
        lengths.append(length)
        emitted.append(tokens + [-1] * (levels + 2 - len(tokens)))
        for name, value in zip(step, (begin, before, computed, room, carry, prompt_token), strict=True):
            step[name].append(value)
    found = steps.committed(
        StepRows(
            **{name: np.array(value, dtype=bool if name == "carry" else np.int64) for name, value in step.items()}
        ),
        torch.tensor(paths),
        torch.tensor(lengths),
        torch.tensor(emitted),
        torch.tensor(input_ids, dtype=torch.int32),
        torch.from_numpy(table),
        BLOCK,
    )
    entries = list(zip(*(part.tolist() for part in found[:4]), strict=True))
    assert len(entries) == found.counts.sum()
    start = 0
    for r, (count, last) in enumerate(zip(found.counts.tolist(), found.last.tolist(), strict=True)):
        assert entries[start : last + 1] == [entry[:4] for entry in expected[r]]
        # What follows stays inside the request's own positions, and an attention kernel sees all of it.
        for behind, entry in enumerate(entries[last + 1 : start + count], 1):
            assert entry[2] == entries[last][2] + behind < expected[r][0][4]
            assert entry[3] == table[r, entry[2] // BLOCK] * BLOCK + entry[2] % BLOCK
            assert 0 <= entry[0] < len(input_ids) and entry[1] >= 0
        start += count
        assert found.end[r] == entries[start - 1][2] + 1


@BOTH
@settings(max_examples=200)
@given(
    last=st.lists(st.integers(0, 27), min_size=1, max_size=4),
    more=st.integers(0, 3),
    k=st.integers(1, 4),
    depth=st.integers(1, 9),
    blocks=st.integers(7, 9),
)
def test_paths(steps: TorchSteps, last: list[int], more: int, k: int, depth: int, blocks: int) -> None:
    entries = max(depth - 1, 1)
    tail = (BLOCK - 1 + entries - 1) // BLOCK + 1
    own = np.arange(1, len(last) * blocks + 1, dtype=np.int32).reshape(len(last), blocks)
    scratch = 1000 + np.arange(len(last) * k * tail).reshape(len(last), k, tail)
    position = np.array(last)
    layout = steps.paths(torch.from_numpy(position), position + more, torch.from_numpy(own), BLOCK, scratch, depth)
    assert (layout.table.dtype, layout.lengths.dtype) == (torch.int32, torch.int32)
    for r, p in enumerate(last):
        for j in range(k):
            row, start = r * k + j, p + 1
            kept = start // BLOCK  # blocks of the context that are full
            assert layout.table[row, :kept].tolist() == own[r, :kept].tolist()
            assert layout.table[row, kept : kept + tail].tolist() == scratch[r, j].tolist()
            if start % BLOCK:  # what is in the partly filled block is copied
                assert layout.context[row] == own[r, kept]
            for entry in range(entries):
                at = start + entry
                assert (layout.positions[entry, row], layout.lengths[entry, row]) == (at, at + 1)
                assert layout.slots[entry, row] == layout.table[row, at // BLOCK] * BLOCK + at % BLOCK
    for entry in range(entries):
        exact = max(p + 2 + entry for p in last), max((p + 1 + entry) // BLOCK - (p + 1) // BLOCK for p in last)
        found = layout.longest[entry], layout.last_block[entry]
        if isinstance(steps, HostSteps):
            assert found == exact
        else:
            assert exact[0] <= found[0] <= exact[0] + more and exact[1] <= found[1] < tail
