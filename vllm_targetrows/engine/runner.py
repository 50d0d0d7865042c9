# SPDX-License-Identifier: Apache-2.0
"""The round: verify, commit, grow, root row, select, inside one step of vLLM's Model Runner V1.

A step of the runner starts with the target's pass over the roots and the trees of the requests and ends with their next
trees.  ``TreeRounds._sample`` is the whole round; everything else here prepares its inputs or carries its results:

* The scheduler knows a tree as an ordinary list of draft tokens (depth-first preorder, so every prefix is a tree), with
  the scored frontier behind it.
* A stopping rule is the exit law over fewer nodes: the verifier is given the acceptable nodes as trees of their own.
* After the commit the accepted path lies in the request's own KV slots, so the scheduler's arithmetic holds unchanged.
* ``root_draw`` and ``pearl`` emit one more token, the drawn one.  The root pass has then written the continuation's KV.
* From the target's rows to the next trees everything stays on the device; only ``_hand_over`` makes the host wait for
  it.  Shapes depend on what the host knew before the step: a request that may accept ``d`` nodes is given the room of
  ``d``.  (Requests with transforms that depend on the prefix, or with logprobs, make the host look earlier.)
"""

from __future__ import annotations

import dataclasses
import gc
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import pad
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import _SAMPLING_EPS
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_targetrows.coverage import acceptable as acceptable_nodes
from vllm_targetrows.coverage import address_match
from vllm_targetrows.engine.attention import TreeLayout
from vllm_targetrows.engine.batch import Acceptable, Batch, ProposedTree, RootRows, Verified
from vllm_targetrows.engine.compat import tree_layout
from vllm_targetrows.engine.config import DRAWING_RULES, ROOT_RULES, TargetRowsConfig
from vllm_targetrows.engine.drafting import Eagle3Drafter
from vllm_targetrows.engine.metrics import round_metrics
from vllm_targetrows.engine.observing import Observed, Observer
from vllm_targetrows.engine.recording import RoundRecorder
from vllm_targetrows.engine.rows import (
    TargetRows,
    enable_builtin_processors,
    logprobs_for,
    needs_paths,
    target_rows,
    uniforms,
)
from vllm_targetrows.engine.scratch import BlockCopier, append_blocks, bytes_per_block, tail_blocks
from vllm_targetrows.engine.statistics import RoundStatistics
from vllm_targetrows.engine.steps import Exits, StepRows, Steps
from vllm_targetrows.engine.transfer import on_device, on_host
from vllm_targetrows.recording import Recorder
from vllm_targetrows.reranker import Reranker, retained_probabilities
from vllm_targetrows.reranker import load as load_reranker
from vllm_targetrows.selection import select_with_frontier
from vllm_targetrows.trees import Pool, Tree
from vllm_targetrows.verification import draw_token

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
else:
    GPUModelRunner = object

logger = init_logger(__name__)

SCRATCH_SHARE = 0.25
"""Most scratch blocks, as a share of the scheduler's blocks; the worker reports that much less memory to it."""
NO_PARENTS = np.zeros(0, dtype=np.int64)
NOTHING_CARRIED = (-2, torch.empty(0))


