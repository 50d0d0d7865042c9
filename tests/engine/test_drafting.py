# SPDX-License-Identifier: Apache-2.0
"""What the drafter reads and where its paths lie, against plain lists of one request at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_targetrows.engine.drafting import _path_layout, committed_tokens

BLOCK = 4


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_committed_tokens(data: st.DataObject) -> None:
    """Each request is a text with a root pass before it or not, a step's own tokens, a tree and a path through it."""
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    requests, levels = number(1, 4), 3
    step: dict[str, list] = {name: [] for name in ("begin", "before", "computed", "carry", "path", "length", "emitted")}
    next_token, input_ids, expected, counts = [], [], [], []
    table = np.random.default_rng(0).permutation(requests * 16).reshape(requests, 16).astype(np.int32)
    for r in range(requests):
        before, nodes, computed = number(1, 4), number(0, 5), number(1, 30)
        carry, length = number(0, 1) == 1, number(0, min(levels, nodes))
        path = sorted(data.draw(st.permutations(range(nodes)))[:length])
        begin = len(input_ids)
        text = [100 * r + i for i in range(before)]  # the step's own tokens
        tree = [100 * r + 50 + node for node in range(nodes)]
        after = [100 * r + 90]  # the continuation, or the prompt's next token
        input_ids += text + tree
        follow = [*text, *(tree[node] for node in path), *after]
        place = [*range(begin, begin + before), *(begin + before + node for node in path)]
        read = [(row, token, computed + i) for i, (row, token) in enumerate(zip(place, follow[1:], strict=True))]
        if carry:
            read.insert(0, (begin, follow[0], computed - 1))
        for row, token, position in read:
            expected.append((row, token, position, table[r, position // BLOCK] * BLOCK + position % BLOCK))
        counts.append(len(read))
        tokens = [tree[node] for node in path] + after
        values = {"begin": begin, "before": before, "computed": computed, "carry": carry, "length": length}
        values |= {"path": path + [-1] * (levels - length), "emitted": tokens + [-1] * (levels + 2 - len(tokens))}
        for name, value in values.items():
            step[name].append(value)
        next_token.append(tokens[0])
    arrays = {name: np.array(value, dtype=bool if name == "carry" else np.int64) for name, value in step.items()}
    *parts, found_counts = committed_tokens(
        **arrays,
        next_token=np.array(next_token),
        input_ids=np.array(input_ids, dtype=np.int32),
        block_table=table,
        block_size=BLOCK,
    )
    assert list(zip(*(part.tolist() for part in parts), strict=True)) == expected
    assert found_counts.tolist() == counts


@settings(max_examples=200, deadline=None)
@given(
    last=st.lists(st.integers(0, 27), min_size=1, max_size=4),
    k=st.integers(1, 4),
    depth=st.integers(1, 9),
    blocks=st.integers(7, 9),
)
def test_path_layout(last: list[int], k: int, depth: int, blocks: int) -> None:
    entries = max(depth - 1, 1)
    tail = (BLOCK - 1 + entries - 1) // BLOCK + 1
    own = np.arange(1, len(last) * blocks + 1, dtype=np.int32).reshape(len(last), blocks)
    scratch = 1000 + np.arange(len(last) * k * tail).reshape(len(last), k, tail)
    table, positions, lengths, slots, longest, last_block, context = _path_layout(
        np.array(last), own, BLOCK, scratch, depth
    )
    for r, position in enumerate(last):
        for j in range(k):
            row, start = r * k + j, position + 1
            kept = start // BLOCK  # blocks of the context that are full
            assert table[row, :kept].tolist() == own[r, :kept].tolist()
            assert table[row, kept : kept + tail].tolist() == scratch[r, j].tolist()
            if start % BLOCK:  # what is in the partly filled block is copied
                assert context[row] == own[r, kept]
            for entry in range(entries):
                at = start + entry
                assert (positions[entry, row], lengths[entry, row]) == (at, at + 1)
                assert slots[entry, row] == table[row, at // BLOCK] * BLOCK + at % BLOCK
    for entry in range(entries):
        assert longest[entry] == max(last) + 2 + entry
        assert last_block[entry] == max((p + 1 + entry) // BLOCK - (p + 1) // BLOCK for p in last)
