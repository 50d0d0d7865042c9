# SPDX-License-Identifier: Apache-2.0
"""What the parts of a round hand to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_targetrows.engine.rows import TargetRows
from vllm_targetrows.engine.steps import Exits
from vllm_targetrows.trees import Tree


@dataclass
class ProposedTree:
    """What is kept of a request's tree until the scheduler brings it back: its nodes in preorder, then its frontier."""

    tokens: list[int]
    parents: np.ndarray
    size: int  # how many are the tree's
    reason: str | None = None  # why the tree is empty
    first_level: list[int] | None = None  # the pool's first level, likeliest first; None: counted already


@dataclass(frozen=True)
class Acceptable:
    """The nodes that verification may accept: those of the trees, up to where the stopping rule ends.  ``B`` at most.

    The verifier's numbering is that of ``tree``, everything else's that of the scored nodes.
    """

    tree: Tree  # [R, B]
    row_of: torch.Tensor  # int64 [R, B + 1] row of the root and of each node
    place: torch.Tensor | None  # int64 [R, B + 1] 0 and each node's place among the scored ones, + 1; None: the same


@dataclass
class Batch:
    """One step's requests and trees.  ``R`` requests, ``N`` scored nodes at most, ``T`` rows of logits."""

    plan: Any  # the tree layout's; None: no request has a tree
    scored: Tree  # [R, N] the nodes of the tree, then those of its frontier
    tokens: np.ndarray  # int64 [R, N] their tokens on the host
    parents: np.ndarray  # int64 [R, N] and their parents
    sizes: np.ndarray  # int64 [R] scored nodes
    tree_sizes: np.ndarray  # int64 [R] those of the tree
    row_of: torch.Tensor  # int64 [R, N + 1] row of logits of the root and of each scored node
    acceptable: Acceptable
    room: np.ndarray  # int64 [R] the most nodes that can be accepted
    begin: np.ndarray  # int64 [R] first row of each request in the step
    before: np.ndarray  # int64 [R] tokens up to and including the root
    computed: np.ndarray  # int64 [R] tokens computed before the step
    drafts: np.ndarray  # int64 [R] draft tokens scheduled behind the root; those behind the tree's nodes are ignored
    kept: np.ndarray  # bool [R] the step's tokens count (the prompt is complete)
    decoding: np.ndarray  # bool [R] the prompt was complete before the step
    reasons: list[str | None]  # [R] why a request has no tree
    first_levels: list[list[int] | None]  # [R] first level of the pool that the tree was chosen from

    @property
    def root_position(self) -> np.ndarray:
        """int64 ``[R]`` position of the last token before the tree."""
        return self.computed + self.before - 1

    @property
    def last_position(self) -> np.ndarray:
        """int64 ``[R]``: no accepted node is behind it."""
        return self.root_position + self.room


@dataclass(frozen=True)
class Verified:
    """The verifier's decision, on the device.  ``D`` levels at most."""

    exits: Exits
    tokens: torch.Tensor  # int64 [R, D + 2] accepted tokens, continuation, drawn token; -1 = none


@dataclass(frozen=True)
class RootRows:
    """The root rows of ``n`` requests, from a pass of their own or from the verification pass."""

    request: np.ndarray  # int64 [n]
    rows: TargetRows  # n rows
    features: torch.Tensor  # [n, hidden] of the continuation
    node: torch.Tensor | None = None  # int64 [n] the scored node that the row is of; -1: no row, the row given is any
