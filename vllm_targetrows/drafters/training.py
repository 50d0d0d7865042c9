# SPDX-License-Identifier: Apache-2.0
"""Stage *train*: a drafter learns the target's rows.

The run's folder holds ``settings.json``, ``state.pt`` (all that a killed run needs to go on as if it had not been
killed), ``curve.jsonl`` (held-out measurements), ``curve.png`` and, each time the state is saved, the drafter itself.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from vllm_targetrows.drafters.conversations import Conversation, read
from vllm_targetrows.drafters.distillation import Vocabulary, distillation_loss, teacher_rows
from vllm_targetrows.drafters.features import FeatureStore
from vllm_targetrows.drafters.head import Eagle3Head
from vllm_targetrows.drafters.target import Target

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
    batch_tokens: int = Field(default=4096, ge=1, description="most tokens of a batch, padding included")
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


class Eagle3Drafter:
    """An EAGLE-3 head in training.

    Args:
        head: the head.
        target: what it learns from.
        settings: of the run.
        frequent: token ids, the most frequent first.
        store: the target's states of the texts in it.
    """

    def __init__(
        self,
        head: Eagle3Head,
        target: Target,
        settings: TrainSettings,
        frequent: Tensor,
        store: FeatureStore | None = None,
    ) -> None:
        self.module: Eagle3Head = head
        self.target = target
        self.settings = settings
        self.store = store
        self._index = torch.full((target.config.vocab_size,), -1)  # of a token in the draft vocabulary
        self._index[head.draft_tokens] = torch.arange(len(head.draft_tokens))
        self._frequent = self._index[frequent[: settings.frequent]]
        self._teacher_head = target.head[head.draft_tokens]

    def _steps(self, batch: Batch) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Step ``j``, its normed hidden states ``[B, L, H]``, which of them are learnt ``[B, L]``, and the target's
        last hidden states ``[B, L, H]`` of the rows that they estimate."""
        if self.store is not None and batch.texts is not None:
            seen = self.store.see(batch.tokens, batch.texts)
        else:
            seen = self.target.see(batch.tokens)
        embedded = nn.functional.embedding(batch.tokens, self.target.embedding)
        steps = min(self.settings.unroll, batch.tokens.shape[1] - 1)
        for step, hidden in enumerate(self.module.unroll(embedded, seen.features, steps)):
            yield step, hidden, batch.answer[:, 1 + step :], seen.last[:, 1 + step :]

    def _vocabulary(self, batch: Batch) -> Vocabulary:
        """The tokens of the batch's rows, as indices of the draft vocabulary."""
        inside = self._index[torch.unique(batch.tokens)]
        certain = torch.cat([self._frequent, inside[inside >= 0]])
        chance = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + batch.number)
        return Vocabulary.sample(certain, len(self.module.draft_tokens), self.settings.sampled, chance)

    def loss(self, batch: Batch) -> Tensor:
        """Mean over steps and rows of the answers, steps weighted by ``decay``."""
        total, scale = torch.zeros(()), 0.0
        vocabulary = self._vocabulary(batch)
        teacher_head = self._teacher_head[vocabulary.tokens]
        head = self.module.lm_head.weight[vocabulary.tokens]
        teacher = torch.empty(0)
        for step, hidden, learnt, last in self._steps(batch):
            if step == 0:  # of all rows that any step learns
                teacher = last.new_zeros(*last.shape[:2], len(vocabulary.tokens))
                teacher[learnt] = teacher_rows(last[learnt], teacher_head, vocabulary.shift)
            count = int(learnt.sum())
            sum_of_rows = distillation_loss(
                hidden[learnt], head, vocabulary.shift, teacher[:, step:][learnt], torch.ones(count)
            )
            weight = self.settings.decay**step
            total = total + weight * sum_of_rows / max(count, 1)
            scale += weight
        return total / scale

    @torch.no_grad()
    def measure(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Per step: ``top1``, the share of rows whose first token the drafter has first; ``absent``, the share whose
        first token is not among its first ten; ``overlap``, the probability that one draw of the drafter's is accepted;
        ``mass``, of the target on the drafter's first ten."""
        found: dict[str, tuple[float, float]] = {}
        for step, hidden, learnt, last in self._steps(batch):
            rows = (last[learnt] @ self.target.head.T).float().softmax(-1)
            best = rows.argmax(-1)
            drafted = self.module.lm_head(hidden[learnt]).float().softmax(-1)
            first = self.module.draft_tokens[drafted.topk(min(POOL_WIDTH, drafted.shape[-1])).indices]
            count = float(len(rows))
            has = first == best[:, None]
            found[f"top1/{step}"] = (float(has[:, 0].sum()), count)
            found[f"absent/{step}"] = (count - float(has.any(-1).sum()), count)
            overlap = torch.minimum(drafted, rows[:, self.module.draft_tokens]).sum()
            found[f"overlap/{step}"] = (float(overlap), count)
            found[f"mass/{step}"] = (float(rows.gather(-1, first).sum()), count)
        return found

    def save(self, folder: Path) -> None:
        """Write the head."""
        self.module.save(folder)


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


def batches(conversations: Sequence[Conversation], settings: TrainSettings) -> Iterator[list[int]]:
    """Batches of indices without end: each pass over the data is shuffled anew, texts of similar length together.

    The sequence depends on ``settings.seed`` and the lengths alone, so that a resumed run can skip what it had.
    """
    lengths = [min(len(each.prompt) + len(each.answer), settings.longest) for each in conversations]
    for epoch in range(10**9):
        chance = random.Random(f"{settings.seed}/{epoch}")
        order = list(range(len(lengths)))
        chance.shuffle(order)
        order.sort(key=lambda i: (lengths[i] + 15) // 16)  # stable: shuffled within a step of 16 tokens
        cut: list[list[int]] = []
        for i in order:
            if not cut or (len(cut[-1]) + 1) * lengths[i] > settings.batch_tokens:
                cut.append([])
            cut[-1].append(i)
        chance.shuffle(cut)
        yield from cut


def learning_rate(share: float, settings: TrainSettings) -> float:
    """The factor of the learning rate when ``share`` of the run is done."""
    if share < settings.warmup:
        return share / settings.warmup
    along = (share - settings.warmup) / max(1 - settings.warmup, 1e-9)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(along, 1.0)))


