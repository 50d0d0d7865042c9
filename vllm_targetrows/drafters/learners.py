# SPDX-License-Identifier: Apache-2.0
"""What is trained: an EAGLE-3 head, or a standalone language model, and what each learns from a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from vllm_targetrows.drafters.conversations import Conversation
from vllm_targetrows.drafters.distillation import Vocabulary, distillation_loss, teacher_rows
from vllm_targetrows.drafters.features import FeatureStore
from vllm_targetrows.drafters.head import Eagle3Head
from vllm_targetrows.drafters.target import Seen, Target

POOL_WIDTH = 10
"""A pool's first level has at most so many tokens: a token beyond them is *absent*."""


class TrainSettings(BaseModel):
    """What a training run depends on, besides its data.  A folder is continued with the same ones only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["eagle3", "lm"] = Field(
        default="eagle3", description="eagle3: a head on the target's features; lm: a standalone language model"
    )
    tokens: int = Field(
        default=6_000_000, ge=1, description="tokens of text to train on; the data repeats when it ends"
    )
    draft_vocabulary: int = Field(
        default=32_768, ge=1, description="the most frequent tokens, which a head can propose"
    )
    frequent: int = Field(default=4096, ge=0, description="tokens in the rows of every batch, beside its texts'")
    sampled: int = Field(default=2048, ge=0, description="other tokens that are sampled for a batch's rows")
    layers: tuple[int, ...] = Field(default=(), description="the target's layers that a language model starts from")
    unroll: int = Field(default=4, ge=1, description="steps of training-time test of a head")
    decay: float = Field(default=0.8, gt=0, le=1, description="each further step weighs so much less in the loss")
    batch_tokens: int = Field(default=2048, ge=1, description="most tokens of a batch, padding included")
    longest: int = Field(default=512, ge=8, description="texts are cut after so many tokens")
    learning_rate: float = Field(
        default=8e-4, gt=0, description="at its highest; it falls along a cosine to a twentieth"
    )
    warmup: float = Field(default=0.03, ge=0, lt=1, description="share of the run in which the learning rate rises")
    clip: float = Field(default=1.0, gt=0, description="most norm of a step's gradient")
    seed: int = Field(default=0, description="of the batches and their sampled tokens")


@dataclass(frozen=True)
class Batch:
    """Texts of similar length side by side, padded on the right."""

    tokens: Tensor
    """``[B, S]``, int64."""
    answer: Tensor
    """``[B, S]``, bool: positions whose rows the answer's tokens were drawn from."""
    texts: tuple[int, ...] | None = None
    """The texts' indices in the store of features; ``None``: they are not there."""
    number: int = 0
    """Of the batch, in its run."""

    @classmethod
    def of(
        cls,
        conversations: Sequence[Conversation],
        longest: int,
        texts: Sequence[int] | None = None,
        number: int = 0,
    ) -> Batch:
        """A batch of conversations, each cut after ``longest`` tokens."""
        cut = [(each.prompt + each.answer)[:longest] for each in conversations]
        length = max(map(len, cut))
        tokens = torch.zeros(len(cut), length, dtype=torch.int64)
        answer = torch.zeros(len(cut), length, dtype=torch.bool)
        for row, (text, each) in enumerate(zip(cut, conversations, strict=True)):
            tokens[row, : len(text)] = torch.tensor(text)
            answer[row, len(each.prompt) - 1 : len(text) - 1] = True
        return cls(tokens, answer, None if texts is None else tuple(texts), number)

    def to(self, device: str) -> Batch:
        """The same on a device."""
        return replace(self, tokens=self.tokens.to(device), answer=self.answer.to(device))


class Drafter(Protocol):
    """What is trained."""

    @property
    def module(self) -> nn.Module:
        """Its parameters."""

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of a batch, a scalar."""

    def measure(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Held-out measurements of a batch: name to numerator and denominator."""

    def save(self, folder: Path) -> None:
        """Write the drafter as vLLM loads it."""


