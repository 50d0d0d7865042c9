# SPDX-License-Identifier: Apache-2.0
"""exit_law: exits, paths and continuations for given uniforms, against loops and against the engine's own law."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_targetrows import verification
from vllm_targetrows.trees import Tree
from vllm_targetrows.triton_kernels import exit_law as op

FORMS = ("chain", "star", "binary", "random")
POISON = -7


def preorder(form: str, size: int, rng: random.Random) -> list[int]:
    """Parents of a tree in depth-first preorder."""
    if form == "chain":
        return [i - 1 for i in range(size)]
    if form == "star":
        return [-1] * size
    path: list[int] = []
    parents: list[int] = []
    children: dict[int, int] = {}
    for node in range(size):
        if form == "binary":  # a full tree of depth 5 has 62 nodes; then it goes on
            while path and (len(path) >= 5 or children.get(path[-1], 0) == 2):
                path.pop()
        else:
            del path[rng.randrange(len(path) + 1) if rng.random() < 0.5 else len(path) :]
        parents.append(path[-1] if path else -1)
        children[parents[-1]] = children.get(parents[-1], 0) + 1
        path.append(node)
    return parents


@dataclass
class Batch:
    """Trees and rows; one row that belongs to nobody holds nan, and so does what padding points at."""

    tree: Tree
    row_of: torch.Tensor
    probs: torch.Tensor
    levels: int


def batch_of(forms: list[tuple[str, int]], vocabulary: int, seed: int, columns: int | None = None) -> Batch:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    widest = max(size for _, size in forms) if columns is None else columns
    requests = len(forms)
    tokens, parents = torch.full((requests, widest), POISON), torch.full((requests, widest), POISON)
    depth = torch.zeros((requests, widest), dtype=torch.int64)
    owners = [(r, v) for r, (_, size) in enumerate(forms) for v in range(size + 1)]
    rng.shuffle(owners)
    row_of = torch.full((requests, widest + 1), len(owners))
    for row, (r, v) in enumerate(owners):
        row_of[r, v] = row
    logits = torch.randn((len(owners) + 1, vocabulary), generator=generator) * 3
    for r, (form, size) in enumerate(forms):
        taken: dict[int, set[int]] = {}
        for b, parent in enumerate(preorder(form, size, rng)):
            free = sorted(set(range(vocabulary)) - taken.setdefault(parent, set()))
            token = rng.choice(free)
            taken[parent].add(token)
            parents[r, b], tokens[r, b] = parent, token
            depth[r, b] = 1 if parent < 0 else depth[r, parent] + 1
            logits[row_of[r, parent + 1], token] += 5  # so that walks go deep
    probs = logits.softmax(dim=1)
    probs[-1] = float("nan")
    tree = Tree(tokens, parents, depth, torch.tensor([size for _, size in forms]))
    return Batch(tree, row_of, probs, max(1, verification.deepest(depth)))


def run(
    batch: Batch,
    uniforms: torch.Tensor | None,
    rows: torch.Tensor | None = None,
    levels: int | None = None,
    block: int = 64,
    fault: bool = False,
    **options: torch.Tensor,
) -> op.Exits:
    """The op's launches on poisoned outputs; ``fault`` spoils one block's mass between them."""
    requests, nodes = batch.tree.tokens.shape
    levels = batch.levels if levels is None else levels
    blocks = 0 if rows is None else -(-rows.shape[1] // block)
    partial = torch.full((requests, nodes + 1, blocks), float("nan"), dtype=torch.float64)
    shapes = ((requests,), (requests, levels), (requests,), (requests,), (requests, levels + 1))
    out = op.Exits(*(torch.full(shape, POISON) for shape in shapes))
    extras = [options.get(name) for name in ("argmax", "greedy", "normaliser", "temperature")]
    tree = batch.tree
    for launch in op.exit_law_launches(
        rows, tree.tokens, tree.parents, tree.size, batch.row_of, uniforms, *extras, partial, out, block
    ):
        launch.run()
        if fault:
            partial[:, 0] *= 3
    return out


def reference(batch: Batch, uniforms: torch.Tensor, probs: torch.Tensor | None = None) -> op.Exits:
    tree = batch.tree
    probs = batch.probs if probs is None else probs
    return op.exit_law_reference(probs, tree.tokens, tree.parents, tree.size, batch.row_of, uniforms, batch.levels)


def assert_same(got: op.Exits, expected: op.Exits) -> None:
    for field in op.Exits._fields:
        mine, theirs = getattr(got, field), getattr(expected, field)
        assert mine.shape == theirs.shape and torch.equal(mine, theirs), field


def law_and_residuals(batch: Batch, r: int, probs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One request's exit law, and each node's row without its children, in float64."""
    tree = batch.tree
    product, left = [1.0], [probs[batch.row_of[r, 0]].double().clone()]
    for b in range(int(tree.size[r])):
        parent, token = int(tree.parents[r, b]) + 1, int(tree.tokens[r, b])
        product.append(product[parent] * float(probs[batch.row_of[r, parent], token]))
        left.append(probs[batch.row_of[r, b + 1]].double().clone())
        left[parent][token] = 0
    return torch.tensor([p * float(x.sum()) for p, x in zip(product, left, strict=True)], dtype=torch.float64), left


