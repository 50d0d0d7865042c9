# SPDX-License-Identifier: Apache-2.0
"""What every test shares: the environment of the processes, folders of models and data, random pools and trees."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import hypothesis
import pytest
import torch

from vllm_targetrows.trees import Pool, Tree

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# Kernels run in the interpreter, which is chosen before anything imports triton; vLLM on the CPU does not use it.
os.environ["TRITON_INTERPRET"] = "1"

hypothesis.settings.register_profile("no deadline", deadline=None)  # a busy machine fails no test
hypothesis.settings.load_profile("no deadline")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def target_folder() -> Path:
    """The embedded target, prepared on first use."""
    from vllm_targetrows import embedded

    return embedded.target_folder()


@pytest.fixture(scope="session")
def drafter_folder() -> Path:
    """The embedded drafter."""
    from vllm_targetrows import embedded

    return embedded.drafter_folder()


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """Data that lies beside the repository, or where VLLM_TARGETROWS_SHARED says; the test is skipped without it."""
    folder = Path(os.environ.get("VLLM_TARGETROWS_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no folder of shared data at {folder}; VLLM_TARGETROWS_SHARED can name one")
    return folder


# ------------------------------------------------------------------ random pools and trees


def _grow_pool(seed: int, requests: int, width: int, levels: int, vocabulary: int = 12, coarse: bool = False) -> Pool:
    """Pools grown as EAGLE-3 grows them: the best ``width`` nodes of a level get ``width`` children each.

    ``coarse`` takes scores from few values, so that ties are common.
    """
    generator = torch.Generator().manual_seed(seed)

    def log_q(*shape: int) -> torch.Tensor:
        value = torch.rand(*shape, generator=generator) * 3
        return -(value.round() if coarse else value)

    def distinct(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, vocabulary, generator=generator).argsort(dim=-1)[..., :width]

    score, tokens = log_q(requests, width), distinct(requests)
    parents = torch.full((requests, width), -1)
    branch = torch.arange(width).expand(requests, width)
    parts = [(tokens, parents, torch.ones_like(tokens), score, branch)]
    node, base = branch, width
    for level in range(2, levels + 1):
        tokens = distinct(requests, width).reshape(requests, -1)
        score = (score[:, :, None] + log_q(requests, width, width)).view(requests, -1)
        parents, branch = node.repeat_interleave(width, dim=1), branch.repeat_interleave(width, dim=1)
        parts.append((tokens, parents, torch.full_like(tokens, level), score, branch))
        score, best = score.topk(width, dim=1)
        branch, node = branch.gather(1, best), base + best
        base += width * width
    fields = [torch.cat([part[i] for part in parts], dim=1) for i in range(5)]
    return Pool(*fields, width=width)


def _one_tree(parents: Sequence[int], tokens: Sequence[int] | None = None, columns: int | None = None) -> Tree:
    """The tree of one request from its parents, which must be in preorder; padded to ``columns``."""
    size = len(parents)
    padding = (columns if columns is not None else size) - size
    depth: list[int] = []
    for parent in parents:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    named = list(tokens) if tokens is not None else list(range(size))
    return Tree(
        tokens=torch.tensor([named + [-1] * padding], dtype=torch.int64).view(1, -1),
        parents=torch.tensor([list(parents) + [-1] * padding], dtype=torch.int64).view(1, -1),
        depth=torch.tensor([depth + [0] * padding], dtype=torch.int64).view(1, -1),
        size=torch.tensor([size]),
    )


def _stack_trees(trees: Sequence[Tree]) -> Tree:
    """Trees of equal columns as one batch."""
    return Tree(
        *(torch.cat([getattr(tree, name) for tree in trees]) for name in ("tokens", "parents", "depth", "size"))
    )


def _random_tree(seed: int, size: int, vocabulary: int, columns: int | None = None) -> Tree:
    """A tree of one request in preorder, siblings with different tokens."""
    rng = random.Random(seed)
    parents: list[int] = []
    tokens: list[int] = []
    spine = [-1]  # path to the last node: a preorder may go on below any of them
    while len(parents) < size:
        at = rng.randrange(len(spine))
        used = {t for t, p in zip(tokens, parents, strict=True) if p == spine[at]}
        free = [t for t in range(vocabulary) if t not in used]
        if not free:
            continue
        spine = [*spine[: at + 1], len(parents)]
        parents.append(spine[at])
        tokens.append(rng.choice(free))
    return _one_tree(parents, tokens, columns)


@pytest.fixture(scope="session")
def grow_pool() -> Callable[..., Pool]:
    return _grow_pool


@pytest.fixture(scope="session")
def one_tree() -> Callable[..., Tree]:
    return _one_tree


@pytest.fixture(scope="session")
def stack_trees() -> Callable[..., Tree]:
    return _stack_trees


@pytest.fixture(scope="session")
def random_tree() -> Callable[..., Tree]:
    return _random_tree
