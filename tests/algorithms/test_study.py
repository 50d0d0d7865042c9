# SPDX-License-Identifier: Apache-2.0
"""The study on synthetic recordings: every quantity against a slow, obvious reference."""

from __future__ import annotations

import math

import numpy as np

from vllm_targetrows.recording import RecordedRound, Recorder

NAN = float("nan")


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def synthetic_round(
    rng, request="task/0", position=0, *, width=3, levels=3, vocabulary=8, temperature=1.0, coarse=False, budget=8
):
    """A round whose drafter is the target with noise, grown as EAGLE-3 grows: the best nodes of a level get children.

    ``coarse`` rounds log q, so that ties are common.  The engine verified ``draft``'s tree of ``budget`` nodes.
    """
    width = min(width, vocabulary)
    tokens, parents, log_q, p, match, score = [], [], [], [], [], []
    root_row = np.zeros(0)
    grown, base = [-1], 0
    for _ in range(levels):
        for parent in grown:
            logits = rng.normal(size=vocabulary) * 2
            noisy = np.log(softmax(logits + rng.normal(size=vocabulary)))
            row = softmax(logits / temperature) if temperature else np.eye(vocabulary)[logits.argmax()]
            if parent < 0:
                root_row = row
            for token in np.argsort(-noisy)[:width].tolist():
                tokens.append(token)
                parents.append(parent)
                log_q.append(float(np.float32(min(round(noisy[token]), 0) if coarse else noisy[token])))
                p.append(float(np.float32(row[token])))
                match.append(
                    NAN if rng.random() < 0.2 else float(softmax(logits + rng.normal(size=vocabulary) / 4)[token])
                )
                score.append((score[parent] if parent >= 0 else 0.0) + log_q[-1])
        level = sorted(range(base, len(tokens)), key=lambda node: -score[node])
        grown, base = sorted(level[:width]), len(tokens)
    tree = sorted(sorted(range(len(tokens)), key=lambda node: (-score[node], node))[:budget])
    here, accepted, emitted = -1, 0, []
    while True:
        children = [node for node in tree if parents[node] == here]
        mass = np.array([p[node] for node in children])
        drawn = rng.random()
        at = int(np.searchsorted(mass.cumsum(), drawn))
        if at == len(children):
            break
        here = children[at]
        accepted += 1
        emitted.append(tokens[here])
    top = np.argsort(-root_row)
    return RecordedRound(
        request=request,
        position=position,
        temperature=temperature,
        pool_token=tokens,
        pool_parent=parents,
        pool_log_q=log_q,
        pool_p=p,
        token_match_p=match,
        ancestor_p=[NAN if rng.random() < 0.5 else float(rng.random()) for _ in tokens],
        root_entropy=float(-(root_row[root_row > 0] * np.log(root_row[root_row > 0])).sum()) + rng.random() * 1e-3,
        root_top_token=top[:4].tolist(),
        root_top_p=root_row[top[:4]].tolist(),
        drawn=-1,
        tree=tree,
        accepted=accepted,
        emitted=[*emitted, 0],
        address_variation=NAN if rng.random() < 0.6 else abs(rng.normal()) * 0.004,
        token_variation=NAN if rng.random() < 0.3 else rng.beta(3, 2),
    )


def write(path, rounds, **settings):
    recorder = Recorder(path, settings)
    for each in rounds:
        recorder.add(each)
    recorder.close()
    return path
