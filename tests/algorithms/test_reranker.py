# SPDX-License-Identifier: Apache-2.0
"""What the reranker reads of retained rows, and that its scores give trees.  Training is tested with the study."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_targetrows.reranker import Reranker, features, retained_probabilities
from vllm_targetrows.selection import NEVER, select


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scored", [0, 1, 7])
def test_retained_probabilities_are_those_of_the_first_matching_row(grow_pool, seed, scored):
    generator = torch.Generator().manual_seed(seed)
    requests, vocabulary = 4, 9
    pool = grow_pool(seed, requests, 3, 3, vocabulary=vocabulary)
    log_p = torch.randn(20, vocabulary, generator=generator).log_softmax(dim=1)
    row_of = torch.randint(20, (requests, scored + 1), generator=generator)
    tokens = torch.randint(vocabulary, (requests, scored + 1), generator=generator)
    tokens[1, 1:] = -1
    exit_node = torch.randint(scored + 1, (requests,), generator=generator)
    root = torch.randint(vocabulary, (requests,), generator=generator)
    match, ancestor = retained_probabilities(log_p, row_of, tokens, exit_node, pool, root)
    for r in range(requests):
        for node in range(pool.tokens.shape[1]):
            token, parent = int(pool.tokens[r, node]), int(pool.parents[r, node])
            above = int(root[r]) if parent < 0 else int(pool.tokens[r, parent])
            rows = [int(row_of[r, i]) for i in range(scored + 1) if int(tokens[r, i]) == above]
            if rows:
                assert float(match[r, node]) == pytest.approx(math.exp(log_p[rows[0], token]), rel=1e-5)
            else:
                assert math.isnan(match[r, node])
            at_exit = int(row_of[r, exit_node[r]])
            assert float(ancestor[r, node]) == pytest.approx(math.exp(log_p[at_exit, token]), rel=1e-5)


@pytest.mark.parametrize("inputs", [3, 7])
def test_scores_are_sums_along_paths_and_give_trees(grow_pool, inputs):
    torch.manual_seed(3)
    pool = grow_pool(5, 3, 4, 4)
    pool.score[2, 30:] = NEVER
    reranker = Reranker(inputs).requires_grad_(False)
    match = torch.rand(pool.tokens.shape)
    match[match < 0.5] = torch.nan
    ancestor = torch.rand(pool.tokens.shape)
    scores = reranker.scores(pool, match, ancestor)
    assert torch.equal(scores, reranker.scores(pool, match, ancestor, levels=4))
    for r in range(3):
        for node in range(pool.tokens.shape[1]):
            if pool.score[r, node] == NEVER:
                assert scores[r, node] == NEVER
                continue
            parent = int(pool.parents[r, node])
            above = float(pool.score[r, parent]) if parent >= 0 else 0.0
            edge = features(
                *(torch.tensor(value) for value in (float(pool.score[r, node]) - above, above)),
                pool.depth[r, node],
                match[r, node],
                ancestor[r, node],
            )
            before = float(scores[r, parent]) if parent >= 0 else 0.0
            assert float(scores[r, node]) == pytest.approx(before + float(reranker.log_p(edge)), abs=1e-4)
            assert scores[r, node] <= before
    ranked = type(pool)(pool.tokens, pool.parents, pool.depth, scores, pool.branch, pool.width)
    assert select(ranked, 12, "draft").size.tolist() == [12, 12, 12]
