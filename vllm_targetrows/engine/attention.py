# SPDX-License-Identifier: Apache-2.0
"""Tree attention out of causal attention: every path of a tree is a *virtual sequence*.

The nodes of a tree come in depth-first preorder, so they split into runs: a run starts where a node does not follow
its parent directly and ends at a leaf.  A run is the end of one root-to-leaf path.  For the attention kernel each run
is the query of one sequence of its own, whose keys are the context and that path:

    context  a            tree  a        virtual sequence 0   context a b   queries (root) a b
             |                  |- b                       1   context a c   queries c
             root               `- c

The kernel, its KV layout, its sliding window, soft cap, sinks and fp8 scales stay the platform's own.  What is added is
the block table of each virtual sequence (shared context blocks, then scratch blocks, see ``scratch.py``) and where each
token's key and value are written: a node is written into the blocks of every path that goes through it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm_targetrows.engine.compiled import njit
from vllm_targetrows.engine.host_steps import HostSteps
from vllm_targetrows.engine.scratch import BlockCopier
from vllm_targetrows.engine.steps import Exits, Steps, TorchSteps
from vllm_targetrows.engine.transfer import on_device, on_host


@dataclass(frozen=True)
class Nodes:
    """The nodes that a step verifies, on the host: ``N`` nodes of all trees, ``R`` requests."""

    rows: np.ndarray  # int64 [N] row of every node in the step
    depth: np.ndarray  # int64 [N] depth below the root, 1 = child of the root
    request: np.ndarray  # int64 [N]
    sizes: np.ndarray  # int64 [R] nodes of each request; fewer than proposed where there is no room for all


class TreeLayout(Protocol):
    """How an attention back end lays a step with trees out in the KV cache, and who computes the round's other steps.

    The runner asks for a plan before the target's pass, has the step's metadata changed, and commits after the
    verifier.
    """

    steps: Steps

    def plan(
        self,
        parents: np.ndarray,
        sizes: np.ndarray,
        computed: np.ndarray,
        scheduled: np.ndarray,
        drafts: np.ndarray,
        block_table: np.ndarray,
    ) -> Any:
        """Lay the step out (arguments as of ``plan_tree_step``); the result has ``nodes``, a ``Nodes``."""

    def metadata(
        self,
        step: Any,
        base: CommonAttentionMetadata,
        per_layer: dict[str, Any],
        build: Callable[[CommonAttentionMetadata], dict[str, Any]],
    ) -> dict[str, Any]:
        """The layers' metadata for the pass, out of vLLM's own ``per_layer``; ``build`` makes others."""

    def commit(self, step: Any, exits: Exits) -> None:
        """Move the accepted paths' keys and values into the requests' own slots, all layers at once."""


@dataclass(frozen=True)
class TreeStep:
    """Where every token of one step is computed, written and committed.  All arrays are on the host.

    ``V`` virtual sequences, ``P`` paths in scratch blocks, ``W`` writes, ``R`` requests, ``N`` nodes of all trees.
    """

    nodes: Nodes  # those that fit the scratch blocks
    query_start: np.ndarray  # int32 [V + 1]
    seq_lens: np.ndarray  # int32 [V]
    block_table: np.ndarray  # int32 [V, blocks]
    write_rows: np.ndarray  # int64 [W] row of the step's keys and values
    write_slots: np.ndarray  # int64 [W] slot it is written to
    copy_source: np.ndarray  # int64 [C] context blocks, copied to ...
    copy_destination: np.ndarray  # int64 [C] ... scratch blocks before the pass
    path_of_node: np.ndarray  # int64 [R, B + 1] path (row of path_blocks) that holds the root / node, -1 = in place
    path_blocks: np.ndarray  # int64 [P, tail] scratch blocks of a path, -1 = none
    first_block: np.ndarray  # int64 [R] column of the block table that the scratch blocks replace
    root_position: np.ndarray  # int64 [R]
    own_blocks: np.ndarray  # int32 [R, blocks] the requests' own block table

    def commit_blocks(self, exit_node: np.ndarray, length: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks to copy so that the accepted paths lie in the requests' own blocks.

        Args:
            exit_node: int ``[R]`` exit: 0 = the root, ``i + 1`` = node ``i``.
            length: int ``[R]`` depth of the exit.
            size: block size in tokens.

        Returns:
            ``(source, destination)`` block numbers, int64.
        """
        path = self.path_of_node[np.arange(len(exit_node)), exit_node]
        request = np.flatnonzero(path >= 0)
        path, last_position = path[request], (self.root_position + length)[request]
        columns = np.arange(self.path_blocks.shape[1])[None, :]
        table_columns = self.first_block[request][:, None] + columns
        used = table_columns <= (last_position // size)[:, None]
        source = self.path_blocks[path][used]
        destination = self.own_blocks[np.broadcast_to(request[:, None], used.shape)[used], table_columns[used]]
        return source.astype(np.int64), destination.astype(np.int64)


def plan_tree_step(
    parents: np.ndarray,
    sizes: np.ndarray,
    computed: np.ndarray,
    scheduled: np.ndarray,
    drafts: np.ndarray,
    block_table: np.ndarray,
    block_size: int,
    scratch: np.ndarray,
) -> TreeStep:
    """Lay out a step whose requests may carry trees as virtual sequences.

    Args:
        parents: int ``[R, B]``, parents of the tree nodes in preorder, -1 = child of the root.
        sizes: int ``[R]`` nodes of each tree, 0 = no tree.
        computed: int ``[R]`` tokens of each request whose KV is in the cache.
        scheduled: int ``[R]`` tokens of each request in this step: those up to the root, then its draft tokens.
        drafts: int ``[R]`` draft tokens among them; what is behind a tree's nodes is computed and ignored.
        block_table: int32 ``[R, blocks]``.
        block_size: tokens in a block.
        scratch: int64 ``[S]`` numbers of the scratch blocks, shared evenly by the requests with a tree.  Paths that do
            not fit are left out, with all behind them: a prefix of the preorder stays, which is again a tree.
    """
    arrays = (parents, sizes, computed, scheduled, drafts, block_table, scratch)
    parents, sizes, computed, scheduled, drafts, block_table, scratch = map(np.ascontiguousarray, arrays)
    parts = _lay_out(parents, sizes, computed, scheduled, drafts, block_table, block_size, scratch)
    node_arrays, rest = parts[:4], parts[4:]
    rest = (*rest, computed + scheduled - drafts - 1, block_table)
    return TreeStep(Nodes(*node_arrays), *rest)


@njit(cache=True)
def _lay_out(parents, sizes, computed, scheduled, drafts, block_table, block_size, scratch):
    """``plan_tree_step`` in loops: the fields of ``Nodes``, then those of ``TreeStep``."""
    requests, nodes = len(sizes), sizes.sum()
    share = len(scratch) // max((sizes > 0).sum(), 1)
    most = 2 * requests + nodes  # virtual sequences
    query_start, seq_lens = np.zeros(most + 1, np.int32), np.empty(most, np.int32)
    tables = np.zeros((most, block_table.shape[1]), block_table.dtype)
    most = scheduled.sum()
    for r in range(requests):
        most += sizes[r] * (scheduled[r] - drafts[r] + sizes[r])
    write_rows, write_slots = np.empty(most, np.int64), np.empty(most, np.int64)
    tail = 0
    copy_source, copy_destination = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    node_rows, node_depth, node_request = (
        np.empty(nodes, np.int64),
        np.empty(nodes, np.int64),
        np.empty(nodes, np.int64),
    )
    kept_sizes = np.zeros(requests, np.int64)
    path_of_node = np.full((requests, parents.shape[1] + 1), -1)
    first_scratch = np.empty(nodes + 1, np.int64)  # of each path
    first_block = computed // block_size
    depth = np.empty(parents.shape[1], np.int64)
    sequences, writes, copies, paths, used, kept = 0, 0, 0, 0, 0, 0
    begin = 0
    for r in range(requests):
        before = scheduled[r] - drafts[r]  # tokens up to and including the root
        root = computed[r] + before - 1  # position of the root
        column, table = first_block[r], block_table[r]
        for node in range(sizes[r]):
            depth[node] = 1 if parents[r, node] < 0 else depth[parents[r, node]] + 1

        # The request's own sequence goes on into the tree's first run.
        first = 0
        while first < sizes[r] and parents[r, first] == first - 1:
            first += 1
        for i in range(before + first):
            position = computed[r] + i
            write_rows[writes] = begin + i
            write_slots[writes] = table[position // block_size] * block_size + position % block_size
            writes += 1
        tables[sequences] = table
        seq_lens[sequences] = root + 1 + first
        query_start[sequences + 1] = query_start[sequences] + before + first
        sequences += 1

        # Every further run ends a path in scratch blocks, which get the context's last block and the whole path.
        end_of_share = used + share
        while first < sizes[r]:
            last = first
            while last + 1 < sizes[r] and parents[r, last + 1] == last:
                last += 1
            end = root + depth[last]
            needed = end // block_size - column + 1
            if used + needed > end_of_share:
                break
            tables[sequences] = table
            tables[sequences, column : column + needed] = scratch[used : used + needed]
            seq_lens[sequences] = end + 1
            query_start[sequences + 1] = query_start[sequences] + last - first + 1
            if computed[r] % block_size:
                copy_source[copies], copy_destination[copies] = table[column], scratch[used]
                copies += 1
            for i in range(before):
                position = computed[r] + i
                write_rows[writes] = begin + i
                write_slots[writes] = tables[sequences, position // block_size] * block_size + position % block_size
                writes += 1
            node = last
            while node >= 0:
                position = root + depth[node]
                write_rows[writes] = begin + before + node
                write_slots[writes] = tables[sequences, position // block_size] * block_size + position % block_size
                writes += 1
                node = parents[r, node]
            path_of_node[r, first + 1 : last + 2] = paths
            first_scratch[paths] = used
            tail = max(tail, needed)
            paths += 1
            used += needed
            sequences += 1
            first = last + 1

        # Tokens without a node read block 0, and nobody reads them.
        for node in range(first):
            node_rows[kept], node_depth[kept], node_request[kept] = begin + before + node, depth[node], r
            kept += 1
        kept_sizes[r] = first
        if drafts[r] > first:
            seq_lens[sequences] = drafts[r] - first
            query_start[sequences + 1] = query_start[sequences] + drafts[r] - first
            sequences += 1
        begin += scheduled[r]

    first_scratch[paths] = used
    path_blocks = np.full((paths, tail), -1)
    for p in range(paths):
        blocks = scratch[first_scratch[p] : first_scratch[p + 1]]
        path_blocks[p, : len(blocks)] = blocks
    return (
        node_rows[:kept],
        node_depth[:kept],
        node_request[:kept],
        kept_sizes,
        query_start[: sequences + 1],
        seq_lens[:sequences],
        tables[:sequences],
        write_rows[:writes],
        write_slots[:writes],
        copy_source[:copies],
        copy_destination[:copies],
        path_of_node,
        path_blocks,
        first_block,
    )


def ramp(counts: np.ndarray) -> np.ndarray:
    """``0 .. counts[0] - 1, 0 .. counts[1] - 1, ...``"""
    total = int(counts.sum())
    return np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)


def flat_nodes(parents: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The nodes of all trees, one after the other: request, index in its tree, and parent in this numbering."""
    request, index = np.repeat(np.arange(len(sizes)), sizes), ramp(sizes)
    parent = parents[request, index].astype(np.int64)
    return request, index, np.where(parent >= 0, parent + (np.cumsum(sizes) - sizes)[request], -1)


def depths(node_parent: np.ndarray) -> np.ndarray:
    """Depth of every node, 1 = child of the root; one step per level."""
    depth = np.ones(len(node_parent), dtype=np.int64)
    above = node_parent
    while (has_parent := above >= 0).any():
        depth += has_parent
        above = np.where(has_parent, node_parent[above], -1)
    return depth


class TreeWrites:
    """Mixed into an attention implementation: writes keys and values where the tree step says.

    A step with trees puts ``tree_rows`` and ``tree_slots`` on its attention metadata; every other step is left to the
    implementation it is mixed into.
    """

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            rows = getattr(metadata.get(layer.layer_name), "tree_rows", None)
            if rows is not None:
                key, value = key.index_select(0, rows), value.index_select(0, rows)
                slot_mapping = metadata[layer.layer_name].tree_slots
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]


class VirtualSequences:
    """The layout for kernels that know causal attention only; the layers' implementation mixes in ``TreeWrites``.

    Args:
        kv_caches: all layers' caches, scratch blocks included.
        scratch: int64 ``[S]`` numbers of the scratch blocks.
        block_size: tokens in a KV block.
    """

    def __init__(self, kv_caches: list[torch.Tensor], scratch: np.ndarray, block_size: int) -> None:
        self.steps: Steps = HostSteps() if kv_caches[0].device.type == "cpu" else TorchSteps()
        self._copier = BlockCopier(kv_caches)
        self._scratch = scratch
        self._block_size = block_size
        self._device = kv_caches[0].device
        # Compile the layout's loops now: the first request shall not wait for it.
        one = np.ones(1, dtype=np.int64)
        table = np.zeros((1, 1), dtype=np.int32)
        plan_tree_step(-one[None], one, one - 1, one + one, one, table, block_size, scratch[:1])

    def plan(
        self,
        parents: np.ndarray,
        sizes: np.ndarray,
        computed: np.ndarray,
        scheduled: np.ndarray,
        drafts: np.ndarray,
        block_table: np.ndarray,
    ) -> TreeStep:
        step = plan_tree_step(parents, sizes, computed, scheduled, drafts, block_table, self._block_size, self._scratch)
        self._copier.copy_apart(*on_device(self._device, step.copy_source, step.copy_destination))
        return step

    def metadata(
        self,
        step: TreeStep,
        base: CommonAttentionMetadata,
        per_layer: dict[str, Any],
        build: Callable[[CommonAttentionMetadata], dict[str, Any]],
    ) -> dict[str, Any]:
        virtual, rows, slots = virtual_metadata(step, base, self._device)
        per_layer = build(virtual)
        for metadata in {id(m): m for m in per_layer.values()}.values():
            metadata.tree_rows, metadata.tree_slots = rows, slots
        return per_layer

    def commit(self, step: TreeStep, exits: Exits) -> None:
        exit_node, length = on_host(exits.exit_node, exits.length)
        source, destination = on_device(self._device, *step.commit_blocks(exit_node, length, self._block_size))
        self._copier.copy_apart(source, destination)


class TreeCPUAttentionImpl(TreeWrites, CPUAttentionBackendImpl):
    """The CPU implementation; its kernel is untouched."""


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """The CPU back end with ``TreeCPUAttentionImpl``."""

    tree_layout = VirtualSequences

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return TreeCPUAttentionImpl


def virtual_metadata(
    step: TreeStep, base: CommonAttentionMetadata, device: torch.device
) -> tuple[CommonAttentionMetadata, torch.Tensor, torch.Tensor]:
    """Attention metadata over the virtual sequences, and the rows and slots of the writes.

    Args:
        step: the layout.
        base: the step's own metadata, for the number of tokens and the slot mapping.
        device: where the tensors go.
    """
    query_start_cpu = torch.from_numpy(step.query_start)
    seq_lens = torch.from_numpy(step.seq_lens)
    metadata = CommonAttentionMetadata(
        query_start_loc=query_start_cpu.to(device),
        query_start_loc_cpu=query_start_cpu,
        seq_lens=seq_lens.to(device),
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(step.seq_lens),
        num_actual_tokens=base.num_actual_tokens,
        max_query_len=int(np.diff(step.query_start).max()),
        max_seq_len=int(step.seq_lens.max()),
        block_table_tensor=torch.from_numpy(step.block_table).to(device),
        slot_mapping=base.slot_mapping,
        causal=True,
        positions=base.positions,
    )
    return metadata, torch.from_numpy(step.write_rows).to(device), torch.from_numpy(step.write_slots).to(device)
