# SPDX-License-Identifier: Apache-2.0
"""The loops for a CPU against the torch steps, and the drafter's early stop against pools of full depth."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_targetrows.engine.drafting import Eagle3Drafter
from vllm_targetrows.engine.host_steps import HostSteps
from vllm_targetrows.engine.rows import TargetRows
from vllm_targetrows.engine.steps import Frontier, Level, TorchSteps
from vllm_targetrows.selection import NEVER, select
from vllm_targetrows.trees import Pool, Tree, concatenated

HOST, TORCH = HostSteps(), TorchSteps()
FIELDS = ("tokens", "parents", "depth", "size")


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    requests=st.integers(1, 4),
    width=st.integers(1, 5),
    levels=st.integers(1, 5),
    budget=st.integers(1, 120),
    coarse=st.booleans(),
    floor=st.sampled_from([NEVER, -1.5, -0.01]),
)
def test_top_nodes(
    grow_pool: Callable[..., Pool],
    seed: int,
    requests: int,
    width: int,
    levels: int,
    budget: int,
    coarse: bool,
    floor: float,
) -> None:
    pool = grow_pool(seed, requests, width, levels, coarse=coarse)
    pool.score.masked_fill_(pool.score < floor, NEVER)
    ours = HOST.select(pool, budget, "draft", None, None, None)
    torchs = TORCH.select(pool, budget, "draft", None, None, None)
    for field in FIELDS:
        assert torch.equal(getattr(ours, field), getattr(torchs, field)), field


@settings(max_examples=100)
@given(seed=st.integers(0, 10**6), requests=st.integers(1, 4), k=st.integers(1, 6), base=st.integers(1, 9))
def test_expand(seed: int, requests: int, k: int, base: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    index = torch.arange(k).repeat(requests, 1)
    ours = torchs = Frontier(index + 5, -torch.rand(requests, k, generator=generator), index, index, index)
    for depth in (2, 3, 4):
        log_q = -torch.rand(requests, k, k, generator=generator)
        token = torch.randint(99, (requests, k, k), generator=generator)
        (our_level, ours), (level, torchs) = (
            steps.expand(log_q, token, frontier, base, depth) for steps, frontier in ((HOST, ours), (TORCH, torchs))
        )
        for mine, reference in zip((*our_level, *ours), (*level, *torchs), strict=True):
            assert mine.dtype == reference.dtype
            assert torch.equal(mine, reference)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    vocabulary=st.integers(2, 6),
)
def test_greedy_exits(
    random_tree: Callable[..., Tree], stack_trees: Callable[..., Tree], seed: int, sizes: list[int], vocabulary: int
) -> None:
    columns = max(1, *sizes)
    tree = stack_trees([random_tree(seed + i, size, vocabulary, columns) for i, size in enumerate(sizes)])
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(vocabulary, (sum(sizes) + len(sizes),), generator=generator)
    first = torch.tensor([sum(sizes[:i]) + i for i in range(len(sizes))])
    row_of = (first[:, None] + torch.arange(columns + 1)).clamp(max=len(rows) - 1)
    levels = int(tree.depth.max())
    ours = HOST.exits(TargetRows(rows, None, None, None), tree, row_of, None, levels)
    torchs = TORCH.exits(TargetRows(rows, None, None, None), tree, row_of, None, levels)
    for name, mine, reference in zip(ours._fields, ours, torchs, strict=True):
        assert torch.equal(mine, reference), name


def test_sampled_exits_are_left_to_torch(random_tree: Callable[..., Tree]) -> None:
    tree = random_tree(0, 6, 4)
    probs = torch.rand(7, 4, generator=torch.Generator().manual_seed(0))
    rows = TargetRows(None, probs / probs.sum(1, keepdim=True), None, None)
    arguments = (tree, torch.arange(7)[None], torch.tensor([[0.3, 0.7]], dtype=torch.float64), 6)
    for mine, reference in zip(HOST.exits(rows, *arguments), TORCH.exits(rows, *arguments), strict=True):
        assert torch.equal(mine, reference)


# ---------------------------------------------------------------------- growth


def _levels(pool: Pool, depth: int) -> tuple[list[Level], Frontier]:
    """The pool's first ``depth`` levels as the drafter holds them, and the frontier below them."""
    fields = [getattr(pool, name) for name in ("tokens", "parents", "depth", "score", "branch")]
    levels = [Level(*(field[:, pool.depth[0] == d] for field in fields)) for d in range(1, depth + 1)]
    score, best = levels[-1].score.topk(pool.width, dim=1)
    return levels, Frontier(levels[-1].tokens.gather(1, best), score, best, best, best)


