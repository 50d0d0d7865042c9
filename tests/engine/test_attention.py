# SPDX-License-Identifier: Apache-2.0
"""Virtual sequences against dense masked attention, through vLLM's own CPU kernel and cache-write op."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_targetrows.engine.attention import plan_tree_step, ramp
from vllm_targetrows.engine.scratch import BlockCopier

BLOCK = 32


def random_preorder(rng: np.random.Generator, nodes: int, shape: str) -> list[int]:
    """Parents of a random tree in depth-first preorder."""
    if shape == "chain":
        return list(range(-1, nodes - 1))
    if shape == "star":
        return [-1] * nodes
    parents: list[int] = []
    stack = [-1]
    for node in range(nodes):  # preorder: a node's parent lies on the path to the node before it
        parents.append(stack[rng.integers(max(0, len(stack) - 3), len(stack))])
        stack = [*stack[: stack.index(parents[-1]) + 1], node]
    return parents


def ancestors(parents: list[int], node: int) -> list[int]:
    """The node and all above it."""
    chain = []
    while node >= 0:
        chain.append(node)
        node = parents[node]
    return chain


@st.composite
def steps(draw: st.DrawFn) -> dict:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    requests = draw(st.integers(1, 4))
    shapes = [draw(st.sampled_from(["random", "chain", "star", "none"])) for _ in range(requests)]
    sizes = [0 if s == "none" else draw(st.integers(1, 24)) for s in shapes]
    return {
        "rng": rng,
        "parents": [random_preorder(rng, n, s) for n, s in zip(sizes, shapes, strict=True)],
        "computed": [draw(st.sampled_from([0, 1, 30, 31, 32, 33, 63, 64, 100])) for _ in range(requests)],
        "before": [draw(st.integers(1, 3)) if n else draw(st.sampled_from([1, 2, 40])) for n in sizes],
        "ignored": [draw(st.integers(0, 2)) for _ in range(requests)],
    }


class Layer:
    """One layer's cache with the kernel's two ops, and its dense twin."""

    def __init__(self, blocks: int, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> None:
        self.heads, self.kv_heads, self.head_size, self.dtype = heads, kv_heads, head_size, dtype
        self.isa = _get_attn_isa(dtype, BLOCK, head_size)
        self.cache = torch.full((blocks, kv_heads, BLOCK, 2 * head_size), 777.0, dtype=dtype)  # poisoned

    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.view(len(self.cache), self.kv_heads, 2 * BLOCK, -1).chunk(2, dim=2)

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(
            key, value, *self.halves(), slots, self.isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )

    def attend(self, query: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor, table: torch.Tensor, window: int):
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lens), num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_size,
            seq_lens=lens, dtype=self.dtype, query_start_loc=starts, causal=True, sliding_window_size=window,
            isa=self.isa, enable_kv_split=True, dynamic_causal=None, kv_cache_dtype="auto",
        )  # fmt: skip
        output = torch.full_like(query, float("nan"))
        key, value = self.halves()
        ops.cpu_attention_with_kv_cache(
            query=query, key_cache=key, value_cache=value, output=output, query_start_loc=starts, seq_lens=lens,
            scale=self.head_size**-0.5, causal=True, alibi_slopes=None, sliding_window=window, block_table=table,
            softcap=0, scheduler_metadata=metadata, s_aux=None, dynamic_causal=None, k_scale=1.0, v_scale=1.0,
            kv_cache_dtype="auto",
        )  # fmt: skip
        return output


def dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of one query ``[heads, d]`` over ``[n, kv_heads, d]``, in float64."""
    group = query.shape[0] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    weights = torch.einsum("hd,nhd->hn", query.double(), keys) * query.shape[-1] ** -0.5
    return torch.einsum("hn,nhd->hd", weights.softmax(-1), values)


