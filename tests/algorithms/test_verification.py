# SPDX-License-Identifier: Apache-2.0
"""The exit law against the traversal, enumerated exactly in float64, and every draw at its edges."""

from __future__ import annotations

import math
import random

import pytest
import torch
from scipy.stats import chisquare

from vllm_targetrows.trees import Tree
from vllm_targetrows.verification import (
    accepted_path,
    draw_exit,
    draw_token,
    edge_masses,
    edge_masses_greedy,
    exhaustive_traversal,
    exit_law,
    expected_length,
    path_products,
    residual_row,
)

LARGEST = math.nextafter(1.0, 0.0)


def random_rows(seed, rows, vocabulary, sparse=False):
    """Float64 distributions; ``sparse`` zeroes many entries, as top-p does."""
    generator = torch.Generator().manual_seed(seed)
    mass = torch.rand(rows, vocabulary, generator=generator, dtype=torch.float64)
    if sparse:
        mass = mass * (torch.rand(mass.shape, generator=generator) < 0.4)
        mass[:, 0] += mass.sum(dim=1) == 0
    return mass / mass.sum(dim=1, keepdim=True)


def traversal_law(rows, tree):
    """Joint law of (accepted nodes, continuation) by following the walk through every draw."""
    size = int(tree.size[0])
    children = {}
    for node, (token, parent) in enumerate(
        zip(tree.tokens[0, :size].tolist(), tree.parents[0, :size].tolist(), strict=True)
    ):
        children.setdefault(parent, {})[token] = node
    law, walks = {}, [((), 1.0)]
    for path, mass in walks:
        here = path[-1] if path else -1
        for token, p in enumerate(rows[here + 1].tolist()):
            if p and token in children.get(here, {}):
                walks.append(((*path, children[here][token]), mass * p))
            elif p:
                law[path, token] = mass * p
    return law


def batch_of(random_tree, stack_trees, sizes, vocabulary, sparse=False, spare=0):
    """Trees of ``sizes`` in one batch with rows in shuffled places; padding of ``row_of`` points anywhere."""
    columns = max(sizes) + spare
    tree = stack_trees([random_tree(seed, size, vocabulary, columns) for seed, size in enumerate(sizes)])
    total = sum(sizes) + len(sizes)
    rows = random_rows(len(sizes), total, vocabulary, sparse)
    rng = random.Random(columns)
    free = list(range(total))
    rng.shuffle(free)
    row_of = torch.tensor([[rng.randrange(total) for _ in range(columns + 1)] for _ in sizes])
    for r, size in enumerate(sizes):
        row_of[r, : size + 1] = torch.tensor([free.pop() for _ in range(size + 1)])
    return tree, rows, row_of


def one(tree, r):
    return Tree(*(getattr(tree, name)[r : r + 1] for name in ("tokens", "parents", "depth", "size")))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("spare", [0, 3])
def test_exit_law_gives_the_traversals_joint_law_of_path_and_continuation(random_tree, stack_trees, sparse, spare):
    sizes = (0, 1, 2, 7, 12, 20, 20, 33)
    tree, rows, row_of = batch_of(random_tree, stack_trees, sizes, 6, sparse, spare)
    law = exit_law(*edge_masses(rows, tree, row_of), tree)
    assert torch.allclose(law.sum(dim=1), torch.ones(len(sizes), dtype=torch.float64), rtol=0, atol=1e-12)
    for r, size in enumerate(sizes):
        assert (law[r, size + 1 :] == 0).all()
        expected = traversal_law(rows[row_of[r, : size + 1]], one(tree, r))
        found = {}
        for exit_node in range(size + 1):
            here = torch.full((len(sizes),), 0)
            here[r] = exit_node
            path, length = accepted_path(tree, here)
            residual = residual_row(rows, tree, here, row_of)[r]
            for token in residual.nonzero().flatten().tolist():
                key = (tuple(path[r, : length[r]].tolist()), token)
                found[key] = float(law[r, exit_node] * residual[token] / residual.sum())
        found = {key: p for key, p in found.items() if p}
        assert found.keys() == expected.keys()
        for key, p in expected.items():
            assert found[key] == pytest.approx(p, rel=1e-12)


