# SPDX-License-Identifier: Apache-2.0
"""The small steps of a round on a CPU: plain loops, compiled by numba (which vLLM depends on).

A round with one request works on arrays of a few dozen numbers.  There ``TorchSteps`` spends its time on calling some
hundred tensor operations, about a millisecond in a round of twenty; a loop over the nodes takes microseconds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_targetrows.engine.compiled import njit
from vllm_targetrows.engine.rows import TargetRows
from vllm_targetrows.engine.steps import Committed, Exits, Frontier, Level, PathLayout, StepRows, TorchSteps
from vllm_targetrows.trees import Pool, Tree


class HostSteps(TorchSteps):
    """``Steps`` for tensors in the host's memory; what loops cannot speed up is left to torch."""

    def __init__(self) -> None:
        """Compile now: the first request shall not wait for it."""
        one, score = torch.ones((1, 1), dtype=torch.int64), torch.zeros((1, 1))
        self.expand(score[None], one[None], Frontier(one, score, one, one, one), 1, 2)
        tree = self.select(Pool(one, -one, one, score, one - 1, 1), 1, "draft", None, None, None)
        row_of = torch.zeros((1, 2), dtype=torch.int64)
        exits = self.exits(TargetRows(one[0], None, None, None), tree, row_of, None, 1)
        ones, table = one[0].numpy(), one.int()
        step = StepRows(ones - 1, ones, ones, ones, ones > 1, -ones)
        self.committed(step, exits.path, exits.length, torch.ones((1, 3), dtype=torch.int64), table[0], table, 2)
        self.paths(one[0], ones, table, 2, np.ones((1, 1, 2), dtype=np.int64), 2)

    def expand(self, log_q: Tensor, token: Tensor, frontier: Frontier, base: int, depth: int) -> tuple[Level, Frontier]:
        place = (frontier.score.numpy(), frontier.node.numpy(), frontier.branch.numpy())
        parts = _expand(log_q.numpy(), token.numpy(), *place, base, depth)
        tensors = [torch.from_numpy(part) for part in parts]
        return Level(*tensors[:5]), Frontier(*tensors[5:])

    def select(
        self,
        pool: Pool,
        budget: int,
        rule: str,
        root_log_p: Tensor | None,
        drawn: Tensor | None,
        has_row: Tensor | None,
    ) -> Tree:
        if rule != "draft":
            return super().select(pool, budget, rule, root_log_p, drawn, has_row)
        chosen = _top_nodes(pool.tokens.numpy(), pool.parents.numpy(), pool.depth.numpy(), pool.score.numpy(), budget)
        return Tree(*map(torch.from_numpy, chosen))

    def exits(self, rows: TargetRows, tree: Tree, row_of: Tensor, uniforms: Tensor | None, levels: int) -> Exits:
        if rows.probs is not None:
            return super().exits(rows, tree, row_of, uniforms, levels)
        assert rows.argmax is not None
        decided = _follow_argmax(
            rows.argmax.numpy(), tree.tokens.numpy(), tree.parents.numpy(), tree.size.numpy(), row_of.numpy(), levels
        )
        return Exits(*map(torch.from_numpy, decided))

    def committed(
        self, step: StepRows, path: Tensor, length: Tensor, emitted: Tensor, input_ids: Tensor, table: Tensor, size: int
    ) -> Committed:
        of_step = (step.begin, step.before, step.computed, step.carry, step.prompt_token)
        decided = (part.numpy() for part in (path, length, emitted, input_ids, table))
        *parts, last, counts, end = _committed(*of_step, *decided, size)
        rows, tokens, positions, slots = map(torch.from_numpy, parts)
        return Committed(rows, tokens, positions, slots, torch.from_numpy(last), counts, end)

    def paths(
        self, position: Tensor, bound: np.ndarray, table: Tensor, size: int, scratch: np.ndarray, depth: int
    ) -> PathLayout:
        *parts, longest, last_block = _path_layout(position.numpy(), table.numpy(), size, scratch, depth)
        blocks, positions, lengths, slots, context = map(torch.from_numpy, parts)
        return PathLayout(blocks, positions, lengths, slots, context, longest, last_block)


@njit(cache=True)
def _expand(log_q, token, score, node, branch, base, depth):
    """The fields of the next ``Level``, then those of its ``Frontier``; ties go to the earlier node."""
    requests, k, _ = log_q.shape
    size = k * k
    tokens, parents, depths = np.empty((3, requests, size), np.int64)
    scores, branches = np.empty((requests, size), np.float32), np.empty((requests, size), np.int64)
    next_token, next_node, next_branch, next_parent = np.empty((4, requests, k), np.int64)
    next_score = np.empty((requests, k), np.float32)
    depths[:] = depth
    for r in range(requests):
        for i in range(k):
            for j in range(k):
                child = i * k + j
                tokens[r, child], parents[r, child], branches[r, child] = token[r, i, j], node[r, i], branch[r, i]
                scores[r, child] = score[r, i] + log_q[r, i, j]
        best = np.argsort(-scores[r], kind="mergesort")[:k]
        for i, child in enumerate(best):
            next_token[r, i], next_score[r, i] = tokens[r, child], scores[r, child]
            next_node[r, i], next_branch[r, i], next_parent[r, i] = base + child, branches[r, child], child // k
    return tokens, parents, depths, scores, branches, next_token, next_score, next_node, next_branch, next_parent