class Rows:
    """The target's rows over a batch's sample of the drafter's vocabulary.

    Args:
        target: whose rows.
        store: its states of the texts in it; it reads other texts itself.
        drafted: ``[V]``, int64, increasing: the tokens that the drafter can propose.
        frequent: token ids, the most frequent first.
        settings: of the run.
    """

    def __init__(
        self, target: Target, store: FeatureStore | None, drafted: Tensor, frequent: Tensor, settings: TrainSettings
    ) -> None:
        self.target, self.store, self.drafted, self.settings = target, store, drafted, settings
        self._index = torch.full((target.config.vocab_size,), -1, device=drafted.device)  # of a token among the drafted
        self._index[drafted] = torch.arange(len(drafted), device=drafted.device)
        often = self._index[frequent[: settings.frequent]]
        self._frequent = often[often >= 0]
        self.head = target.head[drafted]
        """``[V, H]``: the target's head for the drafted tokens."""

    def see(self, batch: Batch) -> Seen:
        """The target's states of a batch."""
        if self.store is not None and batch.texts is not None:
            return self.store.see(batch.tokens, batch.texts)
        return self.target.see(batch.tokens)

    def vocabulary(self, batch: Batch) -> Vocabulary:
        """The tokens of the batch's rows, as indices of ``drafted``."""
        inside = self._index[torch.unique(batch.tokens)]
        certain = torch.cat([self._frequent, inside[inside >= 0]]).cpu()
        chance = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + batch.number)
        found = Vocabulary.sample(certain, len(self.drafted), self.settings.sampled, chance)
        return Vocabulary(found.tokens.to(batch.tokens.device), found.shift.to(batch.tokens.device))

    def teacher(self, last: Tensor, vocabulary: Vocabulary) -> Tensor:
        """``[N, H] -> [N, V]``: the rows of the target's last hidden states."""
        return teacher_rows(last, self.head[vocabulary.tokens], vocabulary.shift)

    def agreement(self, logits: Tensor, last: Tensor) -> dict[str, tuple[float, float]]:
        """What a drafter's rows share with the target's.

        ``top1``: the share of rows whose first token the drafter has first; ``absent``: whose first token is not among
        its first ten; ``overlap``: the probability that one draw of the drafter's is accepted; ``mass``: of the target
        on the drafter's first ten.

        Args:
            logits: ``[N, V]``, the drafter's, over the drafted tokens.
            last: ``[N, H]``, the target's last hidden states.

        Returns:
            Name to sum over rows and their number.
        """
        rows = (last @ self.target.head.T).float().softmax(-1)
        drafted = logits.float().softmax(-1)
        first = self.drafted[drafted.topk(min(POOL_WIDTH, drafted.shape[-1])).indices]
        has = first == rows.argmax(-1, keepdim=True)
        sums = {
            "top1": has[:, 0].sum(),
            "absent": len(rows) - has.any(-1).sum(),
            "overlap": torch.minimum(drafted, rows[:, self.drafted]).sum(),
            "mass": rows.gather(-1, first).sum(),
        }
        return {name: (float(value), float(len(rows))) for name, value in sums.items()}