def test_traversal_draws_follow_the_enumerated_law(random_tree):
    """The reference itself: what it returns for many uniforms against its own law."""
    tree = random_tree(5, 9, 4)
    rows = random_rows(5, 10, 4)
    law = traversal_law(rows, tree)
    count = dict.fromkeys(law, 0)
    rng = random.Random(7)
    draws = 4000
    for _ in range(draws):
        path, token = exhaustive_traversal(rows, tree, [rng.random() for _ in range(10)])
        count[tuple(path), token] += 1
    assert chisquare(list(count.values()), [draws * p for p in law.values()]).pvalue > 1e-3


def test_traversal_without_uniforms_left_is_an_error(one_tree):
    with pytest.raises(ValueError, match="more than 1 uniforms"):
        exhaustive_traversal(torch.eye(3).double()[[1, 2]], one_tree([-1], [1]), [0.5])


def test_expected_accepted_tokens_are_the_path_products(random_tree, stack_trees):
    tree, rows, row_of = batch_of(random_tree, stack_trees, (6, 14), 5)
    child_p, residual = edge_masses(rows, tree, row_of)
    law = exit_law(child_p, residual, tree)
    products = path_products(child_p, tree.parents, tree.depth)
    depth = torch.cat((torch.zeros(2, 1), tree.depth), dim=1)
    assert torch.allclose((law * depth).sum(dim=1), products[:, 1:].sum(dim=1), rtol=1e-12)
    assert products[:, 0].tolist() == [1, 1]


@pytest.mark.parametrize("levels", [None, 7, 8, 20])
def test_expected_length_is_the_exit_laws_mean(random_tree, stack_trees, levels):
    tree, rows, row_of = batch_of(random_tree, stack_trees, [0, 1, 7, 12], 5, spare=2)
    deepest = max(int(tree.depth.max()), levels or 0)
    law = exit_law(*edge_masses(rows, tree, row_of), tree)
    depth = torch.cat((torch.zeros_like(tree.size)[:, None], tree.depth), dim=1)
    expected = (law * depth).sum(dim=1)
    torch.testing.assert_close(expected_length(rows, tree, row_of, deepest), expected, rtol=1e-12, atol=0)
    none = Tree.empty(2)
    assert expected_length(rows, none, row_of[:2, :1], 0).tolist() == [0, 0]


