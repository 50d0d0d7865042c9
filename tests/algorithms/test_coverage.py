# SPDX-License-Identifier: Apache-2.0
"""Oracles 1 to 3: coverage, stopping rules and the row at the wrong branch, exact in float64."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from vllm_targetrows.coverage import (
    acceptable,
    address_match,
    coverage,
    exit_prefix_law,
    expected_accepted,
    frontier,
    next_root_match,
    token_match,
    total_variation,
    tree_prefixes,
    unused_tokens,
)
from vllm_targetrows.verification import edge_masses, exit_law, residual_row

A, B = 0, 1


def words(*texts):
    return [tuple("ab".index(letter) for letter in text) for text in texts]


def uniform(_prefix):
    return torch.tensor([0.5, 0.5], dtype=torch.float64)


def random_target(seed, vocabulary):
    """A target whose row at each prefix is random but fixed."""

    def rows(prefix):
        generator = torch.Generator().manual_seed(hash((seed, prefix)) % 2**62)
        mass = torch.rand(vocabulary, generator=generator, dtype=torch.float64)
        return mass / mass.sum()

    return rows


def test_next_root_match_compares_whole_contexts(random_tree):
    """Every exit and every continuation of some trees, against their lists of prefixes."""
    seen = set()
    for seed in range(6):
        tree = random_tree(seed, seed, 3)
        nodes = tree_prefixes(tree)
        tokens, parents = ([int(x) for x in part[0][: len(nodes)]] for part in (tree.tokens, tree.parents))
        for exit_node, token in itertools.product(range(len(nodes) + 1), range(4)):
            context = (*((), *nodes)[exit_node], token)
            same = [i for i, prefix in enumerate(nodes) if prefix[-1] == token]
            if context in nodes:
                expected = "address", nodes.index(context)
            else:
                expected = ("token_only", same[0]) if same else ("none", None)
            assert next_root_match(tokens, parents, exit_node, token) == expected
            seen.add(expected[0])
            if nodes:
                exits, continuation = torch.tensor([exit_node]), torch.tensor([token])
                assert (address_match(tree, exits, continuation)[0] >= 0) == (expected[0] == "address")
                assert token_match(tree, continuation).any() == (expected[0] != "none")
    assert seen == {"address", "token_only", "none"}


@pytest.mark.parametrize("rule", ["exhaustive", "cap:1", "cap:2", "cap:9", "sampled_leaf"])
def test_a_stopping_rule_is_the_exit_law_over_the_acceptable_nodes(random_tree, rule):
    """With a frontier behind the tree, whose nodes are never accepted."""
    for seed in range(12):
        rows = random_target(seed, 4)
        tree = random_tree(seed, seed, 4)
        nodes = tree_prefixes(tree)
        parents, depth = (part[:1, : len(nodes)].numpy() for part in (tree.parents, tree.depth))
        inside = len(nodes) - seed % 3 if len(nodes) > 3 else len(nodes)
        accepts = acceptable(parents, depth, np.array([inside]), rule)[0]
        assert not accepts[inside:].any()
        law = exit_prefix_law(rows, nodes[:inside], rule)
        reached = {prefix[:-1] for prefix in law}
        assert reached <= {(), *(nodes[i] for i in np.flatnonzero(accepts))}
        # The exhaustive walk over the acceptable nodes alone.
        other = exit_prefix_law(rows, [nodes[i] for i in np.flatnonzero(accepts)])
        assert law.keys() == other.keys()
        assert all(law[prefix] == pytest.approx(other[prefix], abs=1e-12) for prefix in law)
    with pytest.raises(ValueError, match="unknown stopping rule 'leaf'; allowed"):
        acceptable(parents, depth, np.array([1]), "leaf")


ORACLE_1 = words("a", "b", "aa", "ab", "ba", "aaa", "aab")


@pytest.mark.parametrize(
    ("rule", "covered", "accepted"),
    [("exhaustive", 0, 2), ("cap:1", 3 / 4, 1), ("sampled_leaf", 3 / 4, 5 / 4), ("cap:2", 1 / 4, 7 / 4)],
)
def test_oracle_1_uniform_target(rule, covered, accepted):
    law = exit_prefix_law(uniform, ORACLE_1, rule)
    assert sum(law.values()) == 1
    assert coverage(law, ORACLE_1) == covered
    assert expected_accepted(law) == accepted


@pytest.mark.parametrize(
    ("rule", "unused"),
    [
        ("exhaustive", {}),
        ("cap:1", dict(zip(words("aa", "ab", "ba"), (2, 1, 1), strict=True))),
        ("sampled_leaf", dict.fromkeys(words("aaa", "aab", "ab", "ba"), 1)),
        ("cap:2", dict.fromkeys(words("aaa", "aab"), 1)),
    ],
)
def test_oracle_1_unused_tokens_on_covered_rounds(rule, unused):
    law = exit_prefix_law(uniform, ORACLE_1, rule)
    assert {x: unused_tokens(uniform, ORACLE_1, x) for x in law if x in ORACLE_1} == unused


def test_oracle_2_scored_frontier():
    nodes, beyond = words("a", "aa", "ab"), words("b")
    law = exit_prefix_law(uniform, nodes)
    assert coverage(law, [*nodes, *beyond]) == 1 / 2
    assert coverage(law, nodes) == 0
    assert expected_accepted(law) == 1
    assert frontier(nodes, [(), *nodes, *beyond, *words("ba")]) == set(beyond)
    # With b in the tree the rounds that were covered accept one more token, and no other round changes.
    larger = exit_prefix_law(uniform, [*nodes, *beyond])
    assert expected_accepted(larger) == 3 / 2
    grown = {x: p for x, p in larger.items() if x[:1] == (B,)}
    assert sum(grown.values()) == law[(B,)]
    assert all(len(x) == 2 for x in grown)
    assert {x: p for x, p in larger.items() if x not in grown} == {x: p for x, p in law.items() if x != (B,)}


def next_token_law(rows, nodes, scored, match):
    """Law of exit prefix and the token after it, when a matched scored row stands in for the next root row."""
    law = {}
    for exit_prefix, p in exit_prefix_law(rows, nodes).items():
        found = [prefix for prefix in scored if match(prefix, exit_prefix)]
        row = rows(found[0] if found else exit_prefix)
        for token, q in enumerate(row.tolist()):
            law[(*exit_prefix, token)] = p * q
    return law


def same_address(scored, exit_prefix):
    return scored == exit_prefix


def same_last_token(scored, exit_prefix):
    return scored[-1] == exit_prefix[-1]


def test_oracle_3_a_row_at_the_wrong_branch():
    """A target that goes on with ``a`` after ``ab`` and with ``b`` after ``bb``: one last token, two rows."""

    def target(start):
        following = dict(zip(words("", "a", "ab", "b", "bb"), (start, B, A, B, B), strict=True))
        return lambda prefix: torch.eye(2, dtype=torch.float64)[following[prefix]]

    def text(rows, scored, match):
        (emitted,) = (x for x, p in next_token_law(rows, words("a", "b"), scored, match).items() if p == 1)
        return "".join("ab"[token] for token in emitted)

    # The context goes on with ab; only bb was scored.
    assert text(target(A), words("bb"), same_address) == "aba"
    assert text(target(A), words("bb"), same_last_token) == "abb"
    # And the other way round: the row of ab at bb.
    assert text(target(B), words("ab"), same_address) == "bbb"
    assert text(target(B), words("ab"), same_last_token) == "bba"
    rows = target(A)
    assert float(total_variation(rows(words("ab")[0]), rows(words("bb")[0]))) == 1


def test_only_address_matched_reuse_is_exact():
    rows = random_target(3, 3)
    nodes = [(0,), (1,), (0, 1)]
    scored = [*nodes, (0, 2), (1, 2)]
    decoded = {
        (*x, token): p * q for x, p in exit_prefix_law(rows, nodes).items() for token, q in enumerate(rows(x).tolist())
    }
    assert next_token_law(rows, nodes, scored, same_address) == decoded
    wrong = next_token_law(rows, nodes, scored, same_last_token)
    assert sum(abs(wrong[x] - p) for x, p in decoded.items()) / 2 > 0.01


@pytest.mark.parametrize("seed", range(5))
def test_stopping_early_trades_accepted_tokens_for_coverage_one_for_one(random_tree, seed):
    """Accepted plus unused tokens are the exhaustive walk's under every rule; the exhaustive walk covers nothing."""
    rows, nodes = random_target(seed, 4), tree_prefixes(random_tree(seed, 12, 4))
    full = exit_prefix_law(rows, nodes)
    assert coverage(full, nodes) == 0
    for rule in ("cap:0", "cap:1", "cap:2", "cap:9", "sampled_leaf"):
        law = exit_prefix_law(rows, nodes, rule)
        assert sum(law.values()) == pytest.approx(1, abs=1e-12)
        unused = sum(p * unused_tokens(rows, nodes, x) for x, p in law.items())
        assert expected_accepted(law) + unused == pytest.approx(expected_accepted(full), rel=1e-12)
    assert exit_prefix_law(rows, nodes, "cap:9") == full


