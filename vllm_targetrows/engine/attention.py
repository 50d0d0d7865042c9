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

from vllm_targetrows.engine.scratch import BlockCopier
from vllm_targetrows.engine.steps import Steps, TorchSteps


@dataclass(frozen=True)
class Nodes:
    """The nodes that a step verifies, on the host: ``N`` nodes of all trees, ``R`` requests."""

    rows: np.ndarray  # int64 [N] row of every node in the step
    depth: np.ndarray  # int64 [N] depth below the root, 1 = child of the root
    request: np.ndarray  # int64 [N]
    sizes: np.ndarray  # int64 [R] nodes of each request; fewer than proposed where there is no room for all


@dataclass(frozen=True)
class Accepted:
    """The accepted paths that a commit moves, on the host: ``n`` requests, ``D`` levels, ``R`` requests in the step."""

    request: np.ndarray  # int64 [n]
    exit: np.ndarray  # int64 [n] i + 1 = node i
    path: np.ndarray  # int64 [n, D] accepted nodes, root side first, -1 behind them
    length: np.ndarray  # int64 [n], at least 1
    root_position: np.ndarray  # int64 [n]
    block_table: np.ndarray  # int32 [R, blocks]


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

    def commit(self, step: Any, accepted: Accepted) -> None:
        """Move the accepted paths' keys and values into the requests' own slots, all layers at once."""


