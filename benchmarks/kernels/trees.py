# SPDX-License-Identifier: Apache-2.0
"""Random draft trees for the kernels' benchmarks."""

from __future__ import annotations

import random

import torch


def preorder_tree(nodes: int, seed: int, deepest: int = 8) -> list[int]:
    """Parents of a random tree in depth-first preorder, -1 = child of the root, no deeper than ``deepest``."""
    generator = random.Random(seed)
    parents: list[int] = []
    path: list[int] = []  # nodes from the root to the last node
    for node in range(nodes):
        keep = len(path) if len(path) < deepest and generator.random() < 0.6 else generator.randrange(len(path) or 1)
        path = path[:keep]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents


def batch_of_trees(requests: int, nodes: int, device: torch.device) -> torch.Tensor:
    """int32 ``[requests, nodes]``, a different tree for each request."""
    return torch.tensor([preorder_tree(nodes, seed) for seed in range(requests)], dtype=torch.int32, device=device)


def distinct_siblings(parents: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """int64 ``[R, N]`` tokens, different among siblings."""
    tokens = torch.zeros(parents.shape, dtype=torch.int64)
    for r, row in enumerate(parents.tolist()):
        generator = random.Random(r)
        children: dict[int, set[int]] = {}
        for node, parent in enumerate(row):
            taken = children.setdefault(parent, set())
            token = generator.randrange(vocabulary)
            while token in taken:
                token = (token + 1) % vocabulary
            taken.add(token)
            tokens[r, node] = token
    return tokens.to(parents.device)