@njit(cache=True)
def _top_nodes(tokens, parents, depth, score, budget):
    """The ``draft`` rule: the top ``budget`` nodes of each pool, as trees in preorder with the best child first."""
    requests, nodes = score.shape
    budget = min(budget, nodes)
    tree_tokens = np.full((requests, budget), -1)
    tree_parents = np.full((requests, budget), -1)
    tree_depth = np.zeros((requests, budget), np.int64)
    size = np.zeros(requests, np.int64)
    child, sibling = np.empty(nodes + 1, np.int64), np.empty(nodes, np.int64)  # + 1: the root is node 0
    path = np.empty(nodes + 1, np.int64)  # the open nodes, their places in the tree below
    for r in range(requests):
        best = np.argsort(-score[r], kind="mergesort")[:budget]  # stable: shallower first, then pool order
        child[:] = -1
        for node in best[::-1]:
            if score[r, node] > -np.inf:
                sibling[node] = child[parents[r, node] + 1]
                child[parents[r, node] + 1] = node
        place = np.full(nodes + 1, -1)
        top, path[0] = 1, child[0]
        while top:
            node = path[top - 1]
            top -= 1
            if node < 0:
                continue
            path[top], path[top + 1] = sibling[node], child[node + 1]
            top += 2
            i = size[r]
            tree_tokens[r, i], tree_depth[r, i] = tokens[r, node], depth[r, node]
            tree_parents[r, i] = place[parents[r, node] + 1]
            place[node + 1] = i
            size[r] += 1
    return tree_tokens, tree_parents, tree_depth, size


@njit(cache=True)
def _follow_argmax(argmax, tokens, parents, size, row_of, levels):
    """The exit law of greedy requests: go down while a child holds the argmax of its parent's row."""
    requests = len(size)
    exit_node = np.zeros(requests, np.int64)
    length = np.zeros(requests, np.int64)
    path = np.full((requests, levels), -1)
    continuation = np.empty(requests, np.int64)
    for r in range(requests):
        for node in range(size[r]):  # preorder: a node comes after its parent
            at = exit_node[r]
            if parents[r, node] + 1 == at and tokens[r, node] == argmax[row_of[r, at]]:
                exit_node[r] = node + 1
                path[r, length[r]] = node
                length[r] += 1
        continuation[r] = argmax[row_of[r, exit_node[r]]]
    return exit_node, path, length, continuation


@njit(cache=True)
def _committed(begin, before, computed, carry, prompt_token, path, length, emitted, input_ids, block_table, block_size):
    """The fields of ``Committed``."""
    counts = carry + before + length
    rows, tokens, positions, slots = np.empty((4, counts.sum()), np.int64)
    at = 0
    for r in range(len(counts)):
        own = before[r]
        for i in range(-1 if carry[r] else 0, own + length[r]):  # -1: the carried position
            accepted = i - own
            rows[at] = begin[r] + (max(i, 0) if accepted < 0 else own + path[r, accepted])
            if accepted < -1:
                tokens[at] = input_ids[begin[r] + i + 1]
            elif accepted == -1 and prompt_token[r] >= 0:
                tokens[at] = prompt_token[r]
            else:
                tokens[at] = emitted[r, accepted + 1]
            position = computed[r] + i
            positions[at] = position
            slots[at] = block_table[r, position // block_size] * block_size + position % block_size
            at += 1
    return rows, tokens, positions, slots, np.cumsum(counts) - 1, counts, computed + before + length


@njit(cache=True)
def _path_layout(position, block_table, block_size, scratch, depth):
    """The fields of ``PathLayout``."""
    requests, k, tail = scratch.shape
    entries = max(depth - 1, 1)
    widest = (position.max() + 1) // block_size + tail
    table = np.zeros((requests * k, max(widest, block_table.shape[1])), block_table.dtype)
    positions, slots = np.empty((2, entries, requests * k), np.int64)
    longest, last_block = np.zeros((2, entries), np.int64)
    context = np.zeros(requests * k, np.int64)
    for r in range(requests):
        start = position[r] + 1  # position of the first entry
        column = start // block_size  # the scratch blocks replace the request's own from here on
        for path in range(r * k, r * k + k):
            table[path, : block_table.shape[1]] = block_table[r]
            table[path, column : column + tail] = scratch[r, path - r * k]
            if column < block_table.shape[1]:
                context[path] = block_table[r, column]
            for entry in range(entries):
                at = start + entry
                block = at // block_size - column
                positions[entry, path] = at
                slots[entry, path] = scratch[r, path - r * k, block] * block_size + at % block_size
                longest[entry] = max(longest[entry], at + 1)
                last_block[entry] = max(last_block[entry], block)
    return table, positions, (positions + 1).astype(np.int32), slots, context, longest, last_block
