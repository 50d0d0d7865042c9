# SPDX-License-Identifier: Apache-2.0
"""Every rule against brute force over all prefix-closed subsets, and against a plain reference on larger pools."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vllm_targetrows.selection import oracle, path_scores, root_scores, select, select_with_frontier
from vllm_targetrows.trees import Pool

NEVER = float("-inf")
RULES = ("draft", "root", "root_draw", "pearl")


def paths(tree, request):
    """Root paths (token tuples) of one request's tree, in its order, after checking the tree's own promises."""
    size = int(tree.size[request])
    tokens, parents, depth = (x[request].tolist() for x in (tree.tokens, tree.parents, tree.depth))
    assert tokens[size:] == [-1] * (len(tokens) - size)
    assert parents[size:] == [-1] * (len(tokens) - size)
    assert depth[size:] == [0] * (len(tokens) - size)
    result = []
    for node in range(size):
        assert -1 <= parents[node] < node
        result.append((*(result[parents[node]] if parents[node] >= 0 else ()), tokens[node]))
        assert depth[node] == len(result[node])
    # Depth-first: a node hangs below the previous one or below one of its ancestors.
    for before, after in itertools.pairwise(result):
        assert after[:-1] == before[: len(after) - 1]
    return result


def pool_paths(pool, request):
    result = []
    for token, parent in zip(pool.tokens[request].tolist(), pool.parents[request].tolist(), strict=True):
        result.append((*(result[parent] if parent >= 0 else ()), token))
    return result


def closed_subsets(parents, allowed, most):
    """All prefix-closed sets of at most ``most`` of the pool's nodes."""
    sets = [frozenset()]
    for node in allowed:
        parent = parents[node]
        sets += [s | {node} for s in sets if len(s) < most and (parent < 0 or parent in s)]
    return sets


def best_subset(parents, score, allowed, most):
    """Largest total of ``exp(score)``, which is what the rules maximise.  For pools without ties."""
    sets = closed_subsets(parents, allowed, most)
    return max(sets, key=lambda s: math.fsum(math.exp(score[n]) for n in s))


def reference(pool, request, score, most, allowed=None):
    """Top nodes by score, shallower first, then pool order."""
    nodes = range(len(score)) if allowed is None else allowed
    ranked = sorted((n for n in nodes if score[n] > NEVER), key=lambda n: (-score[n], int(pool.depth[request, n]), n))
    return ranked[:most]


def expected_paths(pool, request, budget, rule, root_log_p=None, drawn=None):
    """The rule spelled out for one request, as a set of root paths."""
    named = pool_paths(pool, request)
    score = pool.score[request].double().tolist()
    branch = pool.branch[request].tolist()
    if rule == "root" and root_log_p is not None:
        score = [
            NEVER if s == NEVER else float(root_log_p[request, b]) + (s - score[b])
            for s, b in zip(score, branch, strict=True)
        ]
    if rule in ("root_draw", "pearl") and int(drawn[request]) >= 0:
        below = [n for n, path in enumerate(named) if path[0] == int(drawn[request]) and score[branch[n]] > NEVER]
        if rule == "root_draw":
            chosen = reference(pool, request, score, budget, below)
        else:
            chosen = [n for n in reference(pool, request, score, budget) if n in below]
        return {named[n][1:] for n in chosen if len(named[n]) > 1}
    return {named[n] for n in reference(pool, request, score, budget)}


def root_rows(pool, seed):
    return torch.rand(pool.tokens.shape[0], pool.width, generator=torch.Generator().manual_seed(seed)).double().log()