class Eagle3Drafter:
    """An EAGLE-3 head in training.

    Args:
        head: the head.
        rows: what it learns; over its draft vocabulary.
    """

    def __init__(self, head: Eagle3Head, rows: Rows) -> None:
        self.module: Eagle3Head = head
        self.rows = rows
        self.settings = rows.settings

    def _steps(self, batch: Batch) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Step ``j``, its normed hidden states ``[B, L, H]``, which of them are learnt ``[B, L]``, and the target's
        last hidden states ``[B, L, H]`` of the rows that they estimate."""
        seen = self.rows.see(batch)
        embedded = nn.functional.embedding(batch.tokens, self.rows.target.embedding)
        steps = min(self.settings.unroll, batch.tokens.shape[1] - 1)
        for step, hidden in enumerate(self.module.unroll(embedded, seen.features, steps)):
            yield step, hidden, batch.answer[:, 1 + step :], seen.last[:, 1 + step :]

    def loss(self, batch: Batch) -> Tensor:
        """Mean over steps and rows of the answers, steps weighted by ``decay``."""
        vocabulary = self.rows.vocabulary(batch)
        head = self.module.lm_head.weight[vocabulary.tokens]
        total, scale = head.new_zeros(()), 0.0
        teacher = torch.empty(0)
        for step, hidden, learnt, last in self._steps(batch):
            if step == 0:  # of all rows that any step learns
                teacher = last.new_zeros(*last.shape[:2], len(vocabulary.tokens))
                teacher[learnt] = self.rows.teacher(last[learnt], vocabulary)
            count, weight = int(learnt.sum()), self.settings.decay**step
            weights = torch.full((count,), weight / max(count, 1), device=hidden.device)
            total = total + distillation_loss(
                hidden[learnt], head, vocabulary.shift, teacher[:, step:][learnt], weights
            )
            scale += weight
        return total / scale

    @torch.no_grad()
    def measure(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """``Rows.agreement`` by step of the unroll, as ``top1/0``."""
        found: dict[str, tuple[float, float]] = {}
        for step, hidden, learnt, last in self._steps(batch):
            agreement = self.rows.agreement(self.module.lm_head(hidden[learnt]), last[learnt])
            found |= {f"{name}/{step}": sums for name, sums in agreement.items()}
        return found

    def save(self, folder: Path) -> None:
        """Write the head."""
        self.module.save(folder)


class LanguageModelDrafter:
    """A standalone causal language model in training: some of the target's layers with its embedding and head.

    Args:
        model: of transformers; its embedding and head are the target's and stay so.
        tokenizer: saved beside it.
        rows: what it learns; over the whole vocabulary.
    """

    def __init__(self, model: Any, tokenizer: Any, rows: Rows) -> None:
        self.module: nn.Module = model
        self.model, self.tokenizer, self.rows = model, tokenizer, rows

    @classmethod
    def from_target(cls, target_name: str, layers: Sequence[int], rows: Rows) -> LanguageModelDrafter:
        """A new one that starts from some of the target's layers.

        Raises:
            ValueError: there is no such layer.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(target_name, dtype=torch.float32)
        decoder = model.get_decoder()
        if not layers or not all(0 <= layer < len(decoder.layers) for layer in layers):
            raise ValueError(f"layers={tuple(layers)}: allowed are one or more from 0 to {len(decoder.layers) - 1}")
        decoder.layers = nn.ModuleList([decoder.layers[layer] for layer in layers])
        for number, layer in enumerate(decoder.layers):
            layer.self_attn.layer_idx = number
        config = model.config.get_text_config()
        config.num_hidden_layers = len(layers)
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[layer] for layer in layers]
        for shared in (model.get_input_embeddings(), model.get_output_embeddings()):
            shared.requires_grad_(False)
        return cls(model, AutoTokenizer.from_pretrained(target_name), rows)

    def _hidden(self, batch: Batch) -> Tensor:
        hidden: Tensor = self.model.get_decoder()(input_ids=batch.tokens, use_cache=False).last_hidden_state
        return hidden[batch.answer]

    def loss(self, batch: Batch) -> Tensor:
        """Mean over the rows of the answers."""
        vocabulary = self.rows.vocabulary(batch)
        teacher = self.rows.teacher(self.rows.see(batch).last[batch.answer], vocabulary)
        hidden = self._hidden(batch)
        head = self.model.get_output_embeddings().weight[vocabulary.tokens]
        weights = torch.full((len(hidden),), 1 / max(len(hidden), 1), device=hidden.device)
        return distillation_loss(hidden, head, vocabulary.shift, teacher, weights)

    @torch.no_grad()
    def measure(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """``Rows.agreement``, as ``top1/0``: a language model reads true tokens, so every step is alike."""
        logits = self.model.get_output_embeddings()(self._hidden(batch))
        agreement = self.rows.agreement(logits, self.rows.see(batch).last[batch.answer])
        return {f"{name}/0": sums for name, sums in agreement.items()}

    def save(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint in bfloat16, with the tokenizer."""
        state = {name: tensor.to(torch.bfloat16) for name, tensor in self.model.state_dict().items()}
        self.model.config.dtype = torch.bfloat16
        self.model.save_pretrained(folder, state_dict=state)
        self.tokenizer.save_pretrained(folder)


def token_counts(conversations: Sequence[Conversation], vocabulary: int) -> Tensor:
    """How often each token comes in the answers, ``[vocabulary]``, int64."""
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for each in conversations:
        counts += torch.bincount(torch.tensor(each.answer), minlength=vocabulary)
    return counts


def by_frequency(counts: Tensor) -> Tensor:
    """Token ids, the most frequent first.  Ties, and tokens that never came, go by id: merges that a tokenizer learnt
    early have small ids and are the more common ones."""
    return counts.sort(descending=True, stable=True).indices
