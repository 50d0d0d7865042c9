# SPDX-License-Identifier: Apache-2.0
"""Recording rounds in the engine (``record``), for the study.

A recorded round takes three steps of its request.  When its pool has been grown, one more target pass over the pool's
inner nodes gives the target's probability of every pool node.  The next step verifies the tree: the outcome is known.
The step after that computes the next root row, which is compared with the row that the pool had for it.

Recording looks at the device as it likes, and it may slow a round down to a tenth of its speed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_targetrows.coverage import total_variation
from vllm_targetrows.engine.rows import TargetRows
from vllm_targetrows.engine.scratch import BlockCopier, tail_blocks
from vllm_targetrows.engine.transfer import on_device
from vllm_targetrows.recording import RecordedRound, Recorder
from vllm_targetrows.selection import NEVER
from vllm_targetrows.trees import Pool

if TYPE_CHECKING:
    from vllm_targetrows.engine.batch import Batch, Verified
    from vllm_targetrows.engine.config import TargetRowsConfig
    from vllm_targetrows.engine.runner import TreeRounds

TOP = 10  # tokens kept of a root row
UNKNOWN = float("nan")


class HostPool(NamedTuple):
    """One request's pool: arrays over its ``N`` existing nodes, parents before children."""

    tokens: np.ndarray  # int64
    parents: np.ndarray  # int64, -1 = the root
    log_q: np.ndarray  # float32, of the node given its parent
    inner: np.ndarray  # int64 nodes with children, in preorder


@dataclass
class _Waiting:
    """A round whose outcome, and then whose next root row, is not known yet."""

    recorded: RecordedRound
    pool: HostPool
    rows: TargetRows  # of the root and of the inner nodes
    greedy: bool
    address: int | None = None  # place in ``rows`` of the next root's address
    token: int | None = None  # and of the first inner node with only its last token