@dataclass(frozen=True)
class TreeStep:
    """Where every token of one step is computed, written and committed.  All arrays are on the host.

    ``V`` virtual sequences, ``P`` paths in scratch blocks, ``W`` writes, ``R`` requests, ``N`` nodes of all trees.
    """

    query_start: np.ndarray  # int32 [V + 1]
    seq_lens: np.ndarray  # int32 [V]
    block_table: np.ndarray  # int32 [V, blocks]
    write_rows: np.ndarray  # int64 [W] row of the step's keys and values
    write_slots: np.ndarray  # int64 [W] slot it is written to
    copy_source: np.ndarray  # int64 [C] context blocks, copied to ...
    copy_destination: np.ndarray  # int64 [C] ... scratch blocks before the pass
    nodes: Nodes  # those that fit the scratch blocks
    path_of_node: np.ndarray  # int64 [R, B + 1] path (row of path_blocks) that holds the root / node, -1 = in place
    path_blocks: np.ndarray  # int64 [P, tail] scratch blocks of a path, -1 = none
    first_block: np.ndarray  # int64 [R] column of the block table that the scratch blocks replace

    def commit_blocks(
        self, request: np.ndarray, exit_node: np.ndarray, last_position: np.ndarray, block_table: np.ndarray, size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Blocks to copy so that the accepted path lies in the request's own blocks.

        Args:
            request: int ``[n]`` batch rows.
            exit_node: int ``[n]`` exit: 0 = the root, ``i + 1`` = node ``i``.
            last_position: int ``[n]`` position of the exit node.
            block_table: int ``[R, blocks]`` the requests' own blocks.
            size: block size in tokens.

        Returns:
            ``(source, destination)`` block numbers, int64.
        """
        path = self.path_of_node[request, exit_node]
        moved = path >= 0
        request, path, last_position = request[moved], path[moved], last_position[moved]
        columns = np.arange(self.path_blocks.shape[1])[None, :]
        table_columns = self.first_block[request][:, None] + columns
        used = table_columns <= (last_position // size)[:, None]
        source = self.path_blocks[path][used]
        destination = block_table[np.broadcast_to(request[:, None], used.shape)[used], table_columns[used]]
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
    requests = len(sizes)
    arange = np.arange
    begin = np.cumsum(scheduled) - scheduled  # first row of each request
    before = scheduled - drafts  # tokens up to and including the root
    root = computed + before - 1  # position of the root
    column = computed // block_size  # first block that is not wholly computed

    # The nodes of all trees, one after the other, and the runs that they form.
    node_request, node_index, node_parent = flat_nodes(parents, sizes)
    parent = parents[node_request, node_index]
    depth = depths(node_parent)
    first = np.flatnonzero((node_index == 0) | (parent != node_index - 1))
    length = np.diff(np.append(first, len(node_index)))
    last = first + length - 1
    run_request = node_request[first]
    in_place = node_index[first] == 0
    needed = np.where(in_place, 0, (root[run_request] + depth[last]) // block_size - column[run_request] + 1)

    # Keep the runs whose scratch blocks fit each request's share.
    share = len(scratch) // max(int((sizes > 0).sum()), 1)
    running = np.cumsum(needed)
    of_earlier_requests = (running - needed)[np.searchsorted(run_request, run_request)]
    kept = running - of_earlier_requests <= share
    node_kept = np.repeat(kept, length)
    sizes = np.bincount(node_request[node_kept], minlength=requests)
    moved = np.flatnonzero(kept & ~in_place)
    needed, run_request_moved = needed[moved], run_request[moved]
    path_blocks = np.full((len(moved), max(needed, default=1)), -1, dtype=np.int64)
    used = arange(path_blocks.shape[1])[None, :] < needed[:, None]
    path_blocks[used] = scratch[: int(needed.sum())]

    # Virtual sequences: each request's own, then its paths in scratch blocks, then its ignored tokens.
    nodes_in_place = np.bincount(run_request[kept & in_place], weights=length[kept & in_place], minlength=requests)
    nodes_in_place = nodes_in_place.astype(np.int64)
    ignored = drafts - sizes
    idle = np.flatnonzero(ignored)
    request = np.concatenate((arange(requests), run_request_moved, idle))
    kind = np.repeat((0, 1, 2), (requests, len(moved), len(idle)))
    order = np.lexsort((kind, request))  # stable: paths keep their order
    queries = np.concatenate((before + nodes_in_place, length[moved], ignored[idle]))
    path_end = root[run_request_moved] + depth[last[moved]]
    seq_lens = np.concatenate((root + 1 + nodes_in_place, path_end + 1, ignored[idle]))
    table = block_table[request].copy()
    path_row = requests + np.repeat(arange(len(moved)), needed)
    table[path_row, column[request[path_row]] + ramp(needed)] = path_blocks[used]
    table[requests + len(moved) :] = 0  # ignored tokens read block 0, and nobody reads them

    # Writes: into the request's own blocks, then each path into its scratch blocks.
    own = before + nodes_in_place
    own_request, own_index = np.repeat(arange(requests), own), ramp(own)
    own_position = computed[own_request] + own_index
    node_row = (begin + before)[node_request] + node_index
    node_position = root[node_request] + depth
    before_path = before[run_request_moved]
    path, index = np.repeat(arange(len(moved)), before_path), ramp(before_path)
    paths, rows = [path], [begin[run_request_moved[path]] + index]
    positions = [computed[run_request_moved[path]] + index]
    path, node = arange(len(moved)), last[moved]
    while len(node):  # from the leaves up, one level at a time
        paths.append(path)
        rows.append(node_row[node])
        positions.append(node_position[node])
        path, node = path[node_parent[node] >= 0], node_parent[node][node_parent[node] >= 0]
    path, row, position = np.concatenate(paths), np.concatenate(rows), np.concatenate(positions)
    path_block = path_blocks[path, position // block_size - column[run_request_moved[path]]]
    own_block = block_table[own_request, own_position // block_size].astype(np.int64)
    copied = computed[run_request_moved] % block_size > 0

    path_of_node = np.full((requests, parents.shape[1] + 1), -1, dtype=np.int64)
    moved_node = np.repeat(moved, length[moved])
    node = first[moved_node] + ramp(length[moved])
    path_of_node[node_request[node], node_index[node] + 1] = np.repeat(arange(len(moved)), length[moved])
    return TreeStep(
        query_start=np.concatenate(([0], np.cumsum(queries[order]))).astype(np.int32),
        seq_lens=seq_lens[order].astype(np.int32),
        block_table=table[order],
        write_rows=np.concatenate((begin[own_request] + own_index, row)),
        write_slots=np.concatenate(
            (own_block * block_size + own_position % block_size, path_block * block_size + position % block_size)
        ),
        copy_source=block_table[run_request_moved, column[run_request_moved]][copied].astype(np.int64),
        copy_destination=path_blocks[copied, 0],
        nodes=Nodes(node_row[node_kept], depth[node_kept], node_request[node_kept], sizes),
        path_of_node=path_of_node,
        path_blocks=path_blocks,
        first_block=column.astype(np.int64),
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
        self.steps: Steps = TorchSteps()
        self._copier = BlockCopier(kv_caches)
        self._scratch = scratch
        self._block_size = block_size
        self._device = kv_caches[0].device

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
        self._copy(step.copy_source, step.copy_destination)
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

    def commit(self, step: TreeStep, accepted: Accepted) -> None:
        last_position = accepted.root_position + accepted.length
        self._copy(
            *step.commit_blocks(accepted.request, accepted.exit, last_position, accepted.block_table, self._block_size)
        )

    def _copy(self, source: np.ndarray, destination: np.ndarray) -> None:
        self._copier.copy(*(torch.from_numpy(blocks).to(self._device) for blocks in (source, destination)))


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
