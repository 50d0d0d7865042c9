# SPDX-License-Identifier: Apache-2.0
"""Finds the places where the host would wait for a device: our code that looks at a tensor's numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import vllm_targetrows
from vllm_targetrows import triton_kernels

OURS = tuple(str(Path(module.__path__[0])) for module in (vllm_targetrows, triton_kernels))
LOOKS = {
    "item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "unique", "masked_select", "equal", "allclose",
    "__bool__", "__int__", "__float__", "__index__",
}  # fmt: skip
PLACES = {"_hand_over"}
"""Where looking is allowed: the one function that brings the round to the host."""


class NoLook(TorchFunctionMode):
    """Notes the places in our own code that look at a tensor's numbers while ``watched`` is on.

    Indexing with a mask looks as well, for it has to count.  ``found`` maps a place to how often it looked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in LOOKS or (name in ("__getitem__", "__setitem__", "index_put_") and _has_mask(args[1])):
            frame: Any = sys._getframe(1)
            names = []
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} {name}"
            ours = frame.f_code.co_filename.startswith(OURS)
            while ours and frame is not None:
                names.append(frame.f_code.co_name)
                frame = frame.f_back
            if ours and not PLACES.intersection(names):
                self.found[place] = self.found.get(place, 0) + 1
        return func(*args, **(kwargs or {}))


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, (tuple, list)) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in parts)


def watch(owner: Any, name: str) -> NoLook:
    """Watch every call of a method; tests read ``found`` afterwards."""
    mode, method = NoLook(), getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return method(*args, **kwargs)

    setattr(owner, name, watched)
    return mode