class RoundRecorder:
    """Records rounds of a runner.

    Args:
        runner: does the passes.
        recorder: takes the finished rounds; ``None`` on the other ranks of a tensor-parallel group, whose passes are
            needed all the same.
        rate: share of the steps whose rounds are recorded, chosen at random with a fixed seed.
        scratch: int64 ``[S]`` numbers of the scratch blocks.
        copier: copies blocks of all layers.
    """

    def __init__(
        self, runner: TreeRounds, recorder: Recorder | None, rate: float, scratch: np.ndarray, copier: BlockCopier
    ) -> None:
        self._runner = runner
        self._recorder = recorder
        self._rate = rate
        self._scratch = scratch
        self._copier = copier
        self._random = random.Random(0)
        self._chosen = False
        self._grown: dict[str, _Waiting] = {}
        self._verified: dict[str, _Waiting] = {}

    @staticmethod
    def scratch_blocks(options: TargetRowsConfig, size: int) -> int:
        """Scratch blocks that the pass over one pool's inner nodes needs: for their paths, and for one sequence."""
        inner = (options.tree_depth - 1) * options.tree_topk
        return inner * tail_blocks(size, options.tree_depth + 2) + tail_blocks(size, inner + 2)

    def chooses_step(self) -> bool:
        """Whether the pools of this step are recorded: to be asked once a step, before they grow."""
        self._chosen = self._random.random() < self._rate
        return self._chosen

    def step(
        self,
        batch: Batch,
        verified: Verified,
        growing: np.ndarray,
        pool: Pool | None,
        rows: TargetRows,
        log_p: Tensor,
    ) -> None:
        """Take what a step brings.

        Args:
            growing: batch rows that got a pool.
            rows: of the step's trees.
            log_p: float32 ``[T, V]`` the step's rows at temperature 1, without transforms.
        """
        ids = self._runner.input_batch.req_ids
        length, emitted = verified.exits.length.tolist(), verified.tokens.tolist()
        for r in np.flatnonzero(batch.kept & batch.decoding):
            row = int(batch.row_of[r, 0])
            if finished := self._verified.pop(ids[r], None):
                self._write(finished, rows, row)
            if waiting := self._grown.pop(ids[r], None):
                tokens = [token for token in emitted[r] if token >= 0]
                self._outcome(waiting, batch, r, length[r], tokens)
                self._verified[ids[r]] = waiting
        if not self._chosen or pool is None:
            return
        retained = self._runner.retained_probabilities(batch, verified, growing, pool, log_p)
        for i, r in enumerate(growing.tolist()):
            fits = batch.root_position[r] + length[r] + 2 + self._runner.options.tree_depth < self._runner.max_model_len
            if fits:
                exists = (pool.score[i] > NEVER).cpu()
                of_pool = [part[i].cpu()[exists].numpy() for part in retained]
                drawn = emitted[r][length[r] + 1]
                self._grown[ids[r]] = self._score(batch, verified, r, host_pool(pool, i), drawn, of_pool)

    def forget(self, req_id: str) -> None:
        """The request ends: what is known of its last rounds is kept."""
        self._grown.pop(req_id, None)
        if waiting := self._verified.pop(req_id, None):
            self._add(waiting.recorded)

    def close(self) -> str | None:
        """Make the file readable now; returns its path."""
        if self._recorder is None:
            return None
        self._recorder.close()
        return str(self._recorder.path)

    def _score(
        self, batch: Batch, verified: Verified, r: int, pool: HostPool, drawn: int, retained: list[np.ndarray]
    ) -> _Waiting:
        """The target's probabilities of all nodes of request ``r``'s pool, by a pass over root and inner nodes.

        Args:
            drawn: token drawn from the root row, -1 without one.
            retained: ``token_match_p`` and ``ancestor_p`` of the pool's nodes.
        """
        runner = self._runner
        length = int(verified.exits.length[r])
        position = int(batch.root_position[r]) + 1 + length
        emitted = verified.tokens[r, : length + 1].tolist()
        logits = self._pass(r, position, emitted[-1], pool)
        root_log_p = logits[0].float().log_softmax(dim=0)
        entropy = float(-(root_log_p.exp() * root_log_p.clamp(min=-100)).sum())
        top = root_log_p.topk(min(TOP, len(root_log_p)))

        paths = {-1: emitted}
        for node in pool.inner.tolist():
            paths[node] = [*paths[int(pool.parents[node])], int(pool.tokens[node])]
        rows = runner._rows_at(logits, np.full(len(logits), r), list(paths.values()))
        place = np.full(len(pool.tokens) + 1, -1)
        place[np.append(0, pool.inner + 1)] = np.arange(len(logits))
        greedy = runner._is_greedy(r)
        p = probabilities(rows, greedy, place[pool.parents + 1], pool.tokens)
        recorded = RecordedRound(
            request=runner.input_batch.req_ids[r],
            position=position + 1,
            temperature=0.0 if greedy else float(runner.input_batch.temperature_cpu[r]),
            pool_token=pool.tokens,
            pool_parent=pool.parents,
            pool_log_q=pool.log_q,
            pool_p=p,
            token_match_p=retained[0],
            ancestor_p=retained[1],
            root_entropy=entropy,
            root_top_token=top.indices.tolist(),
            root_top_p=top.values.exp().tolist(),
            drawn=drawn,
            tree=[],
            accepted=0,
            emitted=[],
            address_variation=UNKNOWN,
            token_variation=UNKNOWN,
        )
        return _Waiting(recorded, pool, rows, greedy)

    def _pass(self, r: int, position: int, root: int, pool: HostPool) -> Tensor:
        """Logits ``[1 + inner nodes, V]`` below request ``r``'s committed context, whose last token is ``root``.

        All keys and values are written into scratch blocks: the request's own may have no room for them.
        """
        runner, size = self._runner, self._runner._block_size
        nodes = len(pool.inner)
        place = np.full(len(pool.tokens) + 1, -1)
        place[pool.inner + 1] = np.arange(nodes)
        parents = place[pool.parents[pool.inner] + 1][None, :]
        column, last = position // size, (position + nodes) // size
        own = runner._block_table_np()[r]
        table = np.zeros((1, max(len(own), last + 1)), dtype=own.dtype)
        table[0, : len(own)] = own
        private = self._scratch[len(self._scratch) - (last - column + 1) :]
        if position % size:
            self._copier.copy_apart(
                *on_device(runner.device, table[0, column : column + 1].astype(np.int64), private[:1])
            )
        table[0, column : last + 1] = private

        one, drafts = np.ones(1, dtype=np.int64), np.array([nodes])
        # The paths take scratch blocks from the front.
        step = runner._layout.plan(parents, drafts, position * one, drafts + 1, drafts, table)
        assert step.nodes.sizes[0] == nodes, "too few scratch blocks for recording"
        depth = np.append(0, step.nodes.depth)
        at = position + np.arange(nodes + 1)
        tokens, positions, slots, block_table = on_device(
            runner.device,
            np.append(root, pool.tokens[pool.inner]).astype(np.int32),
            position + depth,
            table[0, at // size].astype(np.int64) * size + at % size,
            table,
        )
        query_start = torch.tensor([0, nodes + 1], dtype=torch.int32)
        base = CommonAttentionMetadata(
            query_start_loc=query_start.to(runner.device),
            query_start_loc_cpu=query_start,
            seq_lens=torch.tensor([position + nodes + 1], dtype=torch.int32, device=runner.device),
            num_reqs=1,
            num_actual_tokens=nodes + 1,
            max_query_len=nodes + 1,
            max_seq_len=position + nodes + 1,
            block_table_tensor=block_table,
            slot_mapping=slots,
            causal=True,
            positions=positions,
        )
        build = runner._metadata_of_layers
        per_layer = build(base)
        if nodes:
            per_layer = runner._layout.metadata(step, base, per_layer, build)
        hidden, _ = runner._target_pass(tokens, positions, per_layer, slots)
        logits: Tensor = runner.model.compute_logits(hidden[: nodes + 1])
        return logits

    def _outcome(self, waiting: _Waiting, batch: Batch, r: int, accepted: int, emitted: list[int]) -> None:
        """The tree was verified: ``emitted`` are the accepted tokens, the continuation and any drawn token."""
        pool, recorded = waiting.pool, waiting.recorded
        child = {(int(p), int(t)): i for i, (p, t) in enumerate(zip(pool.parents, pool.tokens, strict=True))}
        top = -1 if recorded.drawn < 0 else child.get((-1, recorded.drawn))
        nodes: list[int] = []
        size = int(batch.tree_sizes[r])
        for token, parent in zip(batch.tokens[r, :size].tolist(), batch.parents[r, :size].tolist(), strict=True):
            above = top if parent < 0 else nodes[parent]
            assert above is not None
            nodes.append(child[above, token])
        waiting.recorded = replace(recorded, tree=nodes, accepted=accepted, emitted=emitted[: accepted + 1])
        place = {-1: 0, **{int(node): i + 1 for i, node in enumerate(pool.inner)}}
        here: int | None = top
        for token in emitted:
            here = None if here is None else child.get((here, token))
        if here in place:
            waiting.address = place[here]
        same = (i for node, i in place.items() if node not in (-1, here) and pool.tokens[node] == emitted[-1])
        waiting.token = next(same, None)

    def _write(self, waiting: _Waiting, rows: TargetRows, row: int) -> None:
        """The next root row is ``rows[row]``: compare, and record."""

        def distance(place: int | None) -> float:
            if place is None:
                return UNKNOWN
            if waiting.greedy:
                assert rows.argmax is not None and waiting.rows.argmax is not None
                return float(rows.argmax[row] != waiting.rows.argmax[place])
            assert rows.probs is not None and waiting.rows.probs is not None
            return float(total_variation(rows.probs[row], waiting.rows.probs[place]))

        variation = distance(waiting.address), distance(waiting.token)
        self._add(replace(waiting.recorded, address_variation=variation[0], token_variation=variation[1]))

    def _add(self, recorded: RecordedRound) -> None:
        if self._recorder is not None:
            self._recorder.add(recorded)


def host_pool(pool: Pool, request: int) -> HostPool:
    """One request's pool, without the nodes that do not exist."""
    score = pool.score[request].cpu().numpy()
    exists = score > NEVER
    number = np.append(np.cumsum(exists) - 1, -1)  # the last entry is what parent -1 finds
    tokens, parents = pool.tokens[request].cpu().numpy()[exists], number[pool.parents[request].cpu().numpy()[exists]]
    score = score[exists].astype(np.float64)
    log_q = score - np.where(parents >= 0, score[parents], 0)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents.tolist()):
        children.setdefault(parent, []).append(node)
    inner, path = [], list(reversed(children.get(-1, [])))
    while path:
        node = path.pop()
        if node in children:
            inner.append(node)
            path.extend(reversed(children[node]))
    return HostPool(tokens, parents, np.minimum(log_q, 0).astype(np.float32), np.array(inner, dtype=np.int64))


def probabilities(rows: TargetRows, greedy: bool, row: np.ndarray, token: np.ndarray) -> np.ndarray:
    """Probability of each ``token`` in its ``row``: float32."""
    if greedy:
        assert rows.argmax is not None
        return (rows.argmax.cpu().numpy()[row] == token).astype(np.float32)
    assert rows.probs is not None
    index = on_device(rows.probs.device, row, token)
    return rows.probs[index].cpu().numpy().astype(np.float32)