class TreeRounds(GPUModelRunner):
    """Mixed into a Model Runner V1: replaces chain speculation by rounds with trees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = TargetRowsConfig.from_vllm_config(self.vllm_config)
        self.round_statistics = RoundStatistics()
        self._proposed: dict[str, ProposedTree] = {}
        self._carried: dict[str, tuple[int, torch.Tensor]] = {}  # position and feature of a root pass
        self._drafts: list[list[int]] = []
        self._batch: Batch | None = None
        self._step_state: Any = None
        self._observer: Observer | None = None
        self._recorder: RoundRecorder | None = None
        self._reranker: Reranker | None = None
        enable_builtin_processors(self)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if get_tensor_model_parallel_rank() == 0:
            options = self.options
            metrics = round_metrics(self.vllm_config, options.selection, options.metrics_row_rate)
            self._observer = None if metrics is None else Observer(self, metrics)
        if self.options.reranker is not None:
            self._reranker = load_reranker(self.options.reranker).to(self.device)
        # The drafter's LM head may just have been dropped for the target's.  On the CPU it holds a oneDNN handle, whose
        # destructor reads a tensor, and it is part of a reference cycle: if the garbage collector came by while
        # torch.compile traces the target, the tensor would be read under fake mode, which kills the process.
        gc.collect()

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        """Give every layer scratch blocks behind the scheduler's, then set up the drafter and the commit."""
        options, groups = self.options, kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ValueError(
                f"method 'targetrows' needs one KV cache group, this model has {len(groups)}: "
                "allowed are models whose layers share one block table (try --disable-hybrid-kv-cache-manager)"
            )
        blocks, size = kv_cache_config.num_blocks, groups[0].kv_cache_spec.block_size
        one_pool = Eagle3Drafter.scratch_blocks(options.tree_topk, options.tree_depth, size)
        one_tree = options.scored_nodes * tail_blocks(size, options.tree_depth + 2)
        wanted = self.max_num_reqs * max(one_pool, one_tree)
        count = max(one_pool, one_tree, min(wanted, int(blocks * SCRATCH_SHARE)))
        if options.record is not None:
            count = max(count, RoundRecorder.scratch_blocks(options, size))
        super().initialize_kv_cache(append_blocks(kv_cache_config, count), *args, **kwargs)
        self._block_size = self._blocks().block_size
        assert self._block_size == size, "kernel blocks differ from the KV cache manager's blocks"
        scratch = np.arange(blocks, blocks + count, dtype=np.int64)
        logger.info(
            "Target rows: %d scratch blocks for trees (%.0f MiB), beside %d KV blocks.",
            count,
            count * bytes_per_block(kv_cache_config) / 2**20,
            blocks,
        )
        layers = self.compilation_config.static_forward_context
        drafter_layers = self.drafter._draft_attn_layer_names
        kv_caches = [layers[name].kv_cache for name in groups[0].layer_names]
        self._layout: TreeLayout = tree_layout(self.attn_groups[0][0].backend)(kv_caches, scratch, size)
        self._steps: Steps = self._layout.steps
        self._drafter = Eagle3Drafter(
            self.drafter,
            self.vllm_config,
            options,
            size,
            scratch,
            BlockCopier([layers[name].kv_cache for name in sorted(drafter_layers)]),
            self.round_statistics,
            self._steps,
        )
        if options.record is not None:
            writes = get_tensor_model_parallel_rank() == 0
            recorder = Recorder(options.record, self._recorded_settings()) if writes else None
            self._recorder = RoundRecorder(self, recorder, options.record_rate, scratch, BlockCopier(kv_caches))

    # ------------------------------------------------------------------ the round

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        """One round for all requests of the step; called between the target's pass and the bookkeeping."""
        batch, stats = self._batch, self.round_statistics
        assert batch is not None
        chance = self._uniforms(batch)
        # Before the transforms, which may change the logits in place.
        wanted = self._recorder is not None or self._reranker is not None
        log_p = logits.log_softmax(dim=1, dtype=torch.float32) if wanted else None
        with stats.phase("verify"):
            rows = self._rows(logits, batch)
            verified = self._verify(rows, batch, chance)
            covered = self._covered(batch, verified)
        with stats.phase("commit"):
            if batch.plan is not None:
                self._layout.commit(batch.plan, self._to_commit(verified, covered))
        with stats.phase("draft"):
            growing = self._growing(batch)
            self._drafter.whole = self._recorder is not None and self._recorder.chooses_step()
            pool = grown = self._grow(batch, verified, growing)
        with stats.phase("root_pass"):
            if self.options.root_row == "covered":
                root = self._covered_rows(batch, rows, growing, covered)
            else:
                root = self._root_pass(batch, verified, growing)
        with stats.phase("select"):
            if self._reranker is not None and pool is not None:
                assert log_p is not None
                pool = self._reranked(self._reranker, batch, verified, growing, pool, log_p)
            tree, sizes = self._select(batch, verified, growing, pool, root, chance)
            observed = None if self._observer is None else self._observer.look(rows, batch, pool, root)
            self._hand_over(batch, verified, growing, tree, sizes, root, observed)
        if self._recorder is not None:
            assert log_p is not None
            self._recorder.step(batch, verified, growing, grown, rows, log_p)
        return SamplerOutput(
            sampled_token_ids=verified.tokens.to(torch.int32),
            logprobs_tensors=self._logprobs(batch, verified, rows, root),
        )

    def _verify(self, rows: TargetRows, batch: Batch, chance: torch.Tensor | None) -> Verified:
        """Draw every request's exit and continuation by the exit law."""
        levels = max(min(self.options.tree_depth, self.options.num_speculative_tokens), 1)
        acceptable = batch.acceptable
        tree, two = acceptable.tree, None if chance is None else chance[:, :2]
        exits = self._steps.exits(rows, tree, acceptable.row_of, two, levels)
        accepted = tree.tokens.gather(1, exits.path.clamp(min=0)).masked_fill_(exits.path < 0, -1)
        tokens = pad(accepted, (0, 2), value=-1)
        tokens.scatter_(1, exits.length[:, None], exits.continuation[:, None])
        if acceptable.place is not None:
            exit_node = acceptable.place.gather(1, exits.exit_node[:, None])[:, 0]
            exits = exits._replace(exit_node=exit_node, path=acceptable.place.gather(1, exits.path + 1) - 1)
        return Verified(exits, tokens)

    def _covered(self, batch: Batch, verified: Verified) -> torch.Tensor | None:
        """The scored node that is each request's exit prefix: int64 ``[R]``, -1 if it was not scored."""
        if self.options.root_row != "covered":
            return None
        exits = verified.exits
        return address_match(batch.scored, exits.exit_node, exits.continuation).masked_fill(
            self._to_device(~self._has_room_for_drawn(batch)), -1
        )

    def _to_commit(self, verified: Verified, covered: torch.Tensor | None) -> Exits:
        """The exits up to which keys and values are committed: a token is drawn behind a covered continuation."""
        exits = verified.exits
        if covered is None or self.options.selection not in DRAWING_RULES:
            return exits
        found = covered >= 0
        path = pad(exits.path, (0, 1), value=-1)
        last = path.gather(1, exits.length[:, None])[:, 0]
        path.scatter_(1, exits.length[:, None], torch.where(found, covered, last)[:, None])
        exit_node = torch.where(found, covered + 1, exits.exit_node)
        return Exits(exit_node, path, exits.length + found, exits.continuation)

    def _covered_rows(
        self, batch: Batch, rows: TargetRows, growing: np.ndarray, covered: torch.Tensor | None
    ) -> RootRows | None:
        """The root rows that the verification pass computed."""
        if covered is None or batch.plan is None or not len(growing):
            return None
        request = self._to_device(growing)
        node = covered[request]
        row = batch.row_of[request, node + 1]
        state = self._step_state
        parts = (rows.argmax, rows.probs, rows.scored)
        argmax, probs, scored = (None if part is None else part[row] for part in parts)
        greedy = None if rows.greedy is None else rows.greedy[request]
        # Row of the step's hidden states: those of a request's draft tokens follow its root's.
        at = self._to_device(batch.begin + batch.before)[request] + node
        features = self._drafter.features(state.hidden_states, state.aux_hidden_states, at)
        return RootRows(growing, TargetRows(argmax, probs, greedy, scored), features, node)

    def _has_room_for_drawn(self, batch: Batch) -> np.ndarray:
        """Which requests have a place for the continuation's keys and values and a token behind it: bool ``[R]``."""
        bound = batch.last_position + 1  # no continuation is behind it
        allocated = self._blocks().num_blocks_per_row[: len(bound)] * self._block_size
        return bound < np.minimum(allocated, self.max_model_len - 1)

    def _grow(self, batch: Batch, verified: Verified, growing: np.ndarray) -> Pool | None:
        """Let the drafter read the committed tokens, then grow the pools of ``growing`` (batch rows)."""
        requests = len(batch.before)
        # A root pass left the feature of the position just before this step's first one.
        carried = [self._carried.pop(req_id, NOTHING_CARRIED) for req_id in self.input_batch.req_ids]
        carry = np.array([position for position, _ in carried]) == batch.computed - 1
        prompt_token = np.full(requests, -1)
        unfinished = np.flatnonzero(~batch.kept)
        prompt_token[unfinished] = self.input_batch.token_ids_cpu[
            unfinished, (batch.computed + batch.before)[unfinished]
        ]
        step = StepRows(batch.begin, batch.before, batch.computed, batch.room, carry, prompt_token)
        exits, table = verified.exits, self._block_table(requests)
        committed = self._steps.committed(
            step, exits.path, exits.length, verified.tokens, self.input_ids.gpu, table, self._block_size
        )
        state = self._step_state
        features = self._drafter.features(state.hidden_states, state.aux_hidden_states, committed.rows)
        if carry.any():
            first = (np.cumsum(committed.counts) - committed.counts)[carry]
            features[self._to_device(first)] = torch.stack([carried[r][1] for r in np.flatnonzero(carry)])
        head_state, fed_state = self._drafter.catch_up(features, committed, table)
        if not len(growing):
            return None
        position = self._to_device(batch.root_position) + exits.length
        chosen = self._to_device(growing)
        bound = batch.last_position[growing]
        return self._drafter.grow(head_state[chosen], fed_state[chosen], position[chosen], bound, table[chosen])

    def _root_pass(self, batch: Batch, verified: Verified, growing: np.ndarray) -> RootRows | None:
        """The target's rows at the continuations: one token per request, at the position where it will stay."""
        if self.options.selection not in ROOT_RULES:
            return None
        request = growing[self._has_room_for_drawn(batch)[growing]]
        if not len(request):
            return None
        bound = batch.last_position + 1  # no continuation is behind it
        n, length = len(request), verified.exits.length
        index = self._to_device(request)
        positions = (self._to_device(batch.root_position + 1) + length)[index]
        tokens = verified.tokens[index, length[index]].to(torch.int32)
        table = self._block_table(len(batch.before))[index]
        slots = table.gather(1, (positions // self._block_size)[:, None])[:, 0].to(torch.int64) * self._block_size
        slots += positions % self._block_size
        query_start = torch.arange(n + 1, dtype=torch.int32)
        metadata = CommonAttentionMetadata(
            query_start_loc=query_start.to(self.device, non_blocking=True),
            query_start_loc_cpu=query_start,
            seq_lens=(positions + 1).int(),
            num_reqs=n,
            num_actual_tokens=n,
            max_query_len=1,
            max_seq_len=int(bound[request].max()) + 1,
            block_table_tensor=table,
            slot_mapping=slots,
            causal=True,
            positions=positions,
        )
        per_layer = self._metadata_of_layers(metadata)
        with self.round_statistics.forward("root_pass"):
            hidden, aux = self._target_pass(tokens, positions, per_layer, slots)
            logits = self.model.compute_logits(hidden[:n])
        rows = self._rows(logits, batch, request, verified)
        return RootRows(request, rows, self._drafter.features(hidden, aux, torch.arange(n, device=self.device)))

    def _target_pass(
        self, tokens: torch.Tensor, positions: torch.Tensor, per_layer: dict[str, Any], slots: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """A pass of the target beside vLLM's own: its hidden states, and those that the drafter reads."""
        slot_mapping = dict.fromkeys(per_layer, slots)
        with set_forward_context(per_layer, self.vllm_config, num_tokens=len(tokens), slot_mapping=slot_mapping):
            output = self._model_forward(input_ids=tokens, positions=positions)
        return output if self.use_aux_hidden_state_outputs else (output, None)

    def retained_probabilities(
        self, batch: Batch, verified: Verified, growing: np.ndarray, pool: Pool, log_p: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``reranker.retained_probabilities`` of the step's rows ``log_p`` for the pools of ``growing``."""
        request = self._to_device(growing)
        root = self.input_ids.gpu[self._to_device(batch.begin + batch.before - 1)].to(torch.int64)
        tokens = torch.cat((root[:, None], batch.scored.tokens), dim=1)[request]
        exits = verified.exits
        continuation, exit_node = exits.continuation[request], exits.exit_node[request]
        return retained_probabilities(log_p, batch.row_of[request], tokens, exit_node, pool, continuation)

    def _reranked(
        self,
        reranker: Reranker,
        batch: Batch,
        verified: Verified,
        growing: np.ndarray,
        pool: Pool,
        log_p: torch.Tensor,
    ) -> Pool:
        """The pools with the reranker's path scores."""
        retained = self.retained_probabilities(batch, verified, growing, pool, log_p)
        return dataclasses.replace(pool, score=reranker.scores(pool, *retained, levels=self.options.tree_depth))

    def _select(
        self,
        batch: Batch,
        verified: Verified,
        growing: np.ndarray,
        pool: Pool | None,
        root: RootRows | None,
        chance: torch.Tensor | None,
    ) -> tuple[Tree, torch.Tensor]:
        """Choose the trees of ``growing`` by the rule, with the token drawn from each root row.

        Returns:
            The scored nodes of each request, and how many of them are the tree's.
        """
        if pool is None:
            empty = Tree.empty(0, self.device)
            return empty, empty.size
        options, root_log_p, drawn, has_row = self.options, None, None, None
        rule: str = options.selection
        if root is not None:
            place = self._to_device(np.searchsorted(growing, root.request))
            has_row = torch.zeros(len(growing), dtype=torch.bool, device=self.device)
            has_row[place] = True if root.node is None else root.node >= 0
            if rule in DRAWING_RULES:
                index = self._to_device(root.request)
                token = self._draw(root.rows, None if chance is None else chance[index, 2])
                if root.node is not None:
                    token = torch.where(root.node >= 0, token, -1)
                drawn = torch.full((len(growing),), -1, dtype=torch.int64, device=self.device)
                drawn[place] = token
                verified.tokens[index, verified.exits.length[index] + 1] = token
            else:
                root_log_p = self._first_level_log_p(root.rows, pool, place)
        elif rule in (*ROOT_RULES, "rerank"):  # the reranker's scores are the pool's by now
            rule = "draft"
        choose_by = (rule, root_log_p, drawn, has_row)
        if options.frontier:
            budget, levels = options.num_speculative_tokens, options.tree_depth
            return select_with_frontier(pool, budget, options.frontier, *choose_by, levels)
        tree = self._steps.select(pool, options.num_speculative_tokens, *choose_by)
        return tree, tree.size

    def _hand_over(
        self,
        batch: Batch,
        verified: Verified,
        growing: np.ndarray,
        scored: Tree,
        tree_sizes: torch.Tensor,
        root: RootRows | None,
        observed: Observed | None,
    ) -> None:
        """Bring the decision and the next trees to the host, and keep what the next step needs."""
        req_ids, rule = self.input_batch.req_ids, self.options.selection
        wanted = (verified.exits.length, verified.tokens, scored.tokens, scored.parents, scored.size, tree_sizes)
        seen = () if observed is None else (verified.exits.exit_node, *observed.tensors())
        length, emitted, tokens, parents, sizes, of_tree, *numbers = on_host(*wanted, *seen)
        has_drawn = emitted[np.arange(len(length)), length + 1] >= 0
        if root is not None and rule in DRAWING_RULES:
            position = batch.root_position + length + 1
            for i, r in enumerate(root.request.tolist()):
                if has_drawn[r]:
                    self._carried[req_ids[r]] = (int(position[r]), root.features[i])
        self._drafts = [[] for _ in req_ids]
        for i, r in enumerate(growing.tolist()):
            size, empty = int(sizes[i]), "absent" if has_drawn[r] else "improbable"
            self._drafts[r] = tokens[i, :size].tolist()
            tree = ProposedTree(self._drafts[r], parents[i, :size], int(of_tree[i]), None if size else empty)
            self._proposed[req_ids[r]] = tree
        self._count(batch, length, emitted)
        if self._observer is not None and observed is not None:
            self._observer.count(batch, observed, length, emitted, growing, root, *numbers)

    def _growing(self, batch: Batch) -> np.ndarray:
        """Batch rows that get a tree next; why the others do not is kept for the statistics."""
        growing = batch.kept & (batch.last_position + 1 < self.effective_drafter_max_model_len)
        for r in np.flatnonzero(batch.kept & ~growing):
            self._proposed[self.input_batch.req_ids[r]] = ProposedTree([], NO_PARENTS, 0, "drafter_max_model_len")
        for r, req_id in enumerate(self.input_batch.req_ids):
            params = self.requests[req_id].sampling_params
            if params is None or params.structured_outputs is not None:
                growing[r] = False
                self._proposed[req_id] = ProposedTree([], NO_PARENTS, 0, "structured_output")
        return np.flatnonzero(growing)

    def _count(self, batch: Batch, length: np.ndarray, emitted: np.ndarray) -> None:
        """Add the step to the statistics; steps that end a prompt are no rounds."""
        stats, decoding = self.round_statistics, batch.decoding & batch.kept
        counts = (emitted >= 0).sum(axis=1)
        for r in np.flatnonzero(decoding):
            size = int(batch.tree_sizes[r])
            if size:
                stats.rounds += 1
            else:
                stats.no_tree[batch.reasons[r] or "not_scheduled"] += 1
            stats.tree_nodes += size
            stats.accepted_tokens += int(length[r])
            stats.emitted_tokens += int(counts[r])

    def _is_greedy(self, r: int) -> bool:
        return float(self.input_batch.temperature_cpu[r]) < _SAMPLING_EPS

    # ------------------------------------------------------------------ rows and draws

    def _rows(
        self, logits: torch.Tensor, batch: Batch, request: np.ndarray | None = None, verified: Verified | None = None
    ) -> TargetRows:
        """The requests' rows from the model's logits: of the step's trees, or of the root pass of ``request``."""
        if request is None:
            request = np.repeat(np.arange(len(batch.drafts)), batch.drafts + 1)
        paths = None
        if needs_paths(self.input_batch.sampling_metadata):
            paths = self._tree_paths(batch) if verified is None else self._emitted(verified, request)
        return self._rows_at(logits, request, paths)

    def _rows_at(self, logits: torch.Tensor, request: np.ndarray, paths: list[list[int]] | None) -> TargetRows:
        """``target_rows`` of the batch; arguments as there."""
        index, first = on_device(self.device, request, np.flatnonzero(np.diff(request, prepend=-1)))
        metadata = self.input_batch.sampling_metadata
        return target_rows(logits, index, metadata, paths, self.sampler.logprobs_mode, first)

    def _uniforms(self, batch: Batch) -> torch.Tensor | None:
        """Exit, continuation and drawn token: three numbers per request, ``None`` when every request is greedy."""
        if self.input_batch.sampling_metadata.all_greedy:
            return None
        generators = {r: g for r, g in self.input_batch.generators.items() if batch.kept[r]}
        return uniforms(generators, len(batch.kept), 3, self.device)

    def _logprobs(
        self, batch: Batch, verified: Verified, rows: TargetRows, root: RootRows | None
    ) -> LogprobsTensors | None:
        """Logprobs of the emitted tokens: each by the row that it was drawn from."""
        if rows.scored is None:
            return None
        path = verified.exits.path
        scored, drawn_by = rows.scored, torch.zeros((len(path), 1), dtype=torch.int64, device=self.device)
        # Token j comes from the row of accepted node j - 1, the first one from the root's.
        row = torch.cat((batch.row_of[:, :1], batch.row_of.gather(1, path.clamp(min=0) + 1), drawn_by), dim=1)
        if root is not None and root.rows.scored is not None:
            request = self._to_device(root.request)
            row[request, verified.exits.length[request] + 1] = len(scored) + torch.arange(
                len(request), device=self.device
            )
            scored = torch.cat((scored, root.rows.scored))
        return logprobs_for(self.sampler, scored, row, verified.tokens, self.input_batch.sampling_metadata)

    def _tree_paths(self, batch: Batch) -> list[list[int]]:
        """The tokens below the root on the way to each row of the step's trees."""
        paths: list[list[int]] = []
        tokens, parents = batch.tokens.tolist(), batch.parents.tolist()
        for r, size in enumerate(batch.sizes.tolist()):
            of_request: list[list[int]] = [[]]
            for token, parent in zip(tokens[r][:size], parents[r][:size], strict=True):
                of_request.append([*of_request[parent + 1], token])
            paths += of_request + [[]] * (int(batch.drafts[r]) - size)  # ignored rows
        return paths

    @staticmethod
    def _emitted(verified: Verified, request: np.ndarray) -> list[list[int]]:
        """What each request has emitted in this step, the continuation included."""
        tokens, length = on_host(verified.tokens, verified.exits.length)
        return [tokens[r, : length[r] + 1].tolist() for r in request]

    @staticmethod
    def _draw(rows: TargetRows, uniform: torch.Tensor | None) -> torch.Tensor:
        """One token from each row; greedy requests take its argmax."""
        if rows.probs is None:
            assert rows.argmax is not None
            return rows.argmax
        assert uniform is not None
        token = draw_token(rows.probs, uniform)
        if rows.argmax is None:
            return token
        assert rows.greedy is not None
        return torch.where(rows.greedy, rows.argmax, token)

    def _first_level_log_p(self, rows: TargetRows, pool: Pool, place: torch.Tensor) -> torch.Tensor:
        """Log root row at the pool's first-level tokens, ``[G, width]``; only the rows ``place`` are filled."""
        first = pool.tokens[place, : pool.width]
        log_p = torch.zeros((len(pool.tokens), pool.width), dtype=pool.score.dtype, device=pool.tokens.device)
        if rows.argmax is not None:
            log_p[place] = (first == rows.argmax[:, None]).to(log_p.dtype).log()
        if rows.probs is not None:
            values = rows.probs.gather(1, first).log().to(log_p.dtype)
            log_p[place] = values if rows.greedy is None else torch.where(rows.greedy[:, None], log_p[place], values)
        return log_p

    # ------------------------------------------------------------------ inputs of a step

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        with self.round_statistics.phase("verify"):
            self._batch = self._plan_batch(scheduler_output, num_scheduled_tokens)
        return prepared

    def _plan_batch(self, scheduler_output: Any, scheduled: np.ndarray) -> Batch:
        """Match the scheduled draft tokens with the proposed trees and lay out the step."""
        req_ids, to_device = self.input_batch.req_ids, self._to_device
        requests, spec_tokens = len(req_ids), scheduler_output.scheduled_spec_decode_tokens
        proposed = [self._proposed.pop(req_id, None) for req_id in req_ids]
        drafts = np.zeros(requests, dtype=np.int64)
        sizes, tree_sizes = np.zeros((2, requests), dtype=np.int64)
        for r, req_id in enumerate(req_ids):
            scheduled_drafts = spec_tokens.get(req_id)
            if scheduled_drafts:
                drafts[r] = len(scheduled_drafts)
                known = proposed[r]
                if known is not None and known.tokens[: drafts[r]] == list(scheduled_drafts):
                    sizes[r], tree_sizes[r] = drafts[r], known.size  # the scheduler may have cut the tree short
        widest = max(int(sizes.max()), 1)
        parents = np.full((requests, widest), -1, dtype=np.int64)
        tokens = np.full((requests, widest), -1, dtype=np.int64)
        for r in np.flatnonzero(sizes):
            parents[r, : sizes[r]] = proposed[r].parents[: sizes[r]]
            tokens[r, : sizes[r]] = proposed[r].tokens[: sizes[r]]
        scheduled = scheduled.astype(np.int64)
        computed = self.input_batch.num_computed_tokens_cpu[:requests].astype(np.int64)
        begin, before = np.cumsum(scheduled) - scheduled, scheduled - drafts
        total = int(scheduled.sum())
        plan, depth = None, np.zeros((requests, widest), dtype=np.int64)
        if sizes.any():
            table = self._block_table_np()[:requests]
            plan = self._layout.plan(parents, sizes, computed, scheduled, drafts, table)
            nodes = plan.nodes
            sizes = nodes.sizes
            beyond = np.arange(widest)[None, :] >= sizes[:, None]
            parents[beyond], tokens[beyond] = -1, -1
            depth[~beyond] = nodes.depth
            root_position = (computed + before - 1)[nodes.request]
            self.positions[to_device(nodes.rows)] = to_device(root_position + nodes.depth)
        if (drafts > sizes).any():  # placeholders of the scheduler are negative
            self.input_ids.gpu[:total].clamp_(min=0)
        tree_sizes = np.minimum(tree_sizes, sizes)
        rows_before = np.cumsum(drafts + 1) - (drafts + 1)
        last_row = int((drafts + 1).sum()) - 1
        row_of = np.minimum(rows_before[:, None] + np.arange(widest + 1)[None, :], last_row)
        scored = Tree(*on_device(self.device, tokens, parents, depth, sizes))
        acceptable = Acceptable(scored, to_device(row_of), None)
        accepts = acceptable_nodes(parents, depth, tree_sizes, self.options.stopping)
        if accepts.sum() < sizes.sum():
            acceptable = self._acceptable(accepts, tokens, parents, depth, row_of)
        return Batch(
            plan=plan,
            scored=scored,
            tokens=tokens,
            parents=parents,
            sizes=sizes,
            tree_sizes=tree_sizes,
            row_of=to_device(row_of),
            acceptable=acceptable,
            room=(depth * accepts).max(axis=1),
            begin=begin,
            before=before,
            computed=computed,
            drafts=drafts,
            kept=~self.discard_request_mask.np[:requests],
            decoding=computed >= self.input_batch.num_prompt_tokens[:requests],
            reasons=[known.reason if known else None for known in proposed],
            first_levels=[known.first_level if known else None for known in proposed],
        )

    def _acceptable(
        self, accepts: np.ndarray, tokens: np.ndarray, parents: np.ndarray, depth: np.ndarray, row_of: np.ndarray
    ) -> Acceptable:
        """The scored nodes of ``accepts`` (bool ``[R, N]``, prefix-closed) as trees, in the same order."""
        sizes = accepts.sum(axis=1)
        widest = max(int(sizes.max()), 1)
        chosen = np.argsort(~accepts, axis=1, kind="stable")[:, :widest]
        behind = np.arange(widest)[None, :] >= sizes[:, None]
        number = np.cumsum(accepts, axis=1) - 1  # of each accepted node
        above = np.take_along_axis(parents, chosen, axis=1)
        above = np.where(above >= 0, np.take_along_axis(number, np.maximum(above, 0), axis=1), -1)
        tree = (np.take_along_axis(tokens, chosen, axis=1), above, np.take_along_axis(depth, chosen, axis=1))
        for part, nothing in zip(tree, (-1, -1, 0), strict=True):
            part[behind] = nothing
        place = np.pad(chosen + 1, ((0, 0), (1, 0)))
        arrays = on_device(self.device, *tree, sizes, np.take_along_axis(row_of, place, axis=1), place)
        return Acceptable(Tree(*arrays[:4]), *arrays[4:])

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, base = super()._build_attention_metadata(*args, **kwargs)
        if self._batch is not None and self._batch.plan is not None:
            with self.round_statistics.phase("verify"):
                metadata = self._layout.metadata(self._batch.plan, base, metadata, self._metadata_of_layers)
        return metadata, base

    def _metadata_of_layers(self, common: CommonAttentionMetadata) -> dict[str, Any]:
        """The back ends' own metadata of every layer."""
        per_layer = {}
        for group in self.attn_groups[0]:
            metadata = group.build_metadata(common)
            per_layer.update(dict.fromkeys(group.layer_names, metadata))
        return per_layer

    # ------------------------------------------------------------------ around the round

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        stats = self.round_statistics
        start, planned = time.perf_counter(), stats.phase_seconds["verify"]
        output = super().execute_model(*args, **kwargs)
        # The target's pass and vLLM's own preparation; the planning in between has been counted already.
        seconds = time.perf_counter() - start - (stats.phase_seconds["verify"] - planned)
        stats.phase_seconds["verify"] += seconds
        stats.forward_seconds["verify"] += seconds
        return output

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        self._step_state = self.execute_model_state
        batch = self._batch
        try:
            return super().sample_tokens(grammar_output)
        finally:
            self._step_state = self._batch = None
            if self._observer is not None:
                phases = self.round_statistics.since_last_time()
                if batch is not None and (batch.sizes[batch.decoding & batch.kept] > 0).any():
                    self._observer.metrics.step(phases)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM rewinds the generators of unfinished prompts, which a CPU generator cannot do.  The round never
        # draws for them, so there is nothing to rewind.
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        return True  # the round looks at each request's own room

    def propose_draft_token_ids(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        return self._drafts

    def _update_states(self, scheduler_output: Any) -> Any:
        for req_id in (*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())):
            self._forget(req_id)
        return super()._update_states(scheduler_output)

    def _forget(self, req_id: str) -> None:
        """Drop what is kept of a request."""
        self._proposed.pop(req_id, None)
        self._carried.pop(req_id, None)
        if self._observer is not None:
            self._observer.retained.pop(req_id, None)
        if self._recorder is not None:
            self._recorder.forget(req_id)

    def _recorded_settings(self) -> dict[str, Any]:
        """What a recording says of the engine."""
        config = self.vllm_config
        settings = {"model": config.model_config.model, "drafter": config.speculative_config.model}
        return {**settings, "dtype": str(config.model_config.dtype).removeprefix("torch."), **self.options.model_dump()}

    def shutdown(self) -> None:
        """Finish the recording, then what vLLM does."""
        self.targetrows_save_recording()
        super().shutdown()

    def targetrows_save_recording(self) -> str | None:
        """Make the recording readable now; returns its path, ``None`` without one."""
        return None if self._recorder is None else self._recorder.close()

    def targetrows_state(self) -> dict[str, Any]:
        """Statistics of the rounds and what is kept of requests at this moment."""
        return {
            **self.round_statistics.as_dict(),
            "requests": len(self.requests),
            "trees": len(self._proposed),
            "carried": len(self._carried),
            "retained": 0 if self._observer is None else len(self._observer.retained),
        }

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return on_device(self.device, array)[0]

    def _blocks(self) -> Any:
        return self.input_batch.block_table[0]

    def _block_table(self, requests: int) -> torch.Tensor:
        return self._blocks().get_device_tensor(requests)

    def _block_table_np(self) -> np.ndarray:
        return self._blocks().get_numpy_array()


class TargetRowsCPURunner(TreeRounds, CPUModelRunner):
    """Model Runner V1 for the CPU, with trees."""