@pytest.mark.parametrize("seed", range(5))
def test_exhaustive_exit_prefixes_follow_the_exit_law(random_tree, seed):
    rows, tree = random_target(seed, 4), random_tree(seed, 12, 4)
    nodes = tree_prefixes(tree)
    prefixes = [(), *nodes]
    probs, row_of = torch.stack([rows(x) for x in prefixes]), torch.arange(13)[None]
    law = exit_law(*edge_masses(probs, tree, row_of), tree)[0]
    expected = {}
    for node, prefix in enumerate(prefixes):
        residual = residual_row(probs, tree, torch.tensor([node]), row_of)[0]
        for token in residual.nonzero().flatten().tolist():
            expected[(*prefix, token)] = float(law[node] * residual[token] / residual.sum())
    found = exit_prefix_law(rows, nodes)
    assert found.keys() == expected.keys()
    for prefix, p in found.items():
        assert p == pytest.approx(expected[prefix], rel=1e-12)
    total = sum(
        float(exit_law(*edge_masses(probs, tree, row_of), tree)[0, b + 1]) * len(x) for b, x in enumerate(nodes)
    )
    assert expected_accepted(found) == pytest.approx(total, rel=1e-12)


def test_impossible_exits_are_left_out():
    rows = lambda _: torch.tensor([1.0, 0.0], dtype=torch.float64)  # noqa: E731
    assert exit_prefix_law(rows, words("a", "b")) == {words("aa")[0]: 1.0}