def drawn_tokens(pool, seed):
    """For each request in turn: a first-level token, an absent one, no root row."""
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(pool.width, (pool.tokens.shape[0], 1), generator=generator)
    drawn = pool.tokens.gather(1, pick)[:, 0].clone()
    drawn[1::4] = 10**6
    drawn[3::4] = -1
    return drawn


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [1, 2, 4, 7])
def test_rules_are_optimal_among_all_prefix_closed_subsets(grow_pool, seed, budget):
    pool = grow_pool(seed, 1, 3, 3 if budget < 7 else 2)
    parents, named = pool.parents[0].tolist(), pool_paths(pool, 0)
    score = pool.score[0].double().tolist()
    every = range(len(parents))
    root_log_p = root_rows(pool, seed)

    draft = best_subset(parents, score, every, budget)
    assert set(paths(select(pool, budget, "draft"), 0)) == {named[n] for n in draft}

    reranked = [float(root_log_p[0, b]) + s - score[b] for s, b in zip(score, pool.branch[0].tolist(), strict=True)]
    root = best_subset(parents, reranked, every, budget)
    assert set(paths(select(pool, budget, "root", root_log_p), 0)) == {named[n] for n in root}

    for first in range(pool.width):
        below = [n for n in every if named[n][0] == named[first][0]]
        drawn = pool.tokens[:, first]
        # The drawn token comes first in its branch and counts against the budget.
        branch = best_subset(parents, score, below, budget)
        assert set(paths(select(pool, budget, "root_draw", drawn=drawn), 0)) == {named[n][1:] for n in branch - {first}}
        kept = {named[n][1:] for n in draft & set(below) - {first}}
        assert set(paths(select(pool, budget, "pearl", drawn=drawn), 0)) == kept

    log_p = -torch.rand(1, len(parents), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    total = [sum(float(log_p[0, n]) for n in every if named[v][: len(named[n])] == named[n]) for v in every]
    best = best_subset(parents, total, every, budget)
    assert set(paths(oracle(pool, log_p, budget), 0)) == {named[n] for n in best}


@pytest.mark.parametrize("coarse", [False, True], ids=["no ties", "many ties"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("budget", [1, 2, 8, 20, 59])
def test_rules_on_larger_pools_in_one_batch(grow_pool, rule, budget, coarse):
    pool = grow_pool(budget, 9, 5, 4, coarse=coarse)
    pool.score[2, 40:] = NEVER
    pool.score[4, pool.branch[4] == 1] = NEVER
    root_log_p, drawn = root_rows(pool, budget), drawn_tokens(pool, budget)
    has_row = torch.arange(9) % 3 != 2
    if coarse:
        root_log_p = root_log_p.round()
    tree = select(pool, budget, rule, root_log_p, drawn, has_row)
    for r in range(9):
        row = root_log_p if has_row[r] else None
        assert set(paths(tree, r)) == expected_paths(pool, r, budget, rule, row, drawn), r


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_gives_what_each_request_gives_alone(grow_pool, rule):
    pool = grow_pool(3, 8, 4, 4, coarse=True)
    root_log_p, drawn, has_row = root_rows(pool, 3), drawn_tokens(pool, 3), torch.arange(8) % 2 == 0
    together = select(pool, 12, rule, root_log_p, drawn, has_row)
    for r in range(8):
        one = slice(r, r + 1)
        fields = {name: getattr(pool, name)[one] for name in ("tokens", "parents", "depth", "score", "branch")}
        alone = select(Pool(**fields, width=4), 12, rule, root_log_p[one], drawn[one], has_row[one])
        for name in ("tokens", "parents", "depth", "size"):
            assert torch.equal(getattr(together, name)[one], getattr(alone, name)), (r, name)


def test_best_child_comes_first(grow_pool):
    pool = grow_pool(11, 4, 4, 4)
    tree = select(pool, 25, "draft")
    for r in range(4):
        score = dict(zip(pool_paths(pool, r), pool.score[r].tolist(), strict=True))
        order = paths(tree, r)
        for i, path in enumerate(order):
            for later in order[i + 1 :]:
                if later[:-1] == path[:-1]:
                    assert score[later] <= score[path]


def test_ties_go_to_the_shallower_node_then_to_pool_order():
    # Two first-level nodes and two children of the first, all with one score.
    pool = Pool(
        tokens=torch.tensor([[5, 6, 7, 8]]),
        parents=torch.tensor([[-1, -1, 0, 0]]),
        depth=torch.tensor([[1, 1, 2, 2]]),
        score=torch.full((1, 4), -1.0),
        branch=torch.tensor([[0, 1, 0, 0]]),
        width=2,
    )
    assert paths(select(pool, 1, "draft"), 0) == [(5,)]
    assert paths(select(pool, 2, "draft"), 0) == [(5,), (6,)]
    assert paths(select(pool, 3, "draft"), 0) == [(5,), (5, 7), (6,)]


def test_a_request_without_root_row_is_served_by_draft(grow_pool):
    pool = grow_pool(7, 3, 4, 3)
    plain = select(pool, 9, "draft")
    none = torch.full((3,), -1)
    for rule in RULES:
        tree = select(pool, 9, rule, root_rows(pool, 1), none, torch.zeros(3, dtype=torch.bool))
        for name in ("tokens", "parents", "depth", "size"):
            assert torch.equal(getattr(tree, name), getattr(plain, name)), (rule, name)


@pytest.mark.parametrize("rule", ["root_draw", "pearl"])
def test_a_drawn_token_that_does_not_exist_in_the_first_level_gives_no_tree(grow_pool, rule):
    pool = grow_pool(7, 2, 4, 3)
    # Request 1: the token is there, but its node does not exist; it does at the second level, which must not matter.
    pool.score[1, pool.branch[1] == 2] = NEVER
    drawn = torch.stack((torch.tensor(10**6), pool.tokens[1, 2]))
    assert pool.tokens[1, 2] in pool.tokens[1, 4:]
    assert select(pool, 9, rule, drawn=drawn).size.tolist() == [0, 0]


@pytest.mark.parametrize("rule", ["root_draw", "pearl"])
def test_a_nonexistent_node_does_not_hide_the_drawn_one(grow_pool, rule):
    pool = grow_pool(7, 1, 4, 3)
    pool.score[0, pool.branch[0] == 0] = NEVER
    expected = paths(select(pool, 20, rule, drawn=pool.tokens[:, 2]), 0)
    pool.tokens[0, 0] = pool.tokens[0, 2]
    assert paths(select(pool, 20, rule, drawn=pool.tokens[:, 2]), 0) == expected != []


def test_pearl_keeps_fewer_nodes_than_root_draw_at_one_budget(grow_pool):
    pool = grow_pool(5, 6, 4, 4)
    drawn = pool.tokens[:, 1]
    pearl, draw = select(pool, 12, "pearl", drawn=drawn), select(pool, 12, "root_draw", drawn=drawn)
    for r in range(6):
        assert set(paths(pearl, r)) <= set(paths(draw, r))
    assert (pearl.size < draw.size).any()


def test_a_branch_with_no_mass_in_the_root_row_is_never_selected(grow_pool):
    pool = grow_pool(2, 1, 3, 3)
    row = torch.tensor([[NEVER, 0.0, NEVER]])
    tree = select(pool, 20, "root", row)
    inside = int((pool.branch == 1).sum())
    assert int(tree.size) == min(20, inside)
    assert all(path[0] == int(pool.tokens[0, 1]) for path in paths(tree, 0))


def test_nonexistent_nodes_of_a_first_level_branch_stay_out_of_root(grow_pool):
    pool = grow_pool(2, 1, 3, 3)
    pool.score[0, pool.branch[0] == 0] = NEVER
    scores = root_scores(pool, torch.zeros(1, 3))
    assert not scores.isnan().any()
    assert (scores[0, pool.branch[0] == 0] == NEVER).all()
    tree = select(pool, 21, "root", torch.zeros(1, 3))
    assert int(tree.size) == int((pool.score > NEVER).sum())


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 40), st.booleans(), st.data())
def test_greedy_root_never_shortens_the_accepted_path(grow_pool, seed, budget, coarse, data):
    pool = grow_pool(seed, 1, 4, 4, vocabulary=6, coarse=coarse)
    named = pool_paths(pool, 0)
    # The target's greedy text: mostly a path of the pool, so that something is accepted.
    text = (*data.draw(st.sampled_from(named)), *data.draw(st.lists(st.integers(0, 5), min_size=4, max_size=4)))
    first = pool.tokens[:, : pool.width]
    assume(text[0] in first)
    point = torch.where(first == text[0], 0.0, NEVER)

    def accepted(tree):
        return max((len(p) for p in paths(tree, 0) if text[: len(p)] == p), default=0)

    assert accepted(select(pool, budget, "root", point)) >= accepted(select(pool, budget, "draft"))


def test_float32_scores_that_differ_by_one_ulp_stay_apart_under_root():
    # Half a unit in the children's last place: in float32 the subtraction ties, rounds both children to one value, and
    # the worse one would win by pool order.
    branch = torch.tensor(-(0.25 + 2.0**-22))
    worse, better = torch.tensor(-(7.0 + 2.0**-21)), torch.tensor(-7.0)
    if better - branch != worse - branch:
        worse, better = better, better + 2.0**-21
    assert better > worse
    assert better - branch == worse - branch
    pool = Pool(
        tokens=torch.tensor([[0, 1, 2]]),
        parents=torch.tensor([[-1, 0, 0]]),
        depth=torch.tensor([[1, 2, 2]]),
        score=torch.stack((branch, worse, better))[None],
        branch=torch.tensor([[0, 0, 0]]),
        width=1,
    )
    assert paths(select(pool, 2, "draft"), 0) == [(0,), (0, 2)]
    assert paths(select(pool, 2, "root", torch.zeros(1, 1)), 0) == [(0,), (0, 2)]


def test_path_scores_sum_along_the_path_and_never_increase(grow_pool):
    pool = grow_pool(4, 2, 5, 6)
    log_p = -torch.rand(pool.tokens.shape, generator=torch.Generator().manual_seed(4)) * 1e-3
    score = path_scores(pool, log_p)
    parent = torch.cat((torch.zeros(2, 1), score), dim=1).gather(1, pool.parents + 1)
    assert torch.equal(score, parent + log_p)
    assert (score <= parent).all()


def test_oracle_leaves_nonexistent_nodes_out(grow_pool):
    pool = grow_pool(4, 1, 3, 3)
    pool.score[0, pool.branch[0] == 0] = NEVER
    tree = oracle(pool, torch.zeros(pool.tokens.shape), 21)
    named = pool_paths(pool, 0)
    assert set(paths(tree, 0)) == {named[n] for n in (pool.branch[0] != 0).nonzero().flatten().tolist()}


@pytest.mark.parametrize("rule", RULES)
def test_largest_pool_and_budget(grow_pool, rule):
    pool = grow_pool(1, 2, 16, 17, vocabulary=40)
    fields = (getattr(pool, name)[:, :4096] for name in ("tokens", "parents", "depth", "score", "branch"))
    pool = Pool(*fields, width=16)
    assert pool.tokens.shape[1] == 4096
    root_log_p, drawn = root_rows(pool, 1), pool.tokens[:, 0].clone()
    tree = select(pool, 255, rule, root_log_p, drawn)
    assert tree.tokens.shape == (2, 255)
    for r in range(2):
        assert set(paths(tree, r)) == expected_paths(pool, r, 255, rule, root_log_p, drawn)


@pytest.mark.parametrize("rule", RULES)
def test_single_node_pool_and_budget_beyond_the_pool(grow_pool, rule):
    pool = grow_pool(1, 3, 1, 1)
    tree = select(pool, 255, rule, torch.zeros(3, 1), pool.tokens[:, 0])
    assert tree.tokens.shape == (3, 1)
    assert tree.size.tolist() == ([0, 0, 0] if rule in ("root_draw", "pearl") else [1, 1, 1])


@pytest.mark.parametrize(
    ("rule", "message"),
    [("best", "allowed: draft, root, root_draw, pearl"), ("root", "needs root_log_p"), ("pearl", "needs the drawn")],
)
def test_wrong_calls_are_named(grow_pool, rule, message):
    with pytest.raises(ValueError, match=message):
        select(grow_pool(1, 1, 2, 2), 4, rule)


def expected_frontier(pool, request, tree, frontier, rule, root_log_p, drawn):
    """The best pool nodes below the tree's root that hang off it, by the rule's score: root paths, best first."""
    named = pool_paths(pool, request)
    score = pool.score[request].double().tolist()
    if rule == "root" and root_log_p is not None:
        branch = pool.branch[request].tolist()
        score = [
            NEVER if s == NEVER else float(root_log_p[request, b]) + (s - score[b])
            for s, b in zip(score, branch, strict=True)
        ]
    start = (int(drawn[request]),) if rule in ("root_draw", "pearl") and int(drawn[request]) >= 0 else ()
    inside = {(*start, *path) for path in tree}
    outside = [
        n for n, path in enumerate(named) if path not in inside and (path[:-1] in inside or path[:-1] == start) and tree
    ]
    outside = [n for n in outside if len(named[n]) > len(start)]
    return [named[n][len(start) :] for n in reference(pool, request, score, frontier, outside)]


@pytest.mark.parametrize("coarse", [False, True], ids=["no ties", "many ties"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("budget", "frontier"), [(1, 1), (4, 0), (4, 7), (8, 200), (59, 20)])
def test_the_frontier_is_scored_behind_the_tree(grow_pool, rule, budget, frontier, coarse):
    pool = grow_pool(budget, 9, 5, 4, coarse=coarse)
    pool.score[2, 40:] = NEVER
    pool.score[4, pool.branch[4] == 1] = NEVER
    root_log_p, drawn = root_rows(pool, budget), drawn_tokens(pool, budget)
    has_row = torch.arange(9) % 3 != 2
    alone = select(pool, budget, rule, root_log_p, drawn, has_row)
    for levels in (None, 4):
        scored, size = select_with_frontier(pool, budget, frontier, rule, root_log_p, drawn, has_row, levels)
        assert torch.equal(size, alone.size)
        for r in range(9):
            tree = paths(alone, r)
            row = root_log_p if has_row[r] else None
            wanted = tree + expected_frontier(pool, r, tree, frontier, rule, row, drawn)
            got = []
            for node in range(int(scored.size[r])):
                parent = int(scored.parents[r, node])
                assert parent < int(size[r])
                got.append((*(got[parent] if parent >= 0 else ()), int(scored.tokens[r, node])))
                assert int(scored.depth[r, node]) == len(got[node])
            assert got == wanted
            padding = slice(int(scored.size[r]), None)
            assert (scored.tokens[r, padding] == -1).all() and (scored.parents[r, padding] == -1).all()
            assert (scored.depth[r, padding] == 0).all()
