# SPDX-License-Identifier: Apache-2.0
"""Tiny random models: a Llama target with a vocabulary of 24 and an EAGLE-3 head in the format that stock vLLM loads.

The target's next-token distributions are far from uniform and depend on the whole context.  The head is built, not
trained: its attention copies the embedding of the newest token and its output layer is the target's, so that it agrees
with the target often enough for paths of every depth to be accepted, and misses often enough for every kind of exit.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 24
DRAFT_VOCABULARY = 16
LAYERS = 8
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32  # the smallest that vLLM's CPU attention takes
INTERMEDIATE = 96
END_OF_TEXT = 1

#: One character a token, so that text, stop strings and grammars can be tested on the tiny model too.
TOKENS = ["<unk>", "<eos>", *"abcdefghijklmnop", *'01{}":']

_SHAPE = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}


def make_tiny_pair(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write a tiny target and its EAGLE-3 head below ``folder`` and return their two folders.

    The weights depend on ``seed`` alone.  The target's folder has a tokenizer with one character a token.
    """
    generator = torch.Generator().manual_seed(seed)
    target = _target_weights(generator)
    drafter = _drafter_weights(generator, target)
    _save_pair(folder, target, drafter)
    return folder / "target", folder / "drafter"


FORCED = (6, 7)
"""The only two tokens of ``make_forced_pair``, ``a`` and ``b``."""


def make_forced_pair(folder: Path, first: float, below: float) -> tuple[Path, Path]:
    """A target whose row is uniform over ``FORCED`` everywhere, and a drafter whose rows depend on the depth alone.

    All embeddings are one vector and no layer adds anything, so the target's last state is a constant.  The drafter's
    state starts at one axis; its MLP turns it by a known step a level, and the output layer reads the angle.

    Args:
        first, below: the drafter's probability of ``a`` in the pool's first level, and in its second (and below, if
            the two are the same).
    """
    generator = torch.Generator().manual_seed(0)
    target = _target_weights(generator)
    target["model.embed_tokens.weight"] = torch.ones(VOCABULARY, HIDDEN)
    for name in target:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            target[name] = torch.zeros_like(target[name])
    logits = torch.full((VOCABULARY,), -60.0)
    logits[list(FORCED)] = 0.0
    target["lm_head.weight"] = (logits / HIDDEN)[:, None].expand(VOCABULARY, HIDDEN)
    drafter = _drafter_weights(generator, target)
    for name in ("fc", "midlayer.self_attn.o_proj", "midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"):
        drafter[name + ".weight"] = torch.zeros_like(drafter[name + ".weight"])
    drafter["fc.weight"][0, -HIDDEN] = 1.0  # the state starts as the first axis
    drafter["midlayer.mlp.gate_proj.weight"][0, 0] = 1 / 8
    drafter["midlayer.mlp.up_proj.weight"][0, 0] = 1.0
    turn = drafter["midlayer.mlp.down_proj.weight"] = torch.zeros(HIDDEN, INTERMEDIATE)
    turn[1, 0] = 0.0 if first == below else 0.2
    state, seen = torch.eye(HIDDEN)[0], []
    for _ in range(2):
        normed = state * (state.square().mean() + 1e-5).rsqrt()
        state = state + turn[:, 0] * torch.nn.functional.silu(normed[0] / 8) * normed[0]
        seen.append((state * (state.square().mean() + 1e-5).rsqrt())[:2])
    odds = torch.tensor([math.log(first / (1 - first)), math.log(below / (1 - below))])
    reads = torch.linalg.lstsq(torch.stack(seen), odds[:, None]).solution[:, 0]
    head = torch.zeros(DRAFT_VOCABULARY, HIDDEN)
    head[:, 0] = -40 / seen[0][0]
    mapped = (torch.arange(DRAFT_VOCABULARY) * VOCABULARY // DRAFT_VOCABULARY).tolist()
    head[mapped.index(FORCED[0])] = torch.nn.functional.pad(reads, (0, HIDDEN - 2))
    head[mapped.index(FORCED[1])] = 0.0
    drafter["lm_head.weight"] = head
    _save_pair(folder, target, drafter)
    return folder / "target", folder / "drafter"


def _matrix(generator: torch.Generator, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
    """A random matrix that maps inputs of unit variance to outputs of variance ``gain ** 2``."""
    return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))