def uniform_for(mass: torch.Tensor, index: int) -> float:
    """The middle of the interval that draws ``index``."""
    return float((mass[:index].sum() + mass[index] / 2) / mass.sum())


def aimed(batch: Batch, rng: random.Random, least: float = 1e-7, probs: torch.Tensor | None = None) -> tuple:
    """Uniforms in the middle of the intervals of exits and tokens that have at least ``least`` of the mass."""
    probs = batch.probs if probs is None else probs
    uniforms, exits, tokens = [], [], []
    for r in range(len(batch.tree.size)):
        law, left = law_and_residuals(batch, r, probs)
        exits.append(rng.choice((law / law.sum() > least).nonzero()[:, 0].tolist()))
        residual = left[exits[-1]]
        tokens.append(rng.choice((residual / residual.sum() > least).nonzero()[:, 0].tolist()))
        uniforms.append([uniform_for(law, exits[-1]), uniform_for(residual, tokens[-1])])
    return torch.tensor(uniforms, dtype=torch.float64), torch.tensor(exits), torch.tensor(tokens)


def check_aimed(batch: Batch, seed: int, block: int = 64) -> op.Exits:
    """Every exit and token can be aimed at, and the loops say the same."""
    uniforms, exits, tokens = aimed(batch, random.Random(seed))
    got = run(batch, uniforms, batch.probs, block=block)
    assert torch.equal(got.exit_node, exits) and torch.equal(got.continuation, tokens)
    assert_same(got, reference(batch, uniforms))
    return got


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    batch = batch_of([(form, 20), ("chain", 0), (form, 7)], 150, 1)
    for seed in range(3):
        check_aimed(batch, seed)


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.sampled_from(FORMS), st.integers(0, 12)), min_size=1, max_size=3),
    st.integers(13, 200),
    st.integers(0, 999),
    st.sampled_from([16, 64, 256]),
)
def test_any_batch(forms: list[tuple[str, int]], vocabulary: int, seed: int, block: int) -> None:
    columns = max(size for _, size in forms) + seed % 3
    check_aimed(batch_of(forms, vocabulary, seed, columns), seed, block)


def test_the_engine_s_law_says_the_same() -> None:
    batch = batch_of([("random", 25), ("binary", 14), ("chain", 0)], 120, 5)
    uniforms, _, _ = aimed(batch, random.Random(5))
    # The engine's own form of padding.
    beyond = torch.arange(25) >= batch.tree.size[:, None]
    tree = Tree(
        batch.tree.tokens.masked_fill(beyond, -1), batch.tree.parents.masked_fill(beyond, -1), batch.tree.depth,
        batch.tree.size,
    )  # fmt: skip
    probs = batch.probs[:-1].clone()
    row_of = batch.row_of.clamp(max=len(probs) - 1)
    child_p, residual = verification.edge_masses(probs, tree, row_of)
    exit_node = verification.draw_exit(verification.exit_law(child_p, residual, tree), uniforms[:, 0])
    path, length = verification.accepted_path(tree, exit_node)
    continuation = verification.draw_token(verification.residual_row(probs, tree, exit_node, row_of), uniforms[:, 1])
    got = run(batch, uniforms, batch.probs)
    assert torch.equal(got.exit_node, exit_node) and torch.equal(got.length, length)
    assert torch.equal(got.path, path) and torch.equal(got.continuation, continuation)


def dyadic_batch(seed: int) -> Batch:
    """Rows of multiples of 1/16, so that every sum and product is exact; many leave nothing outside the tree."""
    batch = batch_of([("random", 9), ("binary", 9), ("star", 9)], 40, seed)
    rng = random.Random(seed)
    batch.probs = torch.zeros_like(batch.probs[:-1])
    for row in range(len(batch.probs)):
        r, v = (batch.row_of == row).nonzero()[0].tolist()
        tokens = batch.tree.tokens[r, batch.tree.parents[r] == v - 1].tolist()
        if not tokens or rng.random() < 0.5:
            tokens += [rng.randrange(40) for _ in range(3)]
        for _ in range(16):
            batch.probs[row, rng.choice(tokens)] += 1 / 16
    return batch