class Run:
    """A training run in a folder.

    Args:
        folder: made if it does not exist; a run found there is resumed.
        drafter: what is trained.
        conversations: to train on.
        held_out: to measure on.
        settings: of the run.

    Raises:
        ValueError: the folder's run has other settings or data.
    """

    def __init__(
        self,
        folder: Path,
        drafter: Drafter,
        conversations: Sequence[Conversation],
        held_out: Sequence[Conversation],
        settings: TrainSettings,
    ) -> None:
        self.folder, self.drafter, self.conversations, self.settings = folder, drafter, conversations, settings
        self.held_out = [Batch.of(held_out[i : i + 8], settings.longest) for i in range(0, len(held_out), 8)]
        self.parameters = [p for p in drafter.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.step = self.tokens = 0
        self.seconds = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / "settings.json"
        now = json.loads(json.dumps({**settings.model_dump(), "conversations": len(conversations)}))
        if known.exists() and (before := json.loads(known.read_text())) != now:
            other = ", ".join(f"{k}={before.get(k)!r}" for k in now if before.get(k) != now[k])
            raise ValueError(f"{folder} was begun with other settings ({other}): continue with those, or elsewhere")
        known.write_text(json.dumps(now, indent=1) + "\n")
        state = folder / "state.pt"
        if state.exists():
            found = torch.load(state, weights_only=True)
            drafter.module.load_state_dict(found["module"])
            self.optimizer.load_state_dict(found["optimizer"])
            self.step, self.tokens, self.seconds = found["step"], found["tokens"], found["seconds"]

    def train(self, save_every: float = 300.0) -> None:
        """Train to the end, saving every so many seconds."""
        from tqdm import tqdm

        source = batches(self.conversations, self.settings)
        for _ in range(self.step):
            next(source)
        saved = begun = time.monotonic()
        before = self.seconds
        recent = 0.0
        if self.step == 0:
            self.measure()
        with tqdm(total=self.settings.tokens, initial=self.tokens, unit="token", unit_scale=True, mininterval=5) as bar:
            while self.tokens < self.settings.tokens:
                texts = next(source)
                some = [self.conversations[i] for i in texts]
                batch = Batch.of(some, self.settings.longest, texts, self.step)
                share = self.tokens / self.settings.tokens
                for group in self.optimizer.param_groups:
                    group["lr"] = self.settings.learning_rate * learning_rate(share, self.settings)
                with torch.autocast(batch.tokens.device.type, torch.bfloat16):
                    loss = self.drafter.loss(batch)
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.step += 1
                done = batch.tokens.numel()
                self.tokens += done
                recent = loss.item() if not recent else 0.95 * recent + 0.05 * loss.item()
                bar.set_postfix(loss=f"{recent:.3f}", refresh=False)
                bar.update(done)
                now = time.monotonic()
                self.seconds = before + now - begun
                if now - saved > save_every or self.tokens >= self.settings.tokens:
                    self.measure(loss=recent)
                    self.save()
                    saved = time.monotonic()

    @torch.no_grad()
    def measure(self, **more: float) -> dict[str, float]:
        """Measure on the held-out texts and add a point to the curve."""
        totals: dict[str, list[float]] = {}
        for batch in self.held_out:
            with torch.autocast(batch.tokens.device.type, torch.bfloat16):
                found = self.drafter.measure(batch)
            for name, (part, whole) in found.items():
                total = totals.setdefault(name, [0.0, 0.0])
                total[0] += part
                total[1] += whole
        point = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds), **more}
        point |= {name: round(part / whole, 4) for name, (part, whole) in totals.items() if whole}
        path = self.folder / "curve.jsonl"
        points = [p for p in curve(self.folder) if p["step"] < self.step] + [point]  # a killed run may have been ahead
        _replace(path, lambda to: to.write_text("".join(json.dumps(p) + "\n" for p in points)))
        draw_curve(points, self.folder / "curve.png")
        return point

    def save(self) -> None:
        """Save all that the run needs to go on, and the drafter."""
        state = {
            "module": self.drafter.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        _replace(self.folder / "state.pt", lambda to: torch.save(state, to))
        self.drafter.save(self.folder / "drafter")


def curve(folder: Path) -> list[dict[str, Any]]:
    """The points of a run's learning curve."""
    path = folder / "curve.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def draw_curve(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a learning curve: top-1 agreement and absent share on held-out texts, by step of the unroll."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), sharex=True)
    titles = {"top1": "target's first token is drafted first", "absent": "… is not among the first ten"}
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
        for key in sorted(k for k in points[-1] if k.startswith(name)):
            label = f"step {int(key.partition('/')[2]) + 1}"
            ax.plot([p["tokens"] / 1e6 for p in points if key in p], [p[key] for p in points if key in p], label=label)
        ax.set(title=title, xlabel="million tokens")
        ax.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.tight_layout()
    unfinished = path.with_name(f".{path.name}.unfinished.png")
    figure.savefig(unfinished, dpi=120)
    pyplot.close(figure)
    os.replace(unfinished, path)


