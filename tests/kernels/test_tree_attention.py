# SPDX-License-Identifier: Apache-2.0
"""tree_attention: mixed batches over a poisoned paged cache against float64 loops, and faults that must be seen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_targetrows.triton_kernels.tree_attention import (
    Tile,
    default_splits,
    launches,
    tree_attention,
    tree_attention_reference,
)
from vllm_targetrows.triton_kernels.tree_mask import tree_mask_reference

FORMS = ("chain", "star", "binary", "random")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def parents_of(form: str, size: int, seed: int = 0) -> list[int]:
    """Parents of one tree; ``random`` is in parents-first order but not in preorder."""
    rng = random.Random(seed)
    makers = {
        "chain": lambda i: i - 1,
        "star": lambda i: -1,
        "binary": lambda i: (i + 1) // 2 - 1,
        "random": lambda i: rng.randrange(-1, i) if i else -1,
    }
    return [makers[form](i) for i in range(size)]


@dataclass(frozen=True)
class Request:
    """One request's part of a step."""

    computed: int = 30  # tokens in the cache before the step
    ordinary: int = 1  # rows up to and including the root
    tree: Sequence[int] = ()  # parents
    ignored: int = 0  # rows behind the tree

    @property
    def rows(self) -> int:
        return self.ordinary + len(self.tree) + self.ignored

    @property
    def seq_len(self) -> int:
        return self.computed + self.rows


@dataclass
class Step:
    """The tensors of a step; everything in the cache that no request owns is not a number."""

    tensors: dict[str, torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, splits: int = 1, **options: Any) -> torch.Tensor:
        out = torch.full_like(self.tensors["query"], float("nan"))
        tree_attention(**self.tensors, **{"out": out, "splits": splits, **self.options, **options})
        return out

    def reference(self) -> torch.Tensor:
        scales = {
            name: float(self.options[name]) for name in ("k_scale", "v_scale") if self.options.get(name) is not None
        }
        return tree_attention_reference(**self.tensors, **{**self.options, **scales})

    def check(self, splits: int = 1, tolerance: float | None = None, **options: Any) -> None:
        compare(self.run(splits, **options), self.reference(), tolerance)