@settings(max_examples=12)
@given(st.integers(0, 999), st.integers(0, 4095), st.integers(0, 15))
def test_exact_masses_and_boundaries(seed: int, first: int, second: int) -> None:
    """Uniforms that fall on the boundaries themselves: the next index with mass is drawn."""
    batch = dyadic_batch(seed)
    uniforms = torch.tensor([[first / 4096, second / 16]] * 3, dtype=torch.float64)
    got = run(batch, uniforms, batch.probs, block=16)
    assert_same(got, reference(batch, uniforms))
    for r in range(3):
        law, left = law_and_residuals(batch, r, batch.probs)
        assert law[got.exit_node[r]] > 0 and left[int(got.exit_node[r])][got.continuation[r]] > 0


def test_nothing_without_mass_is_drawn() -> None:
    """The children of the root hold all of its mass, and of one child's row too: the walk cannot leave there."""
    parents = torch.tensor([[-1, 0, 0, -1]])
    tokens = torch.tensor([[3, 8, 70, 99]])
    probs = torch.zeros(5, 100)
    probs[0, 3], probs[0, 99] = 0.75, 0.25
    probs[1, 8], probs[1, 70] = 0.5, 0.5
    probs[2, 64] = probs[3, 63] = 1.0
    probs[4, 0] = probs[4, 99] = 0.5
    tree = Tree(tokens, parents, torch.tensor([[1, 2, 2, 1]]), torch.tensor([4]))
    batch = Batch(tree, torch.arange(5)[None], probs, 2)
    largest = 1 - 2**-53
    for uniform, leave in ((0.0, 2), (0.374, 2), (0.375, 3), (0.75, 4), (largest, 4)):
        for second in (0.0, largest):
            got = run(batch, torch.tensor([[uniform, second]], dtype=torch.float64), probs, block=32)
            expected = {2: 64, 3: 63, 4: 0 if second == 0.0 else 99}[leave]
            assert (int(got.exit_node), int(got.continuation)) == (leave, expected)