def _target_weights(generator: torch.Generator) -> dict[str, torch.Tensor]:
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _matrix(generator, VOCABULARY, HIDDEN, gain=2.0),
    }
    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights |= {
            name + "input_layernorm.weight": torch.ones(HIDDEN),
            name + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            name + "self_attn.q_proj.weight": _matrix(generator, query, HIDDEN, gain=1.5),
            name + "self_attn.k_proj.weight": _matrix(generator, kv, HIDDEN, gain=1.5),
            name + "self_attn.v_proj.weight": _matrix(generator, kv, HIDDEN),
            name + "self_attn.o_proj.weight": _matrix(generator, HIDDEN, query, gain=0.25),
            name + "mlp.gate_proj.weight": _matrix(generator, INTERMEDIATE, HIDDEN),
            name + "mlp.up_proj.weight": _matrix(generator, INTERMEDIATE, HIDDEN),
            name + "mlp.down_proj.weight": _matrix(generator, HIDDEN, INTERMEDIATE, gain=0.3),
        }
    return weights


def _drafter_weights(generator: torch.Generator, target: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    # The head's attention sees (embedding, features) side by side.  Query and key are one random image of the
    # embedding, so a position attends to itself and to equal tokens; value and output carry the embedding through.
    image = _matrix(generator, kv, HIDDEN, gain=1.5)
    features = torch.zeros(kv, HIDDEN)
    carry = torch.eye(HIDDEN)  # kv = 64 = HIDDEN: the value is the embedding itself
    group = HEADS // KV_HEADS
    query_rows = torch.cat([image.view(KV_HEADS, HEAD_DIM, HIDDEN)] * group, dim=1).reshape(query, HIDDEN)
    output = torch.cat([carry.T.view(HIDDEN, KV_HEADS, HEAD_DIM)] * group, dim=2).reshape(HIDDEN, query) / group
    mapped = torch.arange(DRAFT_VOCABULARY) * VOCABULARY // DRAFT_VOCABULARY  # draft id -> target id
    known = torch.zeros(VOCABULARY, dtype=torch.bool)
    known[mapped] = True
    return {
        "fc.weight": torch.cat(
            [
                _matrix(generator, HIDDEN, 2 * HIDDEN, gain=0.1),
                0.2 * torch.eye(HIDDEN),  # the features nearest to the target's output
            ],
            dim=1,
        ),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "midlayer.post_attention_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.self_attn.q_proj.weight": torch.cat([query_rows, _matrix(generator, query, HIDDEN, gain=0.2)], dim=1),
        "midlayer.self_attn.k_proj.weight": torch.cat([image, features], dim=1),
        "midlayer.self_attn.v_proj.weight": torch.cat([carry, features], dim=1),
        "midlayer.self_attn.o_proj.weight": output,
        "midlayer.mlp.gate_proj.weight": _matrix(generator, INTERMEDIATE, HIDDEN),
        "midlayer.mlp.up_proj.weight": _matrix(generator, INTERMEDIATE, HIDDEN),
        "midlayer.mlp.down_proj.weight": _matrix(generator, HIDDEN, INTERMEDIATE, gain=0.2),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": target["lm_head.weight"][mapped].clone(),
        "d2t": mapped - torch.arange(DRAFT_VOCABULARY),
        "t2d": known,
    }


def _save_pair(folder: Path, target: dict[str, torch.Tensor], drafter: dict[str, torch.Tensor]) -> None:
    target_folder, drafter_folder = folder / "target", folder / "drafter"
    _save(
        target_folder,
        {
            **_SHAPE,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": LAYERS,
        },
        target,
    )
    _save(
        drafter_folder,
        {
            **_SHAPE,
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": DRAFT_VOCABULARY,
        },
        drafter,
    )
    _save_tokenizer(target_folder)


def _save(folder: Path, config: dict[str, object], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder)