def compare(out: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    tolerance = tolerance or TOLERANCE[out.dtype]
    assert expected.abs().max() > 0.05
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def empty_caches(blocks: int, page: int, heads: int, head: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[blocks, page, heads, head]`` as the back ends of vLLM hold them."""
    if layout == "together":  # one block holds, head after head, rows of key and value side by side
        key, value = torch.empty(blocks, heads, page, 2 * head).transpose(1, 2).split(head, dim=-1)
    elif layout == "HND":
        key, value = torch.empty(2, blocks, heads, page, head).transpose(2, 3).unbind(0)
    elif layout == "halves":  # each block: all keys, then all values
        key, value = torch.empty(blocks, 2, page, heads, head).unbind(1)
    else:
        assert layout == "NHD"
        key, value = torch.empty(blocks, page, heads, head), torch.empty(blocks, page, heads, head)
    return key, value


def make_step(
    requests: Sequence[Request],
    *,
    dtype: torch.dtype = torch.float16,
    cache: torch.dtype | None = None,
    kv_heads: int = 1,
    group: int = 2,
    head: int = 64,
    page: int = 16,
    layout: str = "together",
    padding: int = 0,
    spare_nodes: int = 0,
    seed: int = 0,
    **options: Any,
) -> Step:
    """Random queries, keys and values for a batch.  ``padding`` rows follow that belong to no request."""
    generator = torch.Generator().manual_seed(seed)
    shuffle = random.Random(seed)
    rows = [request.rows for request in requests]
    query_start = torch.tensor([sum(rows[:r]) for r in range(len(rows) + 1)], dtype=torch.int32)
    tokens, heads = sum(rows) + padding, kv_heads * group
    query = torch.randn(tokens, heads, head, generator=generator).to(dtype)

    used = [-(-request.seq_len // page) for request in requests]
    columns = max(used) + 2
    blocks = list(range(1, sum(used) + 3))
    shuffle.shuffle(blocks)
    block_table = torch.zeros(len(requests), columns, dtype=torch.int32)  # block 0 is nobody's
    key, value = empty_caches(sum(used) + 3, page, kv_heads, head, layout)
    for tensor in (key, value):
        tensor.fill_(float("nan"))
    for r, request in enumerate(requests):
        own, blocks = blocks[: used[r]], blocks[used[r] :]
        block_table[r, : used[r]] = torch.tensor(own, dtype=torch.int32)
        at = torch.arange(request.seq_len)
        place = (block_table[r].long()[at // page], at % page)
        for tensor in (key, value):
            tensor[place] = torch.randn(request.seq_len, kv_heads, head, generator=generator)
    key, value = (strided_cast(tensor, cache or dtype) for tensor in (key, value))

    nodes = max(len(request.tree) for request in requests) + spare_nodes
    parents = torch.full((len(requests), nodes), -7)
    for r, request in enumerate(requests):
        parents[r, : len(request.tree)] = torch.tensor(request.tree, dtype=torch.int64)
    depth, _, bits = tree_mask_reference(parents, torch.tensor([len(request.tree) for request in requests]))
    return Step(
        {
            "query": query,
            "key_cache": key,
            "value_cache": value,
            "block_table": block_table,
            "seq_lens": torch.tensor([request.seq_len for request in requests], dtype=torch.int32),
            "query_start": query_start,
            "before": torch.tensor([request.ordinary for request in requests], dtype=torch.int32),
            "bits": bits,
            "depth": depth,
        },
        {"scale": head**-0.5, **options},
    )


def strided_cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in another type, with its strides."""
    if dtype == tensor.dtype:
        return tensor
    stored = torch.float8_e4m3fn if dtype == torch.uint8 else dtype
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    result = torch.empty(size, dtype=stored).as_strided(tensor.shape, tensor.stride())
    result.copy_(tensor.to(stored))
    return result.view(dtype)


MIXED = (
    Request(37, 1, parents_of("random", 11, 1), ignored=2),
    Request(0, 23),  # a prefill chunk from the beginning
    Request(50, 1),  # decode without a tree
    Request(20, 9, parents_of("binary", 7)),  # the end of a prefill with a tree below it
    Request(5, 1, parents_of("star", 4), ignored=1),
)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mixed_batch(dtype: torch.dtype, splits: int) -> None:
    make_step(MIXED, dtype=dtype, kv_heads=2, group=2).check(splits)


@pytest.mark.parametrize(
    ("page", "layout"),
    [(16, "together"), (16, "NHD"), (24, "HND"), (32, "halves"), (64, "together"), (128, "HND"), (784, "together")],
)
def test_pages_and_layouts(page: int, layout: str) -> None:
    make_step(MIXED[:4], page=page, layout=layout, kv_heads=2, group=1).check(2)


@pytest.mark.parametrize("head", [80, 96, 128, 256])
def test_head_sizes(head: int) -> None:
    make_step(MIXED[:4], head=head, page=32).check()
    make_step(MIXED[2:], head=head, page=16).check(2)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_groups(group: int) -> None:
    make_step(MIXED, group=group, kv_heads=2).check(request_rows=3)
    make_step(MIXED, group=group).check(request_rows=20)


@pytest.mark.parametrize("window", [1, 2, 4, 33, 1000])
def test_sliding_window_counts_depth(window: int) -> None:
    """Also windows smaller than the tree is deep, where a deep node no longer sees the root."""
    requests = (
        Request(70, 1, parents_of("chain", 9)),
        Request(40, 3, parents_of("random", 14, 5), ignored=2),
        Request(150, 1, parents_of("binary", 6)),
        Request(0, 40),
    )
    step = make_step(requests, sliding_window=window)
    step.check()
    step.check(3, request_rows=4)


def test_soft_cap_and_sinks() -> None:
    sinks = torch.tensor([1.5, -0.5])
    for options in ({"softcap": 2.0}, {"sinks": sinks}, {"softcap": 30.0, "sinks": sinks, "sliding_window": 5}):
        step = make_step(MIXED, scale=0.5, **options)
        step.check()
        step.check(2)


@pytest.mark.parametrize("cache", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bit_cache_with_scales(cache: torch.dtype, dtype: torch.dtype) -> None:
    scales = {"k_scale": torch.tensor([0.7]), "v_scale": torch.tensor(1.9)}
    step = make_step(MIXED, dtype=dtype, cache=cache, **scales)
    step.check(tolerance=3 * TOLERANCE[dtype])
    step.check(2, tolerance=3 * TOLERANCE[dtype])


def test_eight_bit_decoding_is_exact() -> None:
    """One position per code: with itself as the only visible key, the row is the decoded value."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 1, 64)
    step = make_step([Request(0, 1) for _ in range(4)], page=1, cache=torch.uint8, group=1)
    step.tensors["block_table"][:, 0] = torch.arange(4)
    step.tensors["key_cache"] = torch.full((4, 1, 1, 64), 56, dtype=torch.uint8)  # 1.0
    step.tensors["value_cache"] = codes
    expected = codes.view(torch.float8_e4m3fn).float().view(4, 1, 64)
    assert expected.isnan().sum() == 2
    torch.testing.assert_close(step.run().float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_sequence_ends_around_a_page(page: int, off: int) -> None:
    tree = parents_of("binary", 6)
    rows = 1 + len(tree)
    requests = (
        Request(2 * page + off - rows, 1, tree),  # the step's last key ends the page
        Request(2 * page + off - 1, 1, tree),  # the root ends the page
        Request(2 * page + off - 1, 1),
    )
    make_step(requests, page=page).check()
    make_step(requests, page=page).check(2)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("window", [0, 5])
def test_a_chain_is_causal_attention(window: int, splits: int) -> None:
    step = make_step([Request(45, 1, parents_of("chain", 20))], sliding_window=window)
    chain = step.run(splits)
    step.tensors["before"] = torch.tensor([21], dtype=torch.int32)
    causal = step.run(splits)
    torch.testing.assert_close(chain, causal, rtol=1e-3, atol=1e-4)
    compare(causal, step.reference())


def test_more_splits_than_positions() -> None:
    make_step(MIXED).check(17)


def test_rows_of_no_request_are_left_alone() -> None:
    for splits in (1, 2):
        out = make_step(MIXED, padding=5).run(splits)
        assert out[-5:].isnan().all() and not out[:-5].isnan().any()


def test_requests_without_rows() -> None:
    """A batch padded to a captured size repeats the last start."""
    step = make_step(MIXED)
    expected = step.reference()
    for name in ("block_table", "seq_lens", "before", "bits", "depth"):
        value = step.tensors[name]
        step.tensors[name] = torch.cat((value, torch.zeros_like(value[:2])))
    start = step.tensors["query_start"]
    step.tensors["query_start"] = torch.cat((start, start[-1:], start[-1:]))
    compare(step.run(), expected)
    compare(step.run(2), expected)


def test_no_trees_at_all() -> None:
    step = make_step((Request(3, 8), Request(33, 1)))
    assert step.tensors["depth"].shape == (2, 0)
    step.check()


def test_a_tree_of_a_thousand_nodes() -> None:
    make_step((Request(100, 1, parents_of("random", 1024, 2)),), group=1).check(request_rows=128)


@settings(max_examples=20)
@given(data=st.data())
def test_any_step(data: st.DataObject) -> None:
    request = st.builds(
        lambda computed, ordinary, form, size, seed, ignored: Request(
            computed, ordinary, parents_of(form, size, seed), ignored if size else 0
        ),
        st.integers(0, 80),
        st.integers(1, 12),
        st.sampled_from(FORMS),
        st.integers(0, 70) | st.just(0),
        st.integers(0, 9),
        st.integers(0, 3),
    )
    requests = data.draw(st.lists(request, min_size=1, max_size=3))
    step = make_step(
        requests,
        dtype=data.draw(st.sampled_from([torch.float16, torch.float32])),
        group=data.draw(st.sampled_from([1, 3, 4])),
        page=data.draw(st.sampled_from([16, 32, 40, 64])),
        layout=data.draw(st.sampled_from(["together", "HND", "NHD"])),
        spare_nodes=data.draw(st.integers(0, 3)),
        sliding_window=data.draw(st.sampled_from([0, 0, 3, 20])),
        softcap=data.draw(st.sampled_from([0.0, 5.0])),
        seed=data.draw(st.integers(0, 99)),
    )
    step.check(data.draw(st.sampled_from([1, 2, 5])), request_rows=data.draw(st.sampled_from([None, 1, 30])))


def test_a_wrong_bit_is_seen() -> None:
    """Each single bit of each node: taken away when it is there, and one sibling's added."""
    tree = parents_of("binary", 6)
    step = make_step([Request(4, 1, tree)])
    good = step.reference()
    compare(step.run(), good)
    bits = step.tensors["bits"]
    for row, column in ((6, 6), (6, 3), (6, 1), (6, 4), (4, 2)):
        bits[0, row, 0] ^= 1 << column
        wrong = step.run()
        with pytest.raises(AssertionError):
            compare(wrong, good)
        same = [i for i in range(7) if i != row]
        compare(wrong[same], good[same])
        bits[0, row, 0] ^= 1 << column


@pytest.mark.parametrize("splits", [1, 2])
def test_a_wrong_page_is_seen(splits: int) -> None:
    step = make_step(MIXED)
    good = step.reference()
    table = step.tensors["block_table"]
    step.tensors["block_table"] = torch.cat((table[:, 1:], table[:, :1]), dim=1)
    with pytest.raises(AssertionError):
        compare(step.run(splits), good)
    step.tensors["block_table"] = (table + 1) % step.tensors["key_cache"].shape[0]
    with pytest.raises(AssertionError):
        compare(step.run(splits), good)


def split_launches(step: Step, splits: int) -> tuple[list[Any], torch.Tensor, torch.Tensor, torch.Tensor]:
    query = step.tensors["query"]
    tokens, heads, head = query.shape
    out = torch.full_like(query, float("nan"))
    partial = torch.full((splits, tokens, heads, head), float("nan"))
    lse = torch.full((splits, tokens, heads), float("nan"))
    options: dict[str, Any] = {"sliding_window": 0, "softcap": 0.0, "sinks": None, "k_scale": None, "v_scale": None}
    made = launches(
        **step.tensors,
        **{**options, **step.options},
        out=out,
        partial=partial,
        lse=lse,
        tile=Tile(32, 32, 4, 1),
        native_fp8=False,
    )
    return made, out, partial, lse


def test_a_wrong_sign_in_the_merge_is_seen() -> None:
    step = make_step(MIXED)
    good = step.reference()
    (attend, merge), out, _, lse = split_launches(step, 2)
    attend.run()
    merge.run()
    compare(out, good)
    lse.copy_(torch.where(lse.isinf(), lse, -lse))
    merge.run()
    with pytest.raises(AssertionError):
        compare(out, good)


def test_empty_splits_say_so() -> None:
    """A split without positions writes minus infinity and no values."""
    step = make_step([Request(10, 1, parents_of("chain", 3))])
    (attend, merge), out, partial, lse = split_launches(step, 4)
    attend.run()
    assert lse[0].isfinite().all() and (lse[1:] == float("-inf")).all()
    assert partial[1:].isnan().all()
    merge.run()
    compare(out, step.reference())


def test_wrong_arguments_are_named() -> None:
    def changed(**tensors: torch.Tensor) -> None:
        step = make_step(MIXED)
        tree_attention(**{**step.tensors, **tensors}, **step.options)

    step = make_step(MIXED)
    with pytest.raises(ValueError, match="seq_lens"):
        changed(seq_lens=step.tensors["seq_lens"].long())
    with pytest.raises(ValueError, match="bits"):
        changed(bits=step.tensors["bits"][:, :-1])
    with pytest.raises(ValueError, match="head size 72"):
        changed(query=torch.randn(4, 2, 72))
    with pytest.raises(ValueError, match="key_cache"):
        changed(key_cache=step.tensors["key_cache"][..., :32])
    with pytest.raises(ValueError, match="does not go with"):
        changed(query=step.tensors["query"].bfloat16())
    with pytest.raises(ValueError, match="divide"):
        changed(**{name: torch.randn(3, 16, 3, 64).half() for name in ("key_cache", "value_cache")})


def test_splits_fill_the_gpu_and_no_more() -> None:
    assert default_splits(1, 65536, 132) == 64
    assert default_splits(16, 65536, 132) == 16
    assert default_splits(1, 300, 132) == 1
    assert default_splits(1024, 65536, 132) == 1
    assert default_splits(8, 0, 132) == 1