def test_a_tiny_residual_is_exact() -> None:
    """1 - m(v) by subtraction would lose these masses."""
    probs = torch.zeros(2, 50)
    probs[0, 7], probs[0, 20], probs[0, 40] = 1.0, 1e-30, 3e-30
    probs[1, 7] = 1e-30
    tree = Tree(torch.tensor([[7]]), torch.tensor([[-1]]), torch.tensor([[1]]), torch.tensor([1]))
    batch = Batch(tree, torch.arange(2)[None], probs, 1)
    for uniform, leave in ((0.79, 0), (0.81, 1)):
        for second, token in ((0.24, 20), (0.26, 40)):
            got = run(batch, torch.tensor([[uniform, second]], dtype=torch.float64), probs, block=16)
            assert int(got.exit_node) == leave
            assert int(got.continuation) == (token if leave == 0 else 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heated", [False, True])
def test_logits(dtype: torch.dtype, heated: bool) -> None:
    batch = batch_of([("random", 10), ("binary", 6), ("chain", 0)], 140, 8)
    logits = batch.probs.log().to(dtype)
    logits[:, 3::5] = float("-inf")
    logits[-1] = float("nan")
    temperature = torch.tensor([0.7, 1.3, 2.0])
    heat = torch.ones(len(logits))
    if heated:
        for r in range(3):
            heat[batch.row_of[r, : int(batch.tree.size[r]) + 1]] = temperature[r]
    scaled = logits.float() / heat[:, None]
    probs = scaled.softmax(dim=1)
    uniforms, _, _ = aimed(batch, random.Random(3), 1e-3, probs)
    options = {"normaliser": scaled.logsumexp(dim=1)}
    if heated:
        options["temperature"] = temperature
    assert_same(run(batch, uniforms, logits, **options), reference(batch, uniforms, probs))


@pytest.mark.parametrize("mixed", [False, True])
def test_greedy(mixed: bool) -> None:
    """Greedy rows are point masses; in a mixed batch their probabilities are not read."""
    batch = batch_of([("random", 12), ("binary", 14), ("chain", 6), ("star", 0)], 90, 9)
    argmax = batch.probs.argmax(dim=1)
    points = torch.nn.functional.one_hot(argmax, 90).float()
    half = torch.full((4, 2), 0.5, dtype=torch.float64)
    if not mixed:
        got = run(batch, None, argmax=argmax)
        assert int(got.length.max()) > 1
        assert_same(got, reference(batch, half, points))
        return
    greedy = torch.tensor([True, False, True, False])
    uniforms, _, _ = aimed(batch, random.Random(2))
    rows, expected_rows = batch.probs.clone(), batch.probs.clone()
    for r in (0, 2):
        mine = batch.row_of[r, : int(batch.tree.size[r]) + 1]
        rows[mine], expected_rows[mine] = float("nan"), points[mine]
        uniforms[r] = float("nan")
    got = run(batch, uniforms, rows, argmax=argmax, greedy=greedy)
    assert_same(got, reference(batch, torch.where(greedy[:, None], half, uniforms), expected_rows))


def test_a_thousand_nodes() -> None:
    """A star of 1,024 children, and a greedy chain of as many."""
    batch = batch_of([("chain", 1024)], 8, 3)
    argmax = torch.zeros(1026, dtype=torch.int64)
    argmax[batch.row_of[0, :1024]] = batch.tree.tokens[0]
    argmax[batch.row_of[0, 1000]] = 7 - int(batch.tree.tokens[0, 1000])
    got = run(batch, None, argmax=argmax)
    assert got.length.tolist() == [1000] and got.path[0, :1000].tolist() == list(range(1000))
    assert (got.path[0, 1000:] == -1).all() and (got.emitted[0, 1001:] == -1).all()
    star = batch_of([("star", 1024)], 1200, 4)
    uniforms = torch.zeros((1, 2), dtype=torch.float64)
    law, left = law_and_residuals(star, 0, star.probs)
    uniforms[0, 0], uniforms[0, 1] = uniform_for(law, 700), uniform_for(left[700], 1111)
    got = run(star, uniforms, star.probs, block=2048)
    assert got.exit_node.tolist() == [700] and got.continuation.tolist() == [1111]
    assert got.path.tolist() == [[699]]


def test_more_levels_and_other_types() -> None:
    batch = batch_of([("random", 8), ("random", 5)], 70, 6)
    uniforms, exits, _ = aimed(batch, random.Random(6), 1e-4)
    tree = batch.tree
    got = op.exit_law(
        batch.probs, tree.tokens, tree.parents, tree.size.int(), batch.row_of.int(), uniforms.float(), 21, block=32
    )
    assert torch.equal(got.exit_node, exits) and got.path.shape == (2, 21) and got.emitted.shape == (2, 22)
    assert torch.equal(got.path[:, : batch.levels], reference(batch, uniforms).path)
    assert (got.path[:, batch.levels :] == -1).all()


def test_trees_without_columns() -> None:
    batch = batch_of([("chain", 0), ("chain", 0)], 70, 6)
    check_aimed(batch, 1)


def test_checks() -> None:
    batch = batch_of([("random", 4)], 20, 1)
    tree, probs = batch.tree, batch.probs
    uniforms = torch.zeros((1, 2))
    shared = (tree.tokens, tree.parents, tree.size, batch.row_of)
    for rows, draws, options, message in (
        (None, uniforms, {}, "both None"),
        (probs, uniforms, {"greedy": torch.ones(1, dtype=torch.bool)}, "argmax"),
        (probs, None, {}, "uniforms"),
        (probs.half(), uniforms, {}, "float16"),
        (probs, uniforms, {"temperature": torch.ones(1)}, "normaliser"),
        (probs.T.contiguous().T, uniforms, {}, "stride"),
    ):
        with pytest.raises(ValueError, match=message):
            op.exit_law(rows, *shared, draws, 4, **options)


def test_faults_are_caught() -> None:
    """A spoiled block sum moves the exit; a wrong parent, token or row changes what is drawn."""
    batch = batch_of([("binary", 14)], 150, 12)
    law, left = law_and_residuals(batch, 0, batch.probs)
    last = int((law > 1e-4).nonzero()[-1])
    uniforms = torch.tensor([[uniform_for(law, last), uniform_for(left[last], 77)]], dtype=torch.float64)
    expected = reference(batch, uniforms)
    assert_same(run(batch, uniforms, batch.probs), expected)
    assert not torch.equal(run(batch, uniforms, batch.probs, fault=True).exit_node, expected.exit_node)
    row_of = batch.row_of.clone()
    row_of[0, last] = row_of[0, last - 1]
    wrong = run(Batch(batch.tree, row_of, batch.probs, batch.levels), uniforms, batch.probs)
    assert not torch.equal(wrong.emitted, expected.emitted)
