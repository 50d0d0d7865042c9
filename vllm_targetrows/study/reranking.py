# SPDX-License-Identifier: Apache-2.0
"""Trains the reranker on half of the prompts and compares it with ``draft`` on the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

from vllm_targetrows.reranker import DRAFTER_FEATURES, FEATURES, FLOOR, Reranker, features
from vllm_targetrows.selection import path_scores
from vllm_targetrows.study.bootstrap import Prompts, divide, estimate
from vllm_targetrows.study.quantities import REPORTED, accepted_by_score
from vllm_targetrows.study.rounds import Batch, Group

EDGES = 400_000
STEPS = 1500
EDGES_IN_STEP = 1024
LEARNING_RATE = 3e-3
METHODS = ("with rows", "without rows", "substitution")


def halves(requests: Iterable[str], seed: int) -> tuple[set[str], set[str]]:
    """Prompts to train and to test on: the halves of their order by a hash of ``seed`` and request."""
    order = sorted(set(requests), key=lambda request: hashlib.sha256(f"{seed}:{request}".encode()).digest())
    return set(order[: len(order) // 2]), set(order[len(order) // 2 :])


def batch_features(batch: Batch) -> Tensor:
    """float32 ``[R, N, features]``."""
    depth = batch.pool.depth
    return features(batch.log_q, batch.parent_score, depth, batch.token_match_p, batch.ancestor_p)


def compare(group: Group, requests: Sequence[str], resamples: int, seed: int) -> tuple[dict[str, Any], Reranker | None]:
    """The comparison's numbers, and the reranker with rows; none of it where there are too few prompts.

    Args:
        requests: ``[R]`` each of the group's rounds' request.
    """
    training, testing = halves(requests, seed)
    if not training:
        return {"prompts": 0}, None
    x, p = _training_edges(group, training, EDGES, seed)
    rerankers = {
        "with rows": train(x, p, len(FEATURES), seed),
        "without rows": train(x, p, DRAFTER_FEATURES, seed),
    }
    tested: list[str] = []
    parts: dict[str, list[Tensor]] = {"draft": [], **{method: [] for method in METHODS}}
    for batch in tqdm(group.batches(), "reranker: test", group.batch_count, disable=None, leave=False):
        rounds = [i for i, request in enumerate(batch.requests) if request in testing]
        if not rounds:
            continue
        tested += [batch.requests[i] for i in rounds]
        for method, accepted in _accepted(batch, rerankers).items():
            parts[method].append(accepted[rounds])
    prompts = Prompts(tested, resamples, seed)
    samples = {method: prompts.sample(torch.cat(part).numpy()) for method, part in parts.items()}
    numbers: dict[str, Any] = {"prompts": len(testing), "training_prompts": len(training), "edges": len(x)}
    for at, budget in enumerate(REPORTED):
        numbers[str(budget)] = {"draft": estimate(samples["draft"][:, at])}
        for method in METHODS:
            own = samples[method][:, at]
            numbers[str(budget)][method] = estimate(own)
            numbers[str(budget)][f"{method}/draft"] = estimate(divide(own, samples["draft"][:, at]))
        with_rows, without = (samples[method][:, at] for method in METHODS[:2])
        numbers[str(budget)]["with rows/without rows"] = estimate(divide(with_rows, without))
    return numbers, rerankers["with rows"]


def substituted(batch: Batch) -> Tensor:
    """``[R, N]`` edges of direct substitution: log of the token match's probability where there is one, else log q."""
    match = batch.token_match_p.double()
    return torch.where(match.isnan(), batch.log_q, match.clamp(FLOOR, 1.0).log())


def train(x: Tensor, p: Tensor, inputs: int, seed: int) -> Reranker:
    """Fit ``E[p | features]`` by cross-entropy.

    Args:
        x: float32 ``[E, features]``.
        p: float32 ``[E]`` the target's probabilities.
        inputs: how many of the features to use.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reranker = Reranker(inputs)
        reranker.normalise_by(x)
        optimiser = torch.optim.Adam(reranker.parameters(), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=STEPS)
        for _ in tqdm(range(STEPS), f"reranker: train {inputs} features", disable=None, leave=False):
            chosen = torch.randint(len(x), (EDGES_IN_STEP,))
            loss = binary_cross_entropy_with_logits(reranker.logits(x[chosen]), p[chosen])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
    return reranker.requires_grad_(False).eval()


def _training_edges(group: Group, training: set[str], limit: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features ``[E, features]`` and target probabilities ``[E]`` of about ``limit`` edges.

    Each round gives the same number of nodes, likelier paths more often: those decide which tree is chosen.  What is
    kept depends on features alone, so it does not move ``E[p | features]``.
    """
    generator = torch.Generator().manual_seed(seed)
    rounds = sum(
        int(np.isin(recording.rounds.column("request").to_numpy(zero_copy_only=False), list(training)).sum())
        for recording in group.recordings
    )
    share = max(limit // rounds, 8)
    xs, ps = [], []
    for batch in tqdm(group.batches(), "reranker: edges", group.batch_count, disable=None, leave=False):
        chosen = torch.tensor([request in training for request in batch.requests])
        uniform = torch.rand(batch.reach.shape, generator=generator, dtype=torch.float64)
        key = batch.pool.score / 2 - (-uniform.log()).log()  # the largest keys are a draw without replacement
        kept = torch.zeros_like(batch.exists).scatter_(1, key.topk(min(share, key.shape[1]), dim=1).indices, True)
        kept &= batch.exists & chosen[:, None]
        xs.append(batch_features(batch)[kept])
        ps.append(batch.log_p[kept].exp().float())
    return torch.cat(xs), torch.cat(ps)


def _accepted(batch: Batch, rerankers: dict[str, Reranker]) -> dict[str, Tensor]:
    """Expected accepted tokens of each method's trees: float64 ``[R, len(REPORTED)]``."""
    x, at = batch_features(batch), torch.tensor(REPORTED) - 1
    edges = {name: reranker.log_p(x).double() for name, reranker in rerankers.items()}
    edges |= {"draft": batch.log_q, "substitution": substituted(batch)}
    return {name: accepted_by_score(path_scores(batch.pool, edge), batch.reach)[:, at] for name, edge in edges.items()}
