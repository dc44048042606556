# SPDX-License-Identifier: Apache-2.0
"""The two ways between the host and the device that computes: arrays there, results back.

Arrays go without anybody waiting. Results come back together, behind one wait: whoever reads
anything of a tensor elsewhere (`.item()`, `.tolist()`, `bool()`) waits once more for all that is
queued. On the CPU both are the same memory and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on `device`; on the CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return page_locked(tensor).to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in host memory, whole when this returns. Waits once where they lie elsewhere."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    copies = []
    for tensor in tensors:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copies.append(copy.copy_(tensor, non_blocking=True))
    # An event and not the stream: torch counts a wait for a stream among those that nobody meant.
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensors[0].device))
    event.synchronize()
    return copies


def page_locked(tensor: Tensor) -> Tensor:
    """A copy in memory from which a device copies by itself; torch keeps and reuses such memory,
    and not before the copy is over."""
    return tensor.pin_memory()
