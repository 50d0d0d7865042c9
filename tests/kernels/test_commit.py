# SPDX-License-Identifier: Apache-2.0
"""commit: keys and values of accepted paths, in every layout that the attention back ends use."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_targetrows.triton_kernels import commit as op

LAYOUTS = ("packed HND", "packed NHD", "apart NHD", "apart HND", "keys and values stacked")


def layers_of(
    layout: str, layers: int, blocks: int, size: int, heads: int, head: int, dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Random bytes, and views ``[blocks, block_size, heads, head size]`` of keys and values on them."""
    shapes = {
        "packed HND": (layers, blocks, heads, size, 2 * head),
        "packed NHD": (layers, blocks, size, heads, 2 * head),
        "apart NHD": (2, layers, blocks, size, heads, head),
        "apart HND": (2, layers, blocks, heads, size, head),
        "keys and values stacked": (layers, blocks, 2, size, heads, head),
    }
    count = torch.Size(shapes[layout]).numel() * dtype.itemsize
    memory = torch.randint(1, 120, (count,), dtype=torch.uint8).view(dtype).view(shapes[layout])
    if layout.startswith("packed"):
        logical = memory if layout == "packed NHD" else memory.transpose(2, 3)
        return memory, [t[..., :head] for t in logical], [t[..., head:] for t in logical]
    if layout == "keys and values stacked":
        return memory, [t[:, 0] for t in memory], [t[:, 1] for t in memory]
    logical = memory if layout == "apart NHD" else memory.transpose(3, 4)
    return memory, list(logical[0]), list(logical[1])


def moves(plan: list[list[tuple[int, int]]], levels: int, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, ...]:
    """Sources, destinations and lengths; behind a length stand slots that no cache has."""
    source = torch.full((len(plan), levels), 2**30, dtype=dtype)
    destination = torch.full((len(plan), levels), -(2**30), dtype=dtype)
    for r, pairs in enumerate(plan):
        for i, (a, b) in enumerate(pairs):
            source[r, i], destination[r, i] = a, b
    return source, destination, torch.tensor([len(pairs) for pairs in plan], dtype=dtype)


