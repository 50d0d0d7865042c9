# SPDX-License-Identifier: Apache-2.0
"""Pools and trees as parents-first arrays, batched over requests.

``R`` requests, ``N`` pool nodes, ``B`` tree nodes.  The root is no node: parent ``-1`` means "child of the root".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Pool:
    """The candidates that the drafter grew below each request's root, a prefix-closed trie.

    Nodes are stored level by level, so that parents come first and shallower nodes have smaller indices.  The first
    level is the first ``width`` nodes.  Siblings have different tokens.  A node whose score is ``-inf`` does not exist.

    Attributes:
        tokens: int64 ``[R, N]``.
        parents: int64 ``[R, N]`` pool index of the parent, ``-1`` for a child of the root.
        depth: int64 ``[R, N]``, 1 for a child of the root.
        score: float ``[R, N]`` sum of ``log q`` along the path.  Never larger than the parent's.
        branch: int64 ``[R, N]`` pool index of the ancestor in the first level (the node itself at depth 1).
        width: number of nodes in the first level, the same for all requests.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    score: Tensor
    branch: Tensor
    width: int


def concatenated(pools: Sequence[Pool]) -> Pool:
    """The requests of several pools of the same ``width`` in one, the smaller ones filled up with absent nodes."""
    size = max(pool.tokens.shape[1] for pool in pools)
    absent = {"tokens": 0, "parents": -1, "depth": 1, "score": float("-inf"), "branch": 0}
    fields = {
        name: torch.cat([pad(getattr(pool, name), (0, size - pool.tokens.shape[1]), value=value) for pool in pools])
        for name, value in absent.items()
    }
    return Pool(**fields, width=pools[0].width)


@dataclass(frozen=True)
class Tree:
    """The nodes to verify, in depth-first preorder with the best child first.

    Parents come first, every prefix of the node list is a tree, and node ``i`` starts a new root-to-leaf path iff
    ``parents[i] != i - 1``.  Padding behind ``size`` nodes: token ``-1``, parent ``-1``, depth 0.

    Attributes:
        tokens: int64 ``[R, B]``.
        parents: int64 ``[R, B]`` index into the tree, ``-1`` for a child of the root.
        depth: int64 ``[R, B]``, 1 for a child of the root.
        size: int64 ``[R]`` number of nodes.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    size: Tensor

    @classmethod
    def empty(cls, requests: int, device: torch.device | str = "cpu") -> Tree:
        """Trees without nodes (and without columns)."""
        none = torch.empty((requests, 0), dtype=torch.int64, device=device)
        return cls(none, none, none, torch.zeros(requests, dtype=torch.int64, device=device))


def deepest(depth: Tensor) -> int:
    """Largest depth in the batch, 0 without nodes."""
    return int(depth.max()) if depth.numel() else 0


def ancestor_mask(parents: Tensor, depth: Tensor) -> Tensor:
    """Which nodes lie on the path to which: bool ``[R, B, B]``, ``[r, i, j]`` iff ``j`` is ``i`` or an ancestor of it.

    By pointer doubling: after ``k`` passes every node knows its ``2 ** k - 1`` nearest ancestors.

    Args:
        parents: int64 ``[R, B]``, ``-1`` for children of the root and for padding.
        depth: int64 ``[R, B]``.
    """
    requests, nodes = parents.shape
    itself = torch.arange(nodes, device=parents.device)
    mask = (itself[:, None] == itself).expand(requests, nodes, nodes)
    up = torch.where(parents < 0, itself, parents)  # a child of the root points at itself: OR-ing it again is harmless
    for k in range((deepest(depth) - 1).bit_length() if nodes else 0):
        if k:
            up = up.gather(1, up)
        mask = mask | mask.gather(1, up[:, :, None].expand(requests, nodes, nodes))
    return mask


def depth_first_preorder(parents: Tensor, depth: Tensor, levels: int | None = None) -> Tensor:
    """The place of each node in depth-first preorder: int64 ``[R, B]``.

    Siblings keep their incoming order and padding goes last.  A node's place is the number of its ancestors plus the
    sizes of all subtrees that hang off its path to the left.  Both sums are by pointer doubling.

    Args:
        parents: int64 ``[R, B]``, parents first, ``-1`` for children of the root and for padding (which comes last).
        depth: int64 ``[R, B]``.
        levels: no tree is deeper; looked up where not given.
    """
    levels = deepest(depth) if levels is None else levels
    requests, nodes = parents.shape
    up = torch.cat((parents.new_zeros((requests, 1)), parents + 1), dim=1)  # the root is node 0 here, its own parent
    subtree = torch.ones_like(up)  # the root's own count is never read
    ups = []  # ups[k] leads 2 ** k levels up
    for _ in range((levels - 1).bit_length() if nodes and levels else 0):
        ups.append(up)
        subtree = subtree.scatter_add(1, up, subtree)
        up = up.gather(1, up)
    node = torch.arange(nodes, device=parents.device)
    # Not tril(): on a CPU that starts all threads whatever the size.
    earlier_sibling = (parents[:, :, None] == parents[:, None, :]) & (node[:, None] > node)
    place = torch.zeros_like(up)
    place[:, 1:] = (earlier_sibling * subtree[:, None, 1:]).sum(dim=2) + 1
    for up in ups:
        place = place + place.gather(1, up)
    return place[:, 1:] - 1


def truncate(tree: Tree, size: Tensor) -> Tree:
    """Keep the first ``size`` nodes (int64 ``[R]``) of each tree: a prefix of the preorder is prefix-closed."""
    size = torch.minimum(size, tree.size)
    cut = torch.arange(tree.tokens.shape[1], device=size.device) >= size[:, None]
    return Tree(
        tokens=tree.tokens.masked_fill(cut, -1),
        parents=tree.parents.masked_fill(cut, -1),
        depth=tree.depth.masked_fill(cut, 0),
        size=size,
    )
