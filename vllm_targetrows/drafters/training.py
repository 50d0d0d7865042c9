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
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_targetrows.drafters.conversations import Conversation, read
from vllm_targetrows.drafters.features import FeatureStore
from vllm_targetrows.drafters.head import Eagle3Head
from vllm_targetrows.drafters.learners import (
    Batch,
    Drafter,
    Eagle3Drafter,
    LanguageModelDrafter,
    Rows,
    TrainSettings,
    by_frequency,
    token_counts,
)
from vllm_targetrows.drafters.target import Target


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
        longest = 0
        for i in order:
            longest = max(longest, lengths[i])
            if not cut or (len(cut[-1]) + 1) * longest > settings.batch_tokens:
                cut.append([])
                longest = lengths[i]
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
        device: where the drafter is.

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
        device: str = "cpu",
    ) -> None:
        self.device = device
        self.folder, self.drafter, self.conversations, self.settings = folder, drafter, conversations, settings
        groups = [held_out[i : i + 8] for i in range(0, len(held_out), 8)]
        self.held_out = [Batch.of(group, settings.longest).to(device) for group in groups]
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
                batch = Batch.of(some, self.settings.longest, texts, self.step).to(self.device)
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


def train(
    folder: Path,
    data: Path,
    target_name: str,
    settings: TrainSettings,
    save_every: float = 300.0,
    device: str = "cpu",
) -> None:
    """Train a drafter on a folder of conversations; a run that was killed goes on.

    Raises:
        ValueError: the data is too small, or the folder's run has other settings or data.
    """
    conversations, held_out = list(read(data, held_out=False)), list(read(data, held_out=True))
    if not conversations or not held_out:
        raise ValueError(f"{data} has too few conversations: of every 50 turns one is held out, the others are learnt")
    torch.manual_seed(settings.seed)
    target = Target(target_name, device=device)
    counts = token_counts(conversations, target.config.vocab_size)
    frequent = by_frequency(counts)
    kept = frequent[: settings.draft_vocabulary] if settings.kind == "eagle3" else frequent
    tokens = kept.sort().values.to(device)
    texts = [(each.prompt + each.answer)[: settings.longest] for each in conversations]
    rows = Rows(target, FeatureStore(data / "features", target, texts), tokens, frequent.to(device), settings)
    drafter: Drafter
    if settings.kind == "eagle3":
        covered = float(counts[kept].sum() / counts.sum())
        print(f"draft vocabulary: {len(tokens)} tokens cover {covered:.2%} of the answers' tokens", flush=True)
        head = Eagle3Head.from_target(target, tokens)
        head.lm_head.requires_grad_(False)  # it stays the target's: no token's row suffers from being rare in the data
        drafter = Eagle3Drafter(head, rows)
    else:
        drafter = LanguageModelDrafter.from_target(target_name, settings.layers, rows)
    drafter.module.to(device)
    Run(folder, drafter, conversations, held_out, settings, device).train(save_every)


def _replace(path: Path, write_to: Any) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    write_to(unfinished)
    os.replace(unfinished, path)
