# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 head, as vLLM's ``LlamaForCausalLMEagle3`` runs it, in a form that can be trained.

The head (arXiv 2503.01840) predicts two tokens ahead of the features it reads: with the target's features at position
``i`` and token ``i + 1`` it estimates the target's row at position ``i + 1``, the distribution of token ``i + 2``.  One
step further it has no features of the target and reads its own output in their place.  Training does the same
("training-time test"): step ``j`` of the unroll starts from every position at once, and attends to what a drafting
round would have in its KV cache, the entries of step 0 up to its base and its own chain's entries of steps 1 to ``j``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vllm_targetrows.drafters.target import Target


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a head; names as in Hugging Face configurations of Llama."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 8192

    @classmethod
    def for_target(cls, target: Target, draft_vocab_size: int) -> HeadConfig:
        """A head with the sizes of one of the target's layers."""
        c = target.config
        theta = getattr(c, "rope_theta", None) or (getattr(c, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
        return cls(
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_key_value_heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
            vocab_size=c.vocab_size,
            draft_vocab_size=draft_vocab_size,
            rms_norm_eps=getattr(c, "rms_norm_eps", 1e-5),
            rope_theta=float(theta),
            max_position_embeddings=c.max_position_embeddings,
        )


class Cached:
    """Keys and values of an unroll: those of step 0, and one tensor for each further step."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []


class Attention(nn.Module):
    """Attention of one step of the unroll."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        inputs, d = 2 * config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(inputs, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(inputs, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(inputs, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], cached: Cached) -> Tensor:
        """``[B, T, 2 H] -> [B, T, H]``; adds this step's keys and values to ``cached``."""
        batch, length, _ = x.shape
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        shape = (batch, length, -1, self.config.head_dim)
        query = _rotated(self.q_proj(x).view(shape), rotary)
        cached.keys.append(_rotated(self.k_proj(x).view(shape), rotary))
        cached.values.append(self.v_proj(x).view(shape))
        # [B, key heads, groups, T, d]: the queries that share a key head side by side.
        query = query.view(batch, length, -1, groups, self.config.head_dim).permute(0, 2, 3, 1, 4)
        query = query * self.config.head_dim**-0.5
        keys = [k[:, :length].transpose(1, 2).unsqueeze(2) for k in cached.keys]  # [B, key heads, 1, T, d]
        values = [v[:, :length].transpose(1, 2).unsqueeze(2) for v in cached.values]
        # Base i sees step 0 up to i, then its own chain: the entry of each later position is the chain's, not step 0's.
        ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = [(query @ keys[0].transpose(-1, -2)).masked_fill(ahead, float("-inf"))]
        scores += [(query * key).sum(-1, keepdim=True) for key in keys[1:]]
        weights = torch.cat(scores, dim=-1).float().softmax(-1).to(x.dtype)
        mixed = weights[..., :length] @ values[0]
        for step, value in enumerate(values[1:]):
            mixed = mixed + weights[..., length + step, None] * value
        out: Tensor = self.o_proj(mixed.permute(0, 3, 1, 2, 4).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """Llama's gated feed-forward layer."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H] -> [..., H]``."""
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """The head's one decoder layer: reads a token's embedding beside the features."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn = Attention(config)
        self.mlp = MLP(config)

    def forward(self, embedded: Tensor, features: Tensor, rotary: tuple[Tensor, Tensor], cached: Cached) -> Tensor:
        """``[B, T, H], [B, T, H] -> [B, T, H]``."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(features)], dim=-1)
        hidden = features + self.self_attn(both, rotary, cached)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(nn.Module):
    """An EAGLE-3 head over a draft vocabulary.

    Args:
        config: its sizes.
        draft_tokens: ``[draft_vocab_size]``, int64, increasing: the target's tokens that it can propose.
    """

    draft_tokens: Tensor

    def __init__(self, config: HeadConfig, draft_tokens: Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("draft_tokens", draft_tokens, persistent=False)

    @classmethod
    def from_target(cls, target: Target, draft_tokens: Tensor) -> Eagle3Head:
        """A new head that starts from the target's last layer and head, as far as the shapes agree.

        The features' half of the attention's input starts as the layer's own input, the embedding's half at zero, and
        ``fc`` passes the last of the three features on.
        """
        head = cls(HeadConfig.for_target(target, len(draft_tokens)), draft_tokens)
        size = head.config.hidden_size
        layer = dict(target.last_layer.named_parameters())
        with torch.no_grad():
            for name, parameter in head.midlayer.named_parameters():
                source = layer.get(name.replace("hidden_norm", "input_layernorm"))
                if source is None:
                    continue
                if source.shape == parameter.shape:
                    parameter.copy_(source)
                elif parameter.shape == (source.shape[0], 2 * size) and source.shape[1] == size:
                    parameter[:, :size] = 0
                    parameter[:, size:] = source
            head.fc.weight.zero_()
            head.fc.weight[:, 2 * size :] = torch.eye(size)
            head.lm_head.weight.copy_(target.head[draft_tokens])
            final = getattr(target.model.get_decoder(), "norm", None)
            if final is not None:
                head.norm.weight.copy_(final.weight)
        return head

    def unroll(self, embedded: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """The hidden states of each step of a training-time test.

        Args:
            embedded: ``[B, S, H]``, the tokens' embeddings.
            features: ``[B, S, 3 H]``, the target's.
            steps: how many steps; ``S`` must exceed it.

        Yields:
            At step ``j`` ``[B, S - 1 - j, H]``: normed, for base ``i`` the estimate of the target's row at position
            ``i + 1 + j``.
        """
        hidden = self.fc(features)
        cached = Cached()
        for step in range(steps):
            length = embedded.shape[1] - 1 - step
            positions = torch.arange(step, step + length, device=embedded.device)
            rotary = _rotary(positions, self.config, embedded.dtype)
            hidden = self.midlayer(embedded[:, 1 + step :], hidden[:, :length], rotary, cached)
            yield self.norm(hidden)

    def save(self, folder: Path, extra: dict[str, Any] | None = None) -> None:
        """Write a checkpoint that vLLM loads, in bfloat16.

        Args:
            folder: made if it does not exist.
            extra: more entries of ``config.json``.
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        known = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        known[self.draft_tokens] = True
        tensors = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in self.state_dict().items()}
        tensors["d2t"] = self.draft_tokens.cpu() - torch.arange(len(self.draft_tokens))
        tensors["t2d"] = known
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **asdict(self.config),
            **(extra or {}),
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Eagle3Head:
        """Read a checkpoint of :meth:`save`, or one of the same architecture and names."""
        from safetensors.torch import load_file

        values = json.loads((folder / "config.json").read_text())
        config = HeadConfig(**{name: values[name] for name in HeadConfig.__dataclass_fields__ if name in values})
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("t2d")
        draft_tokens = tensors.pop("d2t") + torch.arange(config.draft_vocab_size)
        head = cls(config, draft_tokens)
        head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        return head


def _rotary(positions: Tensor, config: HeadConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, ``[T, 1, head_dim / 2]``, of rotary position embedding in Llama's layout."""
    half = config.head_dim // 2
    rate = config.rope_theta ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angle = (positions.float()[:, None] * rate)[:, None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """``[B, T, heads, d]``, each pair of its halves turned by the position's angle."""
    cosine, sine = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
