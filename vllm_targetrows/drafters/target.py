# SPDX-License-Identifier: Apache-2.0
"""What a drafter learns from: a target's hidden states and rows at every position of a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Seen:
    """What the target made of a batch of texts of ``S`` tokens."""

    features: Tensor
    """``[B, S, 3 H]``: its auxiliary hidden states, which vLLM hands to an EAGLE-3 head."""
    last: Tensor
    """``[B, S, H]``: its last hidden state after the final norm; times its head, the row of the next token."""


class Target:
    """A causal language model of transformers, frozen.

    Args:
        name: folder or name on the hub.
        dtype: its weights and what it returns are of this type.
        device: where it runs.
    """

    def __init__(self, name: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        self.name = Path(name).name
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval().requires_grad_(False).to(device)
        self.config: Any = self.model.config.get_text_config()
        layers = self.config.num_hidden_layers
        if layers < 6:
            raise ValueError(f"{name} has {layers} layers: vLLM's EAGLE-3 features come from at least 6")
        self.feature_layers = (2, layers // 2, layers - 3)
        """The layers whose inputs are the features: what vLLM takes when a head's configuration names none."""

    @property
    def embedding(self) -> Tensor:
        """``[V, H]``: the embedding of tokens."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Tensor:
        """``[V, H]``: the weights that turn the last hidden state into a row's logits."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def last_layer(self) -> torch.nn.Module:
        """The last decoder layer, from which a new head borrows."""
        layer: torch.nn.Module = self.model.get_decoder().layers[-1]
        return layer

    @torch.no_grad()
    def see(self, tokens: Tensor) -> Seen:
        """Read texts, ``[B, S]``.  Padding belongs on the right, where causal attention keeps it from the texts."""
        out = self.model.get_decoder()(input_ids=tokens, use_cache=False, output_hidden_states=True)
        states = out.hidden_states
        return Seen(torch.cat([states[layer] for layer in self.feature_layers], dim=-1), out.last_hidden_state)
