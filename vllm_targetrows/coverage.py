# SPDX-License-Identifier: Apache-2.0
"""Coverage of the next root row, and the stopping rules that buy it with accepted tokens.

A round ends with an *exit prefix*: the accepted path and the continuation, the next context relative to this one.  Its
row is reusable iff that very prefix was scored (its *address* matches); the same last token is not enough.  Source:
arXiv 2610.29210.

The laws here are enumerated exactly in float64 on small trees, with host loops: they are for studies and tests.  A
prefix is a tuple of tokens relative to the committed context, the root is ``()``.  Stopping rules:

* ``exhaustive``: walk until the drawn token is no child in the tree.
* ``cap:k``: stop after accepting ``k`` tokens.
* ``sampled_leaf``: when the walk would reach a leaf of the tree, stop at its parent and emit the leaf as continuation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vllm_targetrows.trees import Tree

Prefix = tuple[int, ...]
Rows = Callable[[Prefix], Tensor]
"""The target: float64 ``[V]`` row at a prefix."""


def tree_prefixes(tree: Tree, request: int = 0) -> list[Prefix]:
    """The prefix of each node of one request's tree, in the tree's order."""
    prefixes: list[Prefix] = []
    size = int(tree.size[request])
    nodes = zip(tree.tokens[request, :size].tolist(), tree.parents[request, :size].tolist(), strict=True)
    for token, parent in nodes:
        prefixes.append((*(prefixes[parent] if parent >= 0 else ()), token))
    return prefixes


def frontier(nodes: Collection[Prefix], scored: Collection[Prefix]) -> set[Prefix]:
    """Scored prefixes outside the tree ``nodes`` whose parent is the root or in the tree."""
    inside = {(), *nodes}
    return {prefix for prefix in scored if prefix not in inside and prefix[:-1] in inside}


def next_root_match(
    tokens: Sequence[int], parents: Sequence[int], exit_node: int, continuation: int
) -> tuple[str, int | None]:
    """How a round's scored nodes match the next root, its exit prefix.

    Args:
        tokens, parents: of the scored nodes, parents first, ``-1`` = child of the root.
        exit_node: 0 for the root, ``i + 1`` for node ``i``.

    Returns:
        ``address`` and the node where the exit prefix was scored; ``token_only`` and the first node with its last token
        where only that was; ``none`` and ``None`` otherwise.
    """
    same = [i for i, token in enumerate(tokens) if token == continuation]
    for i in same:
        if parents[i] == exit_node - 1:
            return "address", i
    return ("token_only", same[0]) if same else ("none", None)


def exit_prefix_law(rows: Rows, nodes: Collection[Prefix], rule: str = "exhaustive") -> dict[Prefix, float]:
    """The probability of each exit prefix that can occur.

    Args:
        nodes: prefixes of the tree's nodes, prefix-closed, without the root.
        rule: ``exhaustive``, ``cap:k`` or ``sampled_leaf``.

    Raises:
        ValueError: unknown stopping rule.
    """
    cap = None if rule in ("exhaustive", "sampled_leaf") else _cap(rule)
    inside = set(nodes)
    inner = {prefix[:-1] for prefix in inside}
    # An accepted node is walked on from; the rules differ in which nodes may be accepted.
    accepts = inner & inside if rule == "sampled_leaf" else inside
    if cap is not None:
        accepts = {prefix for prefix in inside if len(prefix) <= cap}
    law: dict[Prefix, float] = {}
    walks: list[tuple[Prefix, float]] = [((), 1.0)]
    for here, mass in walks:  # grows while it is read
        for token, p in enumerate(rows(here).tolist()):
            reached = (*here, token)
            if p == 0:
                continue
            if reached in accepts:
                walks.append((reached, mass * p))
            else:
                law[reached] = mass * p
    return law


def acceptable(parents: np.ndarray, depth: np.ndarray, inside: np.ndarray, rule: str) -> np.ndarray:
    """Which scored nodes a stopping rule lets the verifier accept: bool ``[R, N]``, prefix-closed.

    Stopping at a node is never accepting its children: the exit law over the acceptable nodes is the rule's own law.

    Args:
        parents, depth: int64 ``[R, N]`` of the scored nodes, parents first; the tree's come before its frontier's.
        inside: int64 ``[R]`` how many of them are the tree's.
        rule: ``exhaustive``, ``cap:k`` or ``sampled_leaf``.

    Raises:
        ValueError: unknown stopping rule.
    """
    in_tree = np.arange(parents.shape[1])[None, :] < inside[:, None]
    if rule == "exhaustive":
        return in_tree
    if rule == "sampled_leaf":
        inner = np.zeros((len(parents), parents.shape[1] + 1), dtype=bool)
        request, node = np.nonzero(in_tree)
        inner[request, parents[request, node] + 1] = True
        return in_tree & inner[:, 1:]
    return in_tree & (depth <= _cap(rule))


def _cap(rule: str) -> int:
    """``k`` of ``cap:k``."""
    cap = re.fullmatch(r"cap:(\d+)", rule)
    if cap is None:
        raise ValueError(f"unknown stopping rule {rule!r}; allowed: exhaustive, cap:k, sampled_leaf")
    return int(cap[1])


def coverage(law: Mapping[Prefix, float], scored: Collection[Prefix]) -> float:
    """Probability that the exit prefix was scored."""
    return sum(p for prefix, p in law.items() if prefix in scored)


def expected_accepted(law: Mapping[Prefix, float]) -> float:
    """Expected number of accepted tokens: an exit prefix is the accepted path and one more token."""
    return sum(p * (len(prefix) - 1) for prefix, p in law.items())


def unused_tokens(rows: Rows, nodes: Collection[Prefix], exit_prefix: Prefix) -> float:
    """Tokens that the exhaustive walk is expected to accept beyond a rule that stopped with ``exit_prefix``.

    0 if the continuation is not in the tree; else one for itself, plus the probability of each node below it.
    """
    if exit_prefix not in nodes:
        return 0.0
    total = 1.0
    for node in nodes:
        if len(node) > len(exit_prefix) and node[: len(exit_prefix)] == exit_prefix:
            p = 1.0
            for depth in range(len(exit_prefix), len(node)):
                p *= float(rows(node[:depth])[node[depth]])
            total += p
    return total


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Half the L1 distance of distributions ``[..., V]``, in float64: ``[...]``."""
    return (p.double() - q.double()).abs().sum(dim=-1) / 2


def address_match(scored: Tree, exit_node: Tensor, continuation: Tensor) -> Tensor:
    """The scored prefix that is the exit prefix: int64 ``[R]`` node of ``scored``, ``-1`` if it was not scored.

    Args:
        scored: the scored set as trees ``[R, B]``: the verified nodes and any scored frontier.
        exit_node: int64 ``[R]``, 0 for the root, ``b + 1`` for node ``b`` of ``scored``.
        continuation: int64 ``[R]``.
    """
    same = token_match(scored, continuation) & (scored.parents == exit_node[:, None] - 1)
    return torch.where(same.any(dim=1), same.byte().argmax(dim=1), -1)


def token_match(scored: Tree, continuation: Tensor) -> Tensor:
    """Scored nodes with the continuation's token at any address: bool ``[R, B]``.

    Only ``address_match`` makes a row reusable; this one is for measuring how far off the others are.
    """
    return (scored.tokens == continuation[:, None]) & (scored.depth > 0)
