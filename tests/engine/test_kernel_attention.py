# SPDX-License-Identifier: Apache-2.0
"""The wiring of the GPU's kernels, in whole engines on the CPU: layout, attention and commit, kernels interpreted."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import engine_process
import numpy as np
import pytest
import scenarios

GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
_numbers = random.Random(3)
PROMPTS = [[_numbers.randrange(24) for _ in range(length)] for length in (1, 5, 30, 31, 45, 64)]
BATCHES: list[scenarios.Batch] = [(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def plain(tiny_pair: Any) -> list[list[int]]:
    return _tokens(engine_process.run(scenarios.answer, tiny_pair.target, {}, BATCHES))


def _tokens(result: dict[str, Any]) -> list[list[int]]:
    return [answer["sequences"][0]["tokens"] for answer in result["answers"][0]]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", ["draft", "root_draw"])
def test_engines_with_the_kernels_write_what_plain_vllm_writes(
    tiny_pair: Any, plain: list[list[int]], rule: str
) -> None:
    options = {
        "speculative_config": scenarios.target_rows(tiny_pair.drafter, 7, rule),
        "max_num_batched_tokens": 64,  # prompts are prefilled in chunks beside the trees
        "max_num_seqs": 8,
    }
    result = engine_process.run(
        scenarios.answer_with_kernels,
        tiny_pair.target,
        options,
        BATCHES,
        timeout=500,
    )
    assert _tokens(result) == plain
    (state,) = result["states"]
    assert state["accepted_tokens"] > 5 and state["tree_nodes"] > 100
    assert result["layers"]["tree"] > 50
    assert result["looks"] == {}


@pytest.mark.timeout(600)
def test_seeded_requests_draw_the_same_with_the_kernels(tiny_pair: Any) -> None:
    """The same uniforms through torch and through the kernels: children, selection, exit law and drawn token."""
    settings = [{**GREEDY, "temperature": 1.0, "top_p": 0.95 if i % 2 else 1.0, "seed": i} for i in range(5)]
    batches: list[scenarios.Batch] = [(PROMPTS, [*settings, GREEDY])]
    options = {"speculative_config": scenarios.target_rows(tiny_pair.drafter, 6, "root_draw")}
    torch_steps = engine_process.run(scenarios.answer, tiny_pair.target, options, batches)
    kernels = engine_process.run(scenarios.answer_with_kernels, tiny_pair.target, options, batches, timeout=500)
    assert _tokens(kernels) == _tokens(torch_steps)
    assert kernels["looks"] == {}
    counted = ("rounds", "emitted_tokens", "accepted_tokens", "tree_nodes", "absent")
    assert [kernels["states"][0][name] for name in counted] == [torch_steps["states"][0][name] for name in counted]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("int(x.max())", "__int__"),
        ("x.max().item()", "item"),
        ("if x.any(): pass", "__bool__"),
        ("x.tolist()", "tolist"),
        ("x.cpu()", "cpu"),
        ("x.numpy()", "numpy"),
        ("x.nonzero()", "nonzero"),
        ("torch.masked_select(x, x > 1)", "masked_select"),
        ("x[x > 1]", "__getitem__"),
        ("x[x > 1] = 2", "__setitem__"),
        ("x[x.argmax()]; torch.where(x > 1, x, 0)", None),
    ],
)
def test_a_look_is_noticed(code: str, name: str | None) -> None:
    import no_look
    import torch

    class Round:
        def sample(self, file: str) -> None:
            exec(compile(code, file, "exec"), {"x": torch.arange(3), "torch": torch})

        def _hand_over(self, file: str) -> None:
            exec(compile(code, file, "exec"), {"x": torch.arange(3), "torch": torch})

    ours = f"{no_look.OURS[0]}/planted.py"
    for method, file, seen in (("sample", ours, name), ("_hand_over", ours, None), ("sample", "elsewhere.py", None)):
        looks = no_look.watch(Round, method)
        getattr(Round(), method)(file)
        assert list(looks.found) == ([f"{ours}:1 {seen}"] if seen else []), (method, file)


def test_a_back_end_without_trees_is_refused_by_name() -> None:
    from vllm_targetrows.engine.compat import tree_layout

    backend = type("Other", (), {"get_name": staticmethod(lambda: "FLASHINFER")})
    with pytest.raises(ValueError, match=r"attention backend 'FLASHINFER'; allowed: CPU_ATTN, FLASH_ATTN, TRITON_ATTN"):
        tree_layout(backend)


@pytest.mark.parametrize(("written", "tokens"), [(-1, 0), (7, 7), ((-1, -1), 0), ((6, 0), 7)])
def test_every_back_ends_window_is_understood(written: Any, tokens: int) -> None:
    from vllm_targetrows.engine.kernel_attention import sliding_window

    assert sliding_window(SimpleNamespace(sliding_window=written)) == tokens


@pytest.mark.parametrize(
    ("kv_cache_dtype", "quantised_query"), [("auto", False), ("fp8", False), ("fp8", True), ("fp8_e4m3", True)]
)
def test_a_step_with_trees_attends_by_the_layers_settings(kv_cache_dtype: str, quantised_query: bool) -> None:
    """A chunk of a prompt beside a tree; the query may come quantised, for the back end's own kernel."""
    import torch

    from vllm_targetrows.engine.kernel_attention import TreeRows, attend
    from vllm_targetrows.triton_kernels.tree_attention import tree_attention_reference
    from vllm_targetrows.triton_kernels.tree_mask import tree_mask

    heads, kv_heads, head, block, e4m3 = 4, 2, 64, 16, torch.float8_e4m3fn
    generator = torch.Generator().manual_seed(0)
    kv_cache = torch.randn(9, kv_heads, block, 2 * head, generator=generator)
    if kv_cache_dtype != "auto":
        kv_cache = kv_cache.to(e4m3).view(torch.uint8)
    query = torch.randn(9, heads * head, generator=generator)  # a padded row at its end
    q_scale, k_scale, v_scale = torch.tensor(0.5), torch.tensor(0.7), torch.tensor(1.9)
    depth, _, bits = tree_mask(torch.tensor([[-1, 0, -1], [-1, -1, -1]]), torch.tensor([3, 0]))
    metadata = SimpleNamespace(
        num_actual_tokens=8,
        max_seq_len=40,
        block_table=torch.tensor([[3, 1, 5], [2, 4, 7]], dtype=torch.int32),
        seq_lens=torch.tensor([37, 4], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 4, 8], dtype=torch.int32),
    )
    impl = SimpleNamespace(
        num_heads=heads, head_size=head, scale=0.3, kv_cache_dtype=kv_cache_dtype, sliding_window=(19, 0),
        logits_soft_cap=5.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]),
    )  # fmt: skip
    layer = SimpleNamespace(_q_scale=q_scale, _k_scale=k_scale, _v_scale=v_scale)
    rows = TreeRows(torch.tensor([1, 4], dtype=torch.int32), bits, depth)
    given = (query / q_scale).to(e4m3) if quantised_query else query
    output = torch.full((9, heads * head), float("nan"))
    attend(impl, layer, given, kv_cache, metadata, rows, output)

    quantised = kv_cache_dtype != "auto"
    key, value = kv_cache.transpose(1, 2).split(head, dim=-1)
    expected = tree_attention_reference(
        (given.float() * q_scale if quantised_query else query)[:8].view(8, heads, head),
        *(part.contiguous() for part in (key, value)),
        metadata.block_table, metadata.seq_lens, metadata.query_start_loc, rows.before, bits, depth,
        scale=0.3, sliding_window=20, softcap=5.0, sinks=impl.sinks,
        k_scale=0.7 if quantised else 1.0, v_scale=1.9 if quantised else 1.0,
    )  # fmt: skip
    torch.testing.assert_close(output[:8].view(8, heads, head).double(), expected, rtol=1e-4, atol=1e-4)
    assert output[8].isnan().all()


def test_the_plan_names_every_node() -> None:
    import torch

    from vllm_targetrows.engine.kernel_attention import TreeSlots

    caches = [torch.zeros(9, 2, 16, 128) for _ in range(2)]
    layout = TreeSlots(caches, np.zeros(0, dtype=np.int64), 16)
    parents = np.array([[-1, 0, 0, -1], [-1, -1, -1, -1], [-1, 0, 1, -1]])
    sizes, before, drafts = np.array([4, 0, 3]), np.array([1, 5, 2]), np.array([4, 0, 5])
    step = layout.plan(parents, sizes, np.array([20, 0, 7]), before + drafts, drafts, np.zeros((3, 4), dtype=np.int32))
    assert step.nodes.rows.tolist() == [1, 2, 3, 4, 12, 13, 14]  # 5 rows, 5 rows, then two before the tree
    assert step.nodes.depth.tolist() == [1, 2, 2, 1, 1, 2, 3]
    assert step.nodes.request.tolist() == [0, 0, 0, 0, 2, 2, 2]