def test_batched_equals_one_at_a_time(random_tree, stack_trees):
    sizes = (20, 3, 0, 11)
    tree, rows, row_of = batch_of(random_tree, stack_trees, sizes, 7, spare=2)
    law = exit_law(*edge_masses(rows, tree, row_of), tree)
    uniform = torch.rand(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    node = draw_exit(law, uniform)
    path, length = accepted_path(tree, node)
    residual = residual_row(rows, tree, node, row_of)
    token = draw_token(residual, uniform)
    for r in range(4):
        alone, row = one(tree, r), row_of[r : r + 1]
        assert torch.equal(exit_law(*edge_masses(rows, alone, row), alone), law[r : r + 1])
        assert torch.equal(draw_exit(law[r : r + 1], uniform[r : r + 1]), node[r : r + 1])
        path_alone, length_alone = accepted_path(alone, node[r : r + 1])
        assert torch.equal(length_alone, length[r : r + 1])
        assert path_alone[0].tolist() == path[r, : path_alone.shape[1]].tolist()
        assert torch.equal(residual_row(rows, alone, node[r : r + 1], row), residual[r : r + 1])
        assert torch.equal(draw_token(residual[r : r + 1], uniform[r : r + 1]), token[r : r + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_left_as_they_were(random_tree, stack_trees, dtype):
    tree, rows, row_of = batch_of(random_tree, stack_trees, (5, 12, 0), 6, spare=4)
    rows = rows.to(dtype)
    before = rows.clone()
    edge_masses(rows, tree, row_of)
    residual_row(rows, tree, torch.tensor([2, 0, 0]), row_of)
    assert torch.equal(rows, before)


def test_a_small_residual_is_summed_not_subtracted(one_tree):
    tiny = 1e-30
    rows = torch.tensor([[1 - 1e-16, tiny, 0, 0], [0, 0, 1, 0]], dtype=torch.float64)
    tree = one_tree([-1], [0])
    _, residual = edge_masses(rows, tree, torch.tensor([[0, 1]]))
    assert residual.tolist() == [[tiny, 1.0]]


def test_all_mass_on_the_children_never_exits_there(one_tree):
    rows = torch.tensor([[0.5, 0.5, 0], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]], dtype=torch.float64)
    tree = one_tree([-1, -1], [0, 1])
    law = exit_law(*edge_masses(rows, tree, torch.tensor([[0, 1, 2]])), tree)
    assert law[0, 0] == 0
    for uniform in (0.0, 5e-324, 0.5, LARGEST):
        assert int(draw_exit(law, torch.tensor([uniform], dtype=torch.float64))) > 0


@pytest.mark.parametrize("uniform", [0.0, 5e-324, 0.25, 0.5, LARGEST])
@pytest.mark.parametrize(
    "mass",
    [
        [0, 0, 1, 0],
        [0, 1e-300, 0, 3e-300, 0],
        [0, 5e-324, 0],
        [0, 1 / 3, 0, 1 / 3, 1 / 3, 0],
        [0, 1.0, 1e-30, 0],  # the sum does not see the second one
        [0.1] * 10 + [0],
        [0, 7.0, 0],
    ],
)
def test_no_mass_is_never_drawn(mass, uniform):
    row = torch.tensor([mass], dtype=torch.float64)
    for draw in (draw_token, draw_exit):
        assert row[0, int(draw(row, torch.tensor([uniform], dtype=torch.float64)))] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_invert_the_distribution_function(dtype):
    mass = torch.tensor([[0.25, 0.0, 0.5, 1.25]] * 6, dtype=dtype)  # not normalised: sums to 2
    uniform = torch.tensor([0.0, 0.1249, 0.125, 0.3749, 0.375, LARGEST], dtype=torch.float64)
    assert draw_token(mass, uniform).tolist() == [0, 0, 2, 2, 3, 3]


def test_float32_rows_are_drawn_from_in_float64():
    mass = torch.full((1, 5), 2.0**-30)
    mass[0, 0] = 1.0  # a float32 sum would not grow any more
    total = 1 + 2.0**-28
    for token in range(1, 5):
        uniform = (1 + (token - 0.5) * 2.0**-30) / total
        assert int(draw_token(mass, torch.tensor([uniform], dtype=torch.float64))) == token


@pytest.mark.parametrize("zero_first", [False, True])
def test_no_mass_is_never_drawn_from_a_scan_that_is_not_monotone(monkeypatch, zero_first):
    """A parallel scan may differ by one unit in the last place from entry to entry, also where there is no mass."""
    exact = torch.Tensor.cumsum

    def parallel(self, *args, **kwargs):
        cumulative = exact(self, *args, **kwargs)
        return torch.where(self == 0, cumulative.nextafter(torch.full_like(cumulative, 9.0)), cumulative)

    monkeypatch.setattr(torch.Tensor, "cumsum", parallel)
    mass = torch.tensor([[0.0, 0.5, 0.5] if zero_first else [0.5, 0.5, 0.0]], dtype=torch.float64)
    for uniform in (0.0, LARGEST):
        assert mass[0, int(draw_token(mass, torch.tensor([uniform], dtype=torch.float64)))] > 0
    middle = torch.tensor([[0.5, 0.0, 0.5]], dtype=torch.float64)
    assert int(draw_token(middle, torch.tensor([0.5], dtype=torch.float64))) == 2


@pytest.mark.parametrize("size", [1, 2, 17, 255])
def test_accepted_path_walks_up_to_the_root(random_tree, stack_trees, size):
    tree = stack_trees([random_tree(seed, size, 300, size + 2) for seed in range(3)])
    for node in range(size):
        path, length = accepted_path(tree, torch.full((3,), node + 1))
        assert path.shape[1] == int(tree.depth.max())
        for r in range(3):
            expected, up = [], node
            while up >= 0:
                expected.insert(0, up)
                up = int(tree.parents[r, up])
            assert path[r].tolist() == expected + [-1] * (path.shape[1] - len(expected))
            assert int(length[r]) == len(expected)


def test_accepting_nothing(random_tree):
    path, length = accepted_path(random_tree(1, 6, 4), torch.tensor([0]))
    assert (path == -1).all()
    assert length.tolist() == [0]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 9, 255])
