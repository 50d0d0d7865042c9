# SPDX-License-Identifier: Apache-2.0
"""A learned reranker: ``E[p(node | its parent's prefix)]`` from what is known before the target's pass.

It sees the drafter's own numbers and, at no cost, the last verification's rows: they are rows at other addresses, so
they may steer the choice of the tree and nothing else.  The logarithm of its output is an edge's score, at most 0, so a
path's sum never increases from parent to child and its top nodes are a tree.  ``vllm_targetrows.study`` trains it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

FEATURES = ("log_q", "parent_score", "depth", "log_match", "has_match", "log_ancestor", "has_ancestor")
DRAFTER_FEATURES = 3
"""The first of ``FEATURES``: those that need no row."""
FLOOR = 1e-6
"""Probabilities below are taken as this, so that a greedy row's zeros stay finite."""
FORMAT_VERSION = 1
METADATA = "targetrows_reranker"


def features(log_q: Tensor, parent_score: Tensor, depth: Tensor, token_match_p: Tensor, ancestor_p: Tensor) -> Tensor:
    """What the reranker sees of each node: float32 ``[..., len(FEATURES)]``.

    All arguments have one shape ``[...]``.

    Args:
        log_q: log q(node | its parent's prefix), in nats.
        parent_score: sum of log q along the parent's path, 0 for a child of the root.
        depth: 1 for a child of the root.
        token_match_p: the node's probability in the last verification's first row whose last token is that of the
            node's parent, at temperature 1 and without transforms, as it is recorded; NaN where there is none.
        ancestor_p: the same in the last verification's row at the exit; NaN where there is none.
    """
    floor = torch.tensor(FLOOR).log().item()
    columns = [log_q.float().clamp(min=floor), parent_score.float().clamp(min=2 * floor), depth.float()]
    for p in (token_match_p, ancestor_p):
        known = ~p.isnan()
        log_p = torch.where(known, p.float(), 1.0).clamp(min=FLOOR).log()
        columns += [log_p, known.float()]
    return torch.stack(columns, dim=-1)


class Reranker(nn.Module):
    """Two hidden layers over normalised features.

    Args:
        inputs: how many of ``FEATURES`` it reads, from the first.
        hidden: width of the hidden layers.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, inputs: int = len(FEATURES), hidden: int = 32) -> None:
        super().__init__()
        self.inputs, self.hidden = inputs, hidden
        self.register_buffer("mean", torch.zeros(inputs), persistent=False)
        self.register_buffer("std", torch.ones(inputs), persistent=False)
        self.layers = nn.Sequential(
            nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1)
        )

    def normalise_by(self, x: Tensor) -> None:
        """Take mean and standard deviation of ``x``, float32 ``[edges, features]``, for all later inputs."""
        x = x[:, : self.inputs]
        self.mean = x.mean(dim=0)
        std = x.std(dim=0, correction=0)
        self.std = torch.where(std > 1e-4, std, 1.0)  # a column that never changes carries nothing

    def logits(self, x: Tensor) -> Tensor:
        """``[..., features]`` to ``[...]``: log-odds of the estimated probability."""
        logits: Tensor = self.layers((x[..., : self.inputs] - self.mean) / self.std)
        return logits.squeeze(-1)

    def log_p(self, x: Tensor) -> Tensor:
        """``[..., features]`` of :func:`features` to ``[...]``: log of the estimated probability, at most 0."""
        return logsigmoid(self.logits(x))

    forward = log_p

    def save(self, path: str | Path) -> None:
        """Write weights, and how to read them, as safetensors."""
        from safetensors.torch import save_file

        about = {
            "format_version": FORMAT_VERSION,
            "features": FEATURES[: self.inputs],
            "hidden": self.hidden,
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
        }
        weights = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, str(path), metadata={METADATA: json.dumps(about)})


def load(path: str | Path) -> Reranker:
    """Read what :meth:`Reranker.save` wrote; on the CPU, without gradients.

    Raises:
        ValueError: nothing is there, or it is no reranker of this version.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})[METADATA])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        version, names = about["format_version"], tuple(about["features"])
        if version != FORMAT_VERSION or names != FEATURES[: len(names)] or not names:
            raise ValueError(f"{str(path)!r} is a reranker of another version ({version})")
        reranker = Reranker(len(names), about["hidden"])
        reranker.load_state_dict(weights)
    except FileNotFoundError:
        raise ValueError(f"no reranker at {str(path)!r}") from None
    except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{str(path)!r} is no reranker: {reason}") from None
    reranker.mean, reranker.std = torch.tensor(about["mean"]), torch.tensor(about["std"])
    return reranker.requires_grad_(False).eval()