def check(
    layout: str,
    head: int,
    dtype: torch.dtype,
    size: int,
    plan: list[list[tuple[int, int]]],
    levels: int,
    layers: int = 2,
) -> None:
    slots = 1 + max((s for pairs in plan for pair in pairs for s in pair), default=0)
    blocks = -(-slots // size)
    memory, keys, values = layers_of(layout, layers, blocks, size, 2, head, dtype)
    before = memory.clone()
    arguments = moves(plan, levels)
    op.commit(op.caches(keys, values), *arguments)
    got = memory.clone()
    memory.copy_(before)
    op.commit_reference(keys, values, *arguments)
    assert torch.equal(got.view(torch.uint8), memory.view(torch.uint8))
    changes = any(a != b for pairs in plan for a, b in pairs)
    assert changes == (not torch.equal(memory.view(torch.uint8), before.view(torch.uint8)))


DOWN = [[(41, 41), (43, 42), (47, 43)], [], [(5, 4)]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("head", "dtype"),
    [(64, torch.bfloat16), (80, torch.float16), (96, torch.uint8), (5, torch.float16), (3, torch.uint8)],
)
def test_layouts_and_types(layout: str, head: int, dtype: torch.dtype) -> None:
    check(layout, head, dtype, 16, DOWN, 4)


@pytest.mark.parametrize("size", [1, 12, 16, 784])
def test_block_sizes(size: int) -> None:
    check("packed HND", 8, torch.float32, size, DOWN, 3)


def test_keys_and_values_of_different_size() -> None:
    _, keys, _ = layers_of("apart NHD", 3, 4, 16, 2, 24, torch.bfloat16)
    _, _, values = layers_of("apart HND", 3, 4, 16, 2, 40, torch.bfloat16)
    expected = [t.clone() for t in keys], [t.clone() for t in values]
    arguments = moves(DOWN, 3, torch.int32)
    op.commit_reference(*expected, *arguments)
    op.commit(op.caches(keys, values), *arguments)
    for mine, theirs in zip((*keys, *values), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(mine, theirs)


def accepted(nodes: int, seed: int) -> list[int]:
    """A root path of a random tree in preorder: node of each level."""
    rng = random.Random(seed)
    path: list[int] = []
    for _ in range(rng.randrange(nodes + 1)):
        node = (path[-1] if path else -1) + 1 + (rng.randrange(4) if rng.random() < 0.7 else 0)
        if node >= nodes:
            break
        path.append(node)
    return path


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(0, 999), st.integers(1, 3), st.sampled_from(LAYOUTS))
def test_paths_of_trees_move_down(nodes: int, seed: int, requests: int, layout: str) -> None:
    """The engine's moves: from the node's own slot to the slot of its level, each request in its own region."""
    plan = []
    for r in range(requests):
        root = r * (nodes + 1)
        path = accepted(nodes, seed + r)
        pairs = [(root + 1 + node, root + 1 + level) for level, node in enumerate(path)]
        assert all(a >= b for a, b in pairs) and pairs == sorted(pairs)
        plan.append(pairs)
    check(layout, 8, torch.bfloat16, 16, plan, max(nodes, 1), layers=1)


@settings(max_examples=15)
@given(st.permutations(range(12)), st.integers(0, 12))
def test_any_overlap_inside_a_request(order: list[int], count: int) -> None:
    check("packed NHD", 6, torch.float16, 5, [list(zip(order, range(12), strict=True))[:count]], 12, layers=1)


def test_moves_up_need_reading_first() -> None:
    """What the read-all-then-write order is for: one slot after the other gives another result."""
    shift = [[(i, i + 1) for i in range(6)]]
    check("packed NHD", 4, torch.float16, 4, shift, 6)
    memory, keys, values = layers_of("packed NHD", 1, 2, 4, 2, 4, torch.float16)
    right, wrong = memory.clone(), memory.clone()
    op.commit(op.caches(keys, values), *moves(shift, 6))
    op.commit_reference([right[0][..., :4]], [right[0][..., 4:]], *moves(shift, 6))
    for pair in shift[0]:
        op.commit_reference([wrong[0][..., :4]], [wrong[0][..., 4:]], *moves([[pair]], 1))
    assert torch.equal(memory, right) and not torch.equal(memory, wrong)


def test_many_levels() -> None:
    """1,024 levels, all moved by one: a tile of few words holds them."""
    check("apart HND", 16, torch.float16, 64, [[(i + 1, i) for i in range(1024)], [(2000, 1999)]], 1024, layers=1)


def test_nothing_to_move() -> None:
    check("packed HND", 8, torch.float16, 4, [[], []], 3)
    check("packed HND", 8, torch.float16, 4, [[], []], 0)
    check("packed HND", 8, torch.float16, 4, [[(3, 3), (6, 6)]], 2)


@pytest.mark.parametrize("fault", ["page", "slot", "length", "layer"])
def test_a_fault_is_caught(fault: str) -> None:
    memory, keys, values = layers_of("packed HND", 2, 4, 16, 2, 8, torch.bfloat16)
    expected = memory.clone()
    source, destination, lengths = moves(DOWN, 3)
    logical = expected.transpose(2, 3)
    op.commit_reference([t[..., :8] for t in logical], [t[..., 8:] for t in logical], source, destination, lengths)
    caches = op.caches(keys, values)
    if fault == "page":
        source[0, 1] += 16
    elif fault == "slot":
        destination[0, 2] += 1
    elif fault == "length":
        lengths[0] -= 1
    else:
        caches.address[1] = caches.address[0]
    op.commit(caches, source, destination, lengths)
    assert not torch.equal(memory, expected)


def test_checks() -> None:
    _, keys, values = layers_of("packed HND", 2, 4, 16, 2, 8, torch.bfloat16)
    with pytest.raises(ValueError, match="2 layouts"):
        op.caches([keys[0], keys[1][:2]], values)
    with pytest.raises(ValueError, match="last stride 1"):
        op.caches([t.transpose(2, 3) for t in keys], values)
    with pytest.raises(ValueError, match="differ"):
        op.caches(keys, values[:1])
    with pytest.raises(ValueError, match="2000 levels"):
        op.commit(op.caches(keys, values), *moves([[]], 2000))
    with pytest.raises(ValueError, match="unit last stride"):
        source, destination, lengths = moves(DOWN, 3)
        op.commit(op.caches(keys, values), source.T.contiguous().T, destination, lengths)