@pytest.mark.parametrize("rule", ["cap", "cap:", "cap:x", "Exhaustive", "cap:1 "])
def test_an_unknown_stopping_rule_is_named(rule):
    with pytest.raises(ValueError, match="allowed: exhaustive, cap:k, sampled_leaf"):
        exit_prefix_law(uniform, [], rule)


def test_the_empty_tree_emits_one_token():
    law = exit_prefix_law(uniform, [])
    assert law == {(A,): 0.5, (B,): 0.5}
    assert expected_accepted(law) == 0


def test_tree_prefixes_of_a_padded_batch(one_tree, stack_trees):
    batch = stack_trees([one_tree([-1, 0, 0, -1], [7, 8, 9, 6], 5), one_tree([-1], [3], 5), one_tree([], [], 5)])
    assert tree_prefixes(batch) == [(7,), (7, 8), (7, 9), (6,)]
    assert tree_prefixes(batch, 1) == [(3,)]
    assert tree_prefixes(batch, 2) == []


def test_address_and_token_matches_against_prefixes(random_tree, stack_trees):
    vocabulary = 4
    batch = stack_trees([random_tree(seed, size, vocabulary, 11) for seed, size in enumerate((10, 4, 0))])
    rng = random.Random(1)
    for _ in range(60):
        exits = [rng.randint(0, int(size)) for size in batch.size]
        tokens = [rng.randrange(vocabulary) for _ in exits]
        match = address_match(batch, torch.tensor(exits), torch.tensor(tokens))
        same = token_match(batch, torch.tensor(tokens))
        for r, (exit_node, token) in enumerate(zip(exits, tokens, strict=True)):
            prefixes = tree_prefixes(batch, r)
            address = (*([(), *prefixes][exit_node]), token)
            assert int(match[r]) == (prefixes.index(address) if address in prefixes else -1)
            assert same[r].nonzero().flatten().tolist() == [b for b, x in enumerate(prefixes) if x[-1] == token]


def test_padding_matches_nothing(one_tree):
    padded = one_tree([-1], [3], 4)
    assert address_match(padded, torch.tensor([0]), torch.tensor([-1])).tolist() == [-1]
    assert not token_match(padded, torch.tensor([-1])).any()


def test_total_variation():
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.0, 0.0, 1.0]])
    assert total_variation(p, q).tolist() == [0.25, 1.0]
    assert total_variation(p, q).dtype == torch.float64
    for x, y in itertools.permutations((p, q)):
        assert torch.equal(total_variation(x, y), total_variation(y, x))
