# SPDX-License-Identifier: Apache-2.0
"""Exact verification of a tree: the exhaustive traversal and its exit law.

*Traversal*: at the current node draw ``y`` from its row; a child ``y`` is accepted and the walk goes on there, any
other ``y`` is the continuation.  *Exit law*: with ``P(v)`` the product of row probabilities along the path to ``v`` and
``m(v)`` the mass of ``row(v)`` on the children of ``v``, the walk exits at ``v`` with probability ``P(v) (1 - m(v))``,
and the continuation follows ``row(v)`` with the children removed.  Source: "Where Draft Trees Lose Target Mass:
Exit-Guided Speculative Decoding" (TEV).

Everything but the traversal is batched over ``R`` requests.  ``T`` rows, vocabulary ``V``, ``B`` tree nodes.  Nodes
and root share one numbering where a function says ``[R, B + 1]``: 0 is the root, ``b + 1`` is node ``b``.  ``row_of``,
int64 ``[R, B + 1]``, gives their rows; padding may point at any row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_targetrows.trees import Tree, deepest


def exhaustive_traversal(rows: Tensor, tree: Tree, uniforms: Sequence[float]) -> tuple[list[int], int]:
    """The reference walk over the tree of one request.

    Args:
        rows: float64 ``[n + 1, V]`` rows of the root and of the ``n`` nodes.
        tree: of one request, ``n`` nodes.
        uniforms: one number in ``[0, 1)`` per draw; as many as the tree is deep, and one more.

    Returns:
        The accepted nodes, root side first, and the continuation.
    """
    size = int(tree.size[0])
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    path: list[int] = []
    here = -1
    for uniform in uniforms:
        drawn = int(draw_token(rows[here + 1][None], rows.new_tensor([uniform], dtype=torch.float64))[0])
        child = [b for b in range(size) if parents[b] == here and tokens[b] == drawn]
        if not child:
            return path, drawn
        here = child[0]
        path.append(here)
    raise ValueError(f"the walk needs more than {len(uniforms)} uniforms")


def path_products(child_p: Tensor, parents: Tensor, depth: Tensor, levels: int | None = None) -> Tensor:
    """``P``: product of the edges' probabilities along each path, float64 ``[R, B + 1]``; 1 at the root, 0 at padding.

    By pointer doubling: after ``k`` passes every node has multiplied its ``2 ** k`` nearest edges.

    Args:
        child_p: float ``[R, B]`` probability of each node's token in its parent's row.
        parents, depth: int64 ``[R, B]`` of the tree.
        levels: no tree is deeper; looked up where not given.
    """
    levels = deepest(depth) if levels is None else levels
    requests = child_p.shape[0]
    product = child_p.new_ones((requests, child_p.shape[1] + 1), dtype=torch.float64)
    product[:, 1:] = torch.where(depth > 0, child_p, 0)
    up = torch.cat((parents.new_zeros((requests, 1)), parents + 1), dim=1)  # the root points at itself, with product 1
    for k in range((levels - 1).bit_length() if levels else 0):
        if k:
            up = up.gather(1, up)
        product = product * product.gather(1, up)
    return product


def expected_length(probs: Tensor, tree: Tree, row_of: Tensor, levels: int) -> Tensor:
    """The number of accepted tokens that the rows let expect: the sum of ``P`` over the nodes, float64 ``[R]``.

    Args:
        probs: float ``[T, V]``, each row a distribution.
        levels: no tree is deeper.
    """
    child_p = probs[row_of.gather(1, tree.parents + 1), tree.tokens.clamp(min=0)].double()
    return path_products(child_p, tree.parents, tree.depth, levels)[:, 1:].sum(dim=1)


def exit_law(child_p: Tensor, residual: Tensor, tree: Tree) -> Tensor:
    """Law of the exit, ``P(v) (1 - m(v))``: float64 ``[R, B + 1]``, 0 at padding.

    Args:
        child_p, residual: ``[R, B]`` and ``[R, B + 1]`` from ``edge_masses`` or ``edge_masses_greedy``.
    """
    return path_products(child_p, tree.parents, tree.depth) * residual


def draw_exit(law: Tensor, uniform: Tensor) -> Tensor:
    """Draw an exit per request: int64 ``[R]``, 0 for the root, ``b + 1`` for node ``b``.

    Args:
        law: float ``[R, B + 1]``, need not be normalised.  An exit without mass is never drawn.
        uniform: float64 ``[R]`` in ``[0, 1)``.
    """
    return draw_token(law, uniform)


def draw_token(mass: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token per request by the inverse distribution function in float64: int64 ``[R]``.

    Args:
        mass: float ``[R, V]``, not negative, need not be normalised.  A token without mass is never drawn.
        uniform: float64 ``[R]`` in ``[0, 1)``.
    """
    # Entries without mass are taken out of the running: a parallel scan need not be monotone to the last bit.
    cumulative = mass.cumsum(dim=1, dtype=torch.float64).masked_fill_(mass == 0, -1.0)
    total = cumulative.amax(dim=1)
    # A product that rounds up to the total would find no entry.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative > target[:, None]).byte().argmax(dim=1)


