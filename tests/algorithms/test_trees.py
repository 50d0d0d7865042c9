# SPDX-License-Identifier: Apache-2.0
"""Ancestors, preorder and truncation against recursive references."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_targetrows.trees import Tree, ancestor_mask, deepest, depth_first_preorder, truncate


@st.composite
def forests(draw, most=24):
    """Parents (parents first, any order of siblings) and depths of one request."""
    parents = []
    for node in range(draw(st.integers(0, most))):
        parents.append(draw(st.integers(-1, node - 1)))
    return parents


def depths(parents):
    result = []
    for parent in parents:
        result.append(1 if parent < 0 else result[parent] + 1)
    return result


def preorder(parents, root=-1):
    """Nodes in depth-first preorder, siblings in their incoming order."""
    order = []
    for node, parent in enumerate(parents):
        if parent == root:
            order += [node, *preorder(parents, node)]
    return order


def padded(rows, columns, fill):
    return torch.tensor([row + [fill] * (columns - len(row)) for row in rows], dtype=torch.int64).view(
        len(rows), columns
    )


@given(st.lists(forests(), min_size=1, max_size=4), st.integers(0, 3))
def test_batched_preorder_is_the_recursive_one_with_padding_last(batch, spare):
    columns = max(map(len, batch)) + spare
    place = depth_first_preorder(padded(batch, columns, -1), padded([depths(p) for p in batch], columns, 0))
    for row, parents in zip(place.tolist(), batch, strict=True):
        expected = preorder(parents) + list(range(len(parents), columns))
        assert [row[node] for node in expected] == list(range(columns))


@given(st.lists(forests(), min_size=1, max_size=4), st.integers(0, 3))
def test_ancestor_mask_holds_each_node_and_its_ancestors(batch, spare):
    columns = max(map(len, batch)) + spare
    mask = ancestor_mask(padded(batch, columns, -1), padded([depths(p) for p in batch], columns, 0))
    for matrix, parents in zip(mask, batch, strict=True):
        for node in range(columns):
            expected, up = {node}, node
            while up < len(parents) and parents[up] >= 0:
                up = parents[up]
                expected.add(up)
            assert set(matrix[node].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 9, 255])
def test_chains_of_any_depth(nodes):
    parents = torch.arange(-1, nodes - 1)[None]
    depth = parents + 2
    assert deepest(depth) == nodes
    assert torch.equal(ancestor_mask(parents, depth)[0], torch.ones(nodes, nodes, dtype=torch.bool).tril())
    assert torch.equal(depth_first_preorder(parents, depth)[0], torch.arange(nodes))


def test_empty_trees():
    tree = Tree.empty(3, "cpu")
    assert tree.tokens.shape == tree.parents.shape == tree.depth.shape == (3, 0)
    assert tree.size.tolist() == [0, 0, 0]
    assert deepest(tree.depth) == 0
    assert ancestor_mask(tree.parents, tree.depth).shape == (3, 0, 0)
    assert depth_first_preorder(tree.parents, tree.depth).shape == (3, 0)
    assert truncate(tree, torch.tensor([4, 0, 1])).size.tolist() == [0, 0, 0]


def test_truncation_keeps_a_prefix_of_every_tree(random_tree, stack_trees):
    tree = stack_trees([random_tree(seed, size, 6, columns=10) for seed, size in enumerate((10, 7, 3, 0))])
    cut = truncate(tree, torch.tensor([4, 9, 0, 2]))
    assert cut.size.tolist() == [4, 7, 0, 0]
    for r, size in enumerate(cut.size.tolist()):
        for name, fill in (("tokens", -1), ("parents", -1), ("depth", 0)):
            kept, before = getattr(cut, name)[r], getattr(tree, name)[r]
            assert torch.equal(kept[:size], before[:size])
            assert (kept[size:] == fill).all()


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, vllm_targetrows; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
