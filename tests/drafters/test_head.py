# SPDX-License-Identifier: Apache-2.0
"""The unroll of a head against drafting rounds played one by one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_targetrows.drafters.head import Eagle3Head, HeadConfig

CONFIG = HeadConfig(
    hidden_size=8, intermediate_size=12, num_attention_heads=4, num_key_value_heads=2, head_dim=4, vocab_size=20,
    draft_vocab_size=6,
)  # fmt: skip


def make_head(seed: int) -> Eagle3Head:
    torch.manual_seed(seed)
    head = Eagle3Head(CONFIG, torch.tensor([1, 2, 5, 7, 11, 19])).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return head


def rms_norm(x, weight):
    return x / math.sqrt(float((x * x).mean()) + CONFIG.rms_norm_eps) * weight


def turned(x, position):
    """One head's vector turned by its position: pairs (n, n + d / 2)."""
    half, out = len(x) // 2, torch.empty_like(x)
    for n in range(half):
        angle = position * CONFIG.rope_theta ** (-n / half)
        out[n] = x[n] * math.cos(angle) - x[n + half] * math.sin(angle)
        out[n + half] = x[n + half] * math.cos(angle) + x[n] * math.sin(angle)
    return out


def layer(head, embedded, feature, position, keys, values):
    """The decoder layer for one token; its key and value are appended."""
    mid, attention, d = head.midlayer, head.midlayer.self_attn, CONFIG.head_dim
    x = torch.cat([rms_norm(embedded, mid.input_layernorm.weight), rms_norm(feature, mid.hidden_norm.weight)])
    query, key, value = (projection.weight @ x for projection in (attention.q_proj, attention.k_proj, attention.v_proj))
    keys.append([turned(part, position) for part in key.split(d)])
    values.append(value.split(d))
    mixed = []
    for number, part in enumerate(query.split(d)):
        shared = number // (CONFIG.num_attention_heads // CONFIG.num_key_value_heads)
        scores = torch.stack([turned(part, position) @ k[shared] / math.sqrt(d) for k in keys])
        mixed.append(sum(w * v[shared] for w, v in zip(scores.softmax(0), values, strict=True)))
    hidden = feature + attention.o_proj.weight @ torch.cat(mixed)
    y = rms_norm(hidden, mid.post_attention_layernorm.weight)
    gate, up = mid.mlp.gate_proj.weight @ y, mid.mlp.up_proj.weight @ y
    return hidden + mid.mlp.down_proj.weight @ (torch.nn.functional.silu(gate) * up)


def one_round(head, embedded, features, base, steps):
    """A drafting round of a chain: catches up to position ``base``, then runs on its own output."""
    keys, values, out = [], [], []
    for position in range(base + 1):
        hidden = layer(head, embedded[position + 1], head.fc.weight @ features[position], position, keys, values)
    for step in range(steps):
        if step:
            hidden = layer(head, embedded[base + 1 + step], hidden, base + step, keys, values)
        out.append(rms_norm(hidden, head.norm.weight))
    return out


@given(length=st.integers(2, 7), steps=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_the_unroll_is_all_rounds_at_once(length, steps, seed):
    steps = min(steps, length - 1)
    head = make_head(seed)
    embedded = torch.randn(2, length, 8, dtype=torch.float64)
    features = torch.randn(2, length, 24, dtype=torch.float64)
    with torch.no_grad():
        got = list(head.unroll(embedded, features, steps))
        for text in range(2):
            for base in range(length - 1):
                chain = one_round(head, embedded[text], features[text], base, min(steps, length - 1 - base))
                for step, expected in enumerate(chain):
                    torch.testing.assert_close(got[step][text, base], expected, rtol=1e-6, atol=1e-6)
    assert [each.shape for each in got] == [(2, length - 1 - step, 8) for step in range(steps)]


def test_padding_on_the_right_changes_nothing():
    head = make_head(3)
    embedded, features = torch.randn(1, 9, 8, dtype=torch.float64), torch.randn(1, 9, 24, dtype=torch.float64)
    short = list(head.unroll(embedded[:, :6], features[:, :6], 3))
    for step, long in enumerate(head.unroll(embedded, features, 3)):
        torch.testing.assert_close(long[:, : 5 - step], short[step])


def test_a_checkpoint_comes_back(tmp_path):
    head = make_head(5).bfloat16().float()
    head.save(tmp_path, {"note": "kept"})
    back = Eagle3Head.load(tmp_path)
    assert back.config == head.config
    assert torch.equal(back.draft_tokens, head.draft_tokens)
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), head.state_dict().values(), strict=True))


@pytest.mark.parametrize("steps", [1, 2])
def test_every_parameter_learns(steps):
    head = make_head(7)
    embedded, features = torch.randn(1, 5, 8, dtype=torch.float64), torch.randn(1, 5, 24, dtype=torch.float64)
    sum(head.lm_head(hidden).square().sum() for hidden in head.unroll(embedded, features, steps)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
