# SPDX-License-Identifier: Apache-2.0
"""tree_mask: depth, positions and ancestor bits against loops, on trees of every form and size."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_targetrows.triton_kernels.tree_mask import launches, tree_mask, tree_mask_reference, words

FORMS = ("chain", "star", "binary", "comb", "random")
POISON = -7


def parents_of(form: str, size: int, seed: int) -> list[int]:
    """Parents of one tree; ``random`` is in parents-first order but not in preorder."""
    rng = random.Random(seed)
    makers = {
        "chain": lambda i: i - 1,
        "star": lambda i: -1,
        "binary": lambda i: (i + 1) // 2 - 1,
        "comb": lambda i: i - 1 if i % 2 else max(i - 2, -1),
        "random": lambda i: rng.randrange(-1, i) if i else -1,
    }
    return [makers[form](i) for i in range(size)]


def batch(trees: list[list[int]], nodes: int, dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded parents, poison behind the trees, and sizes."""
    parents = torch.full((len(trees), nodes), POISON, dtype=dtype)
    for r, tree in enumerate(trees):
        parents[r, : len(tree)] = torch.tensor(tree, dtype=dtype)
    return parents, torch.tensor([len(tree) for tree in trees], dtype=torch.int32)


def run_poisoned(
    parents: torch.Tensor, sizes: torch.Tensor, root_position: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The op's launches on outputs that hold poison before."""
    requests, nodes = parents.shape
    depth = torch.full((requests, nodes), POISON, dtype=torch.int32)
    bits = torch.full((requests, nodes + 1, words(nodes)), POISON, dtype=torch.int64)
    positions = None if root_position is None else torch.full((requests, nodes), POISON, dtype=root_position.dtype)
    for launch in launches(parents, sizes, root_position, depth, positions, bits):
        launch.run()
    return depth, positions, bits


def check(parents: torch.Tensor, sizes: torch.Tensor, root_position: torch.Tensor | None = None) -> None:
    got = run_poisoned(parents, sizes, root_position)
    expected = tree_mask_reference(parents, sizes, root_position)
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 62, 63, 64, 128])
def test_forms_and_sizes_around_word_ends(form: str, size: int) -> None:
    check(*batch([parents_of(form, size, 1), [], parents_of(form, size // 2, 2)], size))


@pytest.mark.parametrize("form", ["star", "random"])
def test_a_thousand_nodes(form: str) -> None:
    check(*batch([parents_of(form, 1024, 3)], 1024), torch.tensor([70_000]))


def test_a_long_chain() -> None:
    check(*batch([parents_of("chain", 140, 0)], 140))


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.sampled_from(FORMS), st.integers(0, 70), st.integers(0, 99)), min_size=1, max_size=5),
    st.integers(0, 40),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_any_batch(trees: list[tuple[str, int, int]], padding: int, dtype: torch.dtype) -> None:
    nodes = max(size for _, size, _ in trees) + padding
    parents, sizes = batch([parents_of(*tree) for tree in trees], nodes, dtype)
    check(parents, sizes.to(dtype), torch.arange(5, 5 + len(trees), dtype=dtype) * 1000)


def test_the_op_allocates_and_checks() -> None:
    parents, sizes = batch([parents_of("random", 20, 4)], 24)
    depth, positions, bits = tree_mask(parents, sizes)
    expected = tree_mask_reference(parents, sizes)
    assert positions is None and torch.equal(depth, expected[0]) and torch.equal(bits, expected[2])
    with pytest.raises(ValueError, match="sizes"):
        tree_mask(parents, sizes.repeat(2))
    with pytest.raises(ValueError, match="parents"):
        tree_mask(parents.float(), sizes)


def test_rows_of_parents_may_be_apart() -> None:
    parents, sizes = batch([parents_of("random", 20, s) for s in range(3)], 50)
    check(parents[:, :20], sizes)


def test_parents_that_point_forward_end() -> None:
    """Not a tree: the walk still ends, since such a parent counts as the root."""
    depth, _, _ = run_poisoned(torch.tensor([[1, 0, 2, 2]]), torch.tensor([4]), None)
    assert depth.tolist() == [[1, 2, 1, 2]]


def test_a_wrong_parent_is_caught() -> None:
    """The comparison sees one node hung one place wrong, in both depth and bits."""
    tree = parents_of("binary", 40, 0)
    parents, sizes = batch([tree], 40)
    depth, _, bits = run_poisoned(parents, sizes, None)
    parents[0, 39] = int(parents[0, 39]) - 1
    expected_depth, _, expected_bits = tree_mask_reference(parents, sizes)
    assert (bits != expected_bits).any(-1).nonzero().tolist() == [[0, 40]]
    assert torch.equal(depth[:, :39], expected_depth[:, :39])