def test_path_products_of_chains(nodes):
    child_p = torch.rand(1, nodes, generator=torch.Generator().manual_seed(nodes), dtype=torch.float64)
    parents = torch.arange(-1, nodes - 1)[None]
    products = path_products(child_p, parents, parents + 2)
    assert torch.allclose(products[:, 1:], child_p.cumprod(dim=1), rtol=1e-12)


def test_padding_has_no_mass_whatever_it_says(one_tree):
    tree = one_tree([-1, 0], [1, 2], columns=4)
    law = exit_law(torch.tensor([[0.5, 0.5, 0.7, 0.7]]), torch.tensor([[0.5, 0.5, 1.0, 0.9, 0.9]]), tree)
    assert law.tolist() == [[0.5, 0.25, 0.25, 0, 0]]


def test_empty_trees_leave_the_whole_row():
    rows = random_rows(3, 3, 5)
    tree = Tree.empty(2, "cpu")
    row_of = torch.tensor([[2], [0]])
    for child_p, residual in (edge_masses(rows, tree, row_of), edge_masses_greedy(rows.argmax(dim=1), tree, row_of)):
        assert child_p.shape == (2, 0)
        assert torch.allclose(residual, torch.ones(2, 1, dtype=torch.float64))
        law = exit_law(child_p, residual, tree)
        assert draw_exit(law, torch.tensor([0.0, LARGEST], dtype=torch.float64)).tolist() == [0, 0]
    exit_node = torch.zeros(2, dtype=torch.int64)
    assert torch.equal(residual_row(rows, tree, exit_node, row_of), rows[[2, 0]])
    path, length = accepted_path(tree, exit_node)
    assert path.shape == (2, 0)
    assert length.tolist() == [0, 0]


def test_greedy_rows_are_point_masses(random_tree, stack_trees):
    sizes = (0, 4, 15, 30)
    tree, rows, row_of = batch_of(random_tree, stack_trees, sizes, 4, spare=2)
    argmax = rows.argmax(dim=1)
    points = torch.zeros_like(rows).scatter_(1, argmax[:, None], 1.0)
    sampled, greedy = edge_masses(points, tree, row_of), edge_masses_greedy(argmax, tree, row_of)
    law = exit_law(*greedy, tree)
    assert torch.equal(exit_law(*sampled, tree), law)
    assert torch.equal(sampled[0], greedy[0])
    assert ((law == 0) | (law == 1)).all()
    assert law.sum(dim=1).tolist() == [1] * len(sizes)
    for r, size in enumerate(sizes):
        path, token = exhaustive_traversal(points[row_of[r, : size + 1]], one(tree, r), [0.5] * 40)
        exit_node = int(law[r].argmax())
        assert exit_node == (path[-1] + 1 if path else 0)
        assert int(argmax[row_of[r, exit_node]]) == token


def test_residual_row_takes_out_the_exits_own_children_only(one_tree, stack_trees):
    # 0 -> {1, 2}, root -> {0, 3}; token 0 is padding's clamped token and must stay.
    tree = stack_trees([one_tree([-1, 0, 0, -1], [5, 1, 2, 3], columns=6)] * 3)
    rows = torch.full((5, 6), 1 / 6, dtype=torch.float64)
    row_of = torch.tensor([[0, 1, 2, 3, 4, 0, 0]] * 3)
    kept = residual_row(rows, tree, torch.tensor([0, 1, 2]), row_of) > 0
    assert [row.nonzero().flatten().tolist() for row in kept] == [[0, 1, 2, 4], [0, 3, 4, 5], [0, 1, 2, 3, 4, 5]]


def test_largest_tree(random_tree):
    tree = random_tree(9, 255, 64)
    rows = random_rows(9, 256, 64)
    law = exit_law(*edge_masses(rows, tree, torch.arange(256)[None]), tree)
    assert float(law.sum()) == pytest.approx(1, abs=1e-12)
    expected = traversal_law(rows, tree)
    for node in range(255):
        path, length = accepted_path(tree, torch.tensor([node + 1]))
        key = tuple(path[0, : int(length)].tolist())
        p = math.fsum(p for (nodes, _), p in expected.items() if nodes == key)
        assert float(law[0, node + 1]) == pytest.approx(p, rel=1e-12)
