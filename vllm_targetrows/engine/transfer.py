# SPDX-License-Identifier: Apache-2.0
"""Numbers between the host and the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def looking_is_free(device: torch.device) -> bool:
    """Whether the host may look at a tensor's numbers without waiting for the device to compute them."""
    return device.type == "cpu"


def on_device(device: torch.device, *arrays: np.ndarray) -> tuple[Tensor, ...]:
    """Arrays of the host as tensors; the host does not wait for the device."""
    return tuple(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays)


def on_host(*tensors: Tensor) -> list[np.ndarray]:
    """Integer tensors of one device as int64 arrays on the host, which waits for the device once."""
    if looking_is_free(tensors[0].device):
        return [tensor.numpy().astype(np.int64, copy=False) for tensor in tensors]
    everything = torch.cat([tensor.reshape(-1).to(torch.int64) for tensor in tensors]).cpu().numpy()
    parts = np.split(everything, np.cumsum([tensor.numel() for tensor in tensors[:-1]]))
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
