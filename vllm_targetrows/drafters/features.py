# SPDX-License-Identifier: Apache-2.0
"""Stage *features*: what the target made of the texts, kept on disk.

The target reads a text the first time that training needs it; from then on its states come from a memory-mapped file.
So the first pass over the data costs what computing on the fly costs, later passes and other runs on the same data do
not run the target at all, and there is nothing to wait for before training begins.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from vllm_targetrows.drafters.target import Seen, Target

TEXTS_IN_FILE = 256


class FeatureStore:
    """The target's states at every token of some texts, in bfloat16.

    ``TEXTS_IN_FILE`` texts share a file, whose name tells what it belongs to: when texts are added behind the others,
    the files of those are found again; other texts or another target get other files.  A text's flag is set when its
    states are in the file, so a run that is killed leaves nothing half known.

    Args:
        folder: made if it does not exist.
        target: reads what is not known yet.
        texts: all texts, tokens.
    """

    def __init__(self, folder: Path, target: Target, texts: Sequence[Sequence[int]]) -> None:
        self.target = target
        self.size = target.config.hidden_size
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [
            _File(folder, repr((target.name, target.feature_layers)), texts[start : start + TEXTS_IN_FILE], self.size)
            for start in range(0, len(texts), TEXTS_IN_FILE)
        ]

    @property
    def known(self) -> int:
        """Texts whose states are in the files."""
        return sum(int(file.known.sum()) for file in self._files)

    def see(self, tokens: Tensor, texts: Sequence[int]) -> Seen:
        """What the target made of some texts.

        Args:
            tokens: ``[B, S]``, the texts padded on the right.
            texts: their ``B`` indices.

        Returns:
            Its states; behind a text's end they are zero or belong to the padding.
        """
        places = [(self._files[text // TEXTS_IN_FILE], text % TEXTS_IN_FILE) for text in texts]
        if not all(file.known[place] for file, place in places):
            seen = self.target.see(tokens)
            states = torch.cat([seen.features, seen.last], dim=-1).to("cpu", torch.bfloat16)
            for row, (file, place) in enumerate(places):
                found = file.states(place)
                found[:] = states[row, : len(found)].view(torch.uint16).numpy()
                file.known[place] = 1
            return seen
        states = torch.zeros(*tokens.shape, 4 * self.size, dtype=torch.bfloat16)
        for row, (file, place) in enumerate(places):
            found = file.states(place)
            states[row, : len(found)] = torch.from_numpy(found).view(torch.bfloat16)
        states = states.to(tokens.device)
        return Seen(states[..., : 3 * self.size], states[..., 3 * self.size :])


class _File:
    """The states of some texts, and which of them are known."""

    def __init__(self, folder: Path, owner: str, texts: Sequence[Sequence[int]], size: int) -> None:
        mark = crc32(owner.encode())
        for text in texts:
            mark = crc32(np.asarray([len(text), *text], dtype=np.int32).tobytes(), mark)
        self._ends = np.cumsum([0, *map(len, texts)])
        self._states = _mapped(folder / f"{mark:08x}.bf16", np.uint16, (int(self._ends[-1]), 4 * size))
        self.known = _mapped(folder / f"{mark:08x}.known", np.uint8, (len(texts),))

    def states(self, text: int) -> np.ndarray:
        """``[tokens, 4 H]``, the text's part of the file."""
        found: np.ndarray = self._states[self._ends[text] : self._ends[text + 1]]
        return found


def _mapped(path: Path, kind: type, shape: tuple[int, ...]) -> np.memmap:
    """An array in a file, zero where it was never written; a new file takes room only as it is written."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    if not path.exists() or path.stat().st_size != size:
        with path.open("wb") as file:
            os.truncate(file.fileno(), size)
    return np.memmap(path, dtype=kind, mode="r+", shape=shape)