def accepted_path(tree: Tree, exit_node: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes from below the root to the exit.

    In preorder the exit's ancestor at depth ``d`` is the last node of that depth that does not come after the exit.

    Args:
        exit_node: int64 ``[R]``, 0 for the root, ``b + 1`` for node ``b``.

    Returns:
        path: int64 ``[R, D]`` nodes, root side first, padded with ``-1``; ``D`` is the deepest tree's depth.
        length: int64 ``[R]`` accepted tokens.
    """
    requests, nodes = tree.depth.shape
    levels = deepest(tree.depth)
    index = torch.arange(nodes, device=exit_node.device)
    last = exit_node[:, None] - 1
    up_to_exit = torch.where(index <= last, index, -1)
    path = torch.full((requests, levels + 1), -1, dtype=torch.int64, device=exit_node.device)
    path.scatter_reduce_(1, tree.depth, up_to_exit, "amax")
    length = torch.cat((torch.zeros_like(last), tree.depth), dim=1).gather(1, exit_node[:, None])
    deeper = torch.arange(levels, device=exit_node.device) >= length
    return path[:, 1:].masked_fill_(deeper, -1), length[:, 0]


def edge_masses(probs: Tensor, tree: Tree, row_of: Tensor) -> tuple[Tensor, Tensor]:
    """What the exit law needs from the rows.

    Args:
        probs: float ``[T, V]``, contiguous, each row a distribution.  The entries of its children are taken out while
            the remaining mass is summed, and put back bit for bit: nobody else may read it meanwhile.

    Returns:
        child_p: float64 ``[R, B]`` probability of each node's token in its parent's row, 0 for padding.
        residual: float64 ``[R, B + 1]`` mass that each row leaves outside the node's children.  Summed from what is
            left, so that it is exact where the children hold almost everything.
    """
    vocabulary = probs.shape[1]
    place = row_of.gather(1, tree.parents + 1) * vocabulary + tree.tokens.clamp(min=0)
    place, flat = place.view(-1), probs.view(-1)
    child_p = flat[place].masked_fill_(tree.depth.view(-1) == 0, 0)
    # Subtracting an entry from itself leaves an exact zero, and padding subtracts nothing.
    flat.index_add_(0, place, child_p, alpha=-1)
    residual = probs.sum(dim=1).double()[row_of]
    flat.index_add_(0, place, child_p)
    return child_p.view(tree.depth.shape).double(), residual


def edge_masses_greedy(argmax: Tensor, tree: Tree, row_of: Tensor) -> tuple[Tensor, Tensor]:
    """``edge_masses`` of greedy requests, whose rows are point masses.

    Args:
        argmax: int64 ``[T]`` each row's token.
    """
    on_edge = argmax[row_of.gather(1, tree.parents + 1)] == tree.tokens  # padding's token -1 is no argmax
    child_p = on_edge.double()
    residual = torch.ones(row_of.shape, dtype=torch.float64, device=argmax.device)
    return child_p, residual.scatter_add_(1, tree.parents + 1, -child_p)


def residual_row(probs: Tensor, tree: Tree, exit_node: Tensor, row_of: Tensor) -> Tensor:
    """The exits' rows without the exits' children, ``[R, V]``, not normalised: the law of the continuation.

    Args:
        probs: float ``[T, V]``.
        exit_node: int64 ``[R]``, 0 for the root, ``b + 1`` for node ``b``.
    """
    row = probs[row_of.gather(1, exit_node[:, None])[:, 0]]
    child = (tree.parents == exit_node[:, None] - 1) & (tree.depth > 0)
    tokens = tree.tokens.clamp(min=0)
    taken = row.gather(1, tokens).masked_fill_(~child, 0)
    return row.scatter_add_(1, tokens, -taken)