def train(folder: Path, data: Path, target_name: str, settings: TrainSettings, save_every: float = 300.0) -> None:
    """Train a drafter on a folder of conversations; a run that was killed goes on.

    Raises:
        ValueError: the data is empty, or the folder's run has other settings or data.
    """
    conversations, held_out = list(read(data, held_out=False)), list(read(data, held_out=True))
    if not conversations or not held_out:
        raise ValueError(
            f"{data} has too few conversations: one of every 50 turns is held out, and the others are learnt"
        )
    torch.manual_seed(settings.seed)
    target = Target(target_name)
    counts = token_counts(conversations, target.config.vocab_size)
    frequent = by_frequency(counts)
    tokens = frequent[: settings.draft_vocabulary].sort().values
    covered = float(counts[tokens].sum() / counts.sum())
    print(f"draft vocabulary: {len(tokens)} tokens cover {covered:.2%} of the answers' tokens", flush=True)
    texts = [(each.prompt + each.answer)[: settings.longest] for each in conversations]
    store = FeatureStore(data / "features", target, texts)
    head = Eagle3Head.from_target(target, tokens)
    head.lm_head.requires_grad_(False)  # it stays the target's: no token's row suffers from being rare in the data
    drafter = Eagle3Drafter(head, target, settings, frequent, store)
    Run(folder, drafter, conversations, held_out, settings).train(save_every)


def _replace(path: Path, write_to: Any) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    write_to(unfinished)
    os.replace(unfinished, path)