@pytest.mark.parametrize(
    ("head_size", "dtype", "window"),
    [(64, torch.float32, -1), (64, torch.bfloat16, -1), (80, torch.float32, -1), (64, torch.float32, 5)],
)
@settings(max_examples=12)
@given(step=steps(), scarce=st.booleans())
def test_virtual_sequences_equal_masked_attention(
    head_size: int, dtype: torch.dtype, window: int, step: dict, scarce: bool
) -> None:
    heads, kv_heads, width = 4, 2, 8
    requests = len(step["parents"])
    sizes = np.array([len(p) for p in step["parents"]])
    computed, before, ignored = (np.array(step[name]) for name in ("computed", "before", "ignored"))
    drafts = sizes + ignored
    scheduled = before + drafts
    parents = np.full((requests, max(sizes.max(), 1)), -1)
    for r, p in enumerate(step["parents"]):
        parents[r, : len(p)] = p
    table = np.arange(1, requests * width + 1, dtype=np.int32)
    step["rng"].shuffle(table)
    table = table.reshape(requests, width)
    first_scratch = requests * width + 1
    scratch = np.arange(first_scratch, first_scratch + (3 if scarce else requests * 60))
    plan = plan_tree_step(parents, sizes, computed, scheduled, drafts, table, BLOCK, scratch)
    if not scarce:
        assert (plan.nodes.sizes == sizes).all()
    assert (plan.nodes.sizes <= sizes).all()

    generator = torch.Generator().manual_seed(int(step["rng"].integers(2**31)))
    total = int(scheduled.sum())
    make = lambda n, h: torch.randn(n, h, head_size, generator=generator).to(dtype)  # noqa: E731
    context = [(make(int(c), kv_heads), make(int(c), kv_heads)) for c in computed]
    query, key, value = make(total, heads), make(total, kv_heads), make(total, kv_heads)

    layer = Layer(first_scratch + len(scratch), heads, kv_heads, head_size, dtype)
    for r, (k, v) in enumerate(context):
        positions = np.arange(computed[r])
        layer.write(k, v, torch.from_numpy(table[r, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK))
    copier = BlockCopier([layer.cache])
    copier.copy(torch.from_numpy(plan.copy_source), torch.from_numpy(plan.copy_destination))
    rows, slots = torch.from_numpy(plan.write_rows), torch.from_numpy(plan.write_slots)
    layer.write(key[rows], value[rows], slots)
    output = layer.attend(
        query,
        torch.from_numpy(plan.query_start),
        torch.from_numpy(plan.seq_lens),
        torch.from_numpy(plan.block_table),
        window,
    )

    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    begin = np.cumsum(scheduled) - scheduled
    for r in range(requests):
        k, v = context[r]
        for row in range(before[r] + plan.nodes.sizes[r]):
            if row < before[r]:
                seen = list(range(row + 1))
            else:
                path = sorted(ancestors(step["parents"][r], row - int(before[r])))
                seen = list(range(before[r])) + [int(before[r]) + node for node in path]
            keys = torch.cat((k, key[begin[r] + np.array(seen)]))
            values = torch.cat((v, value[begin[r] + np.array(seen)]))
            if window > 0:
                keys, values = keys[-window:], values[-window:]
            torch.testing.assert_close(
                output[begin[r] + row].double(), dense(query[begin[r] + row], keys, values), **tolerance
            )

    # Commit a random exit of each request: its own blocks then hold the accepted path, and a causal pass agrees.
    exits = np.array([step["rng"].integers(0, n + 1) for n in plan.nodes.sizes])
    paths = [sorted(ancestors(step["parents"][r], int(e) - 1)) for r, e in enumerate(exits)]
    last = computed + before - 1 + np.array([len(p) for p in paths])
    source, destination = plan.commit_blocks(exits, np.array([len(p) for p in paths]), BLOCK)
    copier.copy(torch.from_numpy(source), torch.from_numpy(destination))
    probe = make(requests, heads)
    lens = torch.from_numpy((last + 1).astype(np.int32))
    after = layer.attend(probe, torch.arange(requests + 1, dtype=torch.int32), lens, torch.from_numpy(table), window)
    for r, path in enumerate(paths):
        rows_of_path = begin[r] + np.array(list(range(before[r])) + [int(before[r]) + node for node in path])
        keys, values = torch.cat((context[r][0], key[rows_of_path])), torch.cat((context[r][1], value[rows_of_path]))
        if window > 0:
            keys, values = keys[-window:], values[-window:]
        torch.testing.assert_close(after[r].double(), dense(probe[r], keys, values), **tolerance)


def test_ramp() -> None:
    assert ramp(np.array([3, 0, 2])).tolist() == [0, 1, 2, 0, 1]
    assert ramp(np.array([], dtype=np.int64)).tolist() == []