def _drafter(budget: int, selection: str, topk: int, floor: float) -> Eagle3Drafter:
    drafter = Eagle3Drafter.__new__(Eagle3Drafter)
    drafter.options = SimpleNamespace(num_speculative_tokens=budget, selection=selection, frontier=0)  # type: ignore[assignment]
    drafter.topk, drafter.floor, drafter.growing, drafter.device = topk, floor, floor, torch.device("cpu")
    drafter.whole = False
    return drafter


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    requests=st.integers(1, 3),
    width=st.integers(1, 4),
    levels=st.integers(2, 6),
    budget=st.integers(1, 12),
    coarse=st.booleans(),
    floor=st.sampled_from([NEVER, -2.0, -0.5]),
)
def test_growth_stops_where_deeper_levels_change_no_tree(
    grow_pool: Callable[..., Pool],
    seed: int,
    requests: int,
    width: int,
    levels: int,
    budget: int,
    coarse: bool,
    floor: float,
) -> None:
    pool = grow_pool(seed, requests, width, levels, coarse=coarse)
    drafter = _drafter(budget, "draft", width, floor)
    grown = next((d for d in range(1, levels) if not drafter._worth_growing(*_levels(pool, d))), levels)
    short = _levels(pool, grown)[0]
    cut = Pool(*(torch.cat(parts, dim=1) for parts in zip(*short, strict=True)), width=width)
    for each in (pool, cut):
        each.score.masked_fill_(each.score < floor, NEVER)
    whole, stopped = (select(each, budget, "draft") for each in (pool, cut))
    columns = stopped.tokens.shape[1]
    for field in ("tokens", "parents", "depth"):
        assert torch.equal(getattr(whole, field)[:, :columns], getattr(stopped, field)), field
    assert torch.equal(whole.size, stopped.size)


def test_growth_stops_when_the_tree_is_full_of_better_nodes(grow_pool: Callable[..., Pool]) -> None:
    pool = grow_pool(1, 1, 4, 3)
    frontier = _levels(pool, 1)
    assert not _drafter(1, "draft", 4, NEVER)._worth_growing(*frontier)  # one node, and it is there
    assert not _drafter(1, "pearl", 4, NEVER)._worth_growing(*frontier)
    assert _drafter(1, "root", 4, NEVER)._worth_growing(*frontier)  # the root row may lift any branch
    assert _drafter(9, "draft", 4, NEVER)._worth_growing(*frontier)
    assert not _drafter(9, "root", 4, 0.0)._worth_growing(*frontier)  # nothing is certain


def test_pools_of_different_depth_are_concatenated(grow_pool: Callable[..., Pool]) -> None:
    deep, flat = grow_pool(0, 2, 3, 4), grow_pool(1, 1, 3, 1)
    both = concatenated([deep, flat])
    for rule, more in (("draft", {}), ("root_draw", {"drawn": torch.tensor([0, 1, 2])})):
        together = select(both, 7, rule, **more)
        for rows, pool in ((slice(0, 2), deep), (slice(2, 3), flat)):
            alone = select(pool, 7, rule, **{name: value[rows] for name, value in more.items()})
            columns = alone.tokens.shape[1]
            assert torch.equal(together.tokens[rows, :columns], alone.tokens)
            assert torch.equal(together.parents[rows, :columns], alone.parents)
            assert torch.equal(together.size[rows], alone.size)


# ---------------------------------------------------------------------- numba beside vLLM


@pytest.mark.parametrize(("module", "survives"), [("numba", False), ("vllm_targetrows.engine.compiled", True)])
def test_vllm_can_look_through_the_modules_beside_numba(module: str, survives: bool) -> None:
    """Without the shield a worker of vLLM 0.32 dies in a process that has imported numba."""
    look = f"import {module}; from vllm.triton_utils.dispatcher import _rebind_kernels as r; r([(object(), print)])"
    done = subprocess.run([sys.executable, "-P", "-c", look], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is survives, done.stderr
