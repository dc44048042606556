# SPDX-License-Identifier: Apache-2.0
"""Copies between host memory and the computing device.

Arrays are copied to the device without a wait. All results of a step are copied to the host with
one wait. Code elsewhere that reads a tensor's value (`.item()`, `.tolist()`, `bool()`) waits once
more for all queued work. On the CPU nothing is copied, since host and device share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on `device`; on the CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return page_locked(tensor).to(device, non_blocking=True)


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of the array's first value, faster than `array.ctypes` does."""
    address: int = array.__array_interface__["data"][0]
    return address


class HostCopies(NamedTuple):
    """Copies of tensors to host memory, which may still be in progress."""

    copies: list[Tensor]
    arrived: torch.cuda.Event | None  # None: the tensors have arrived

    @property
    def have_arrived(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[Tensor]:
        """Wait until the copies have arrived, and return them."""
        if self.arrived is not None:
            # torch's sync debug mode reports a wait for the stream, but not a wait for an event.
            self.arrived.synchronize()
        return self.copies


def begin_to_host(tensors: Sequence[Tensor]) -> HostCopies:
    """Queue copies of the tensors to host memory, after the work that computes the tensors. If all
    tensors are in host memory already, make no copies."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return HostCopies(list(tensors), None)
    copies = []
    for tensor in tensors:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copies.append(copy.copy_(tensor, non_blocking=True))
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(tensors[0].device))
    return HostCopies(copies, arrived)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy the tensors to host memory, with one wait; tensors in host memory need no wait."""
    return begin_to_host(tensors).wait()


def page_locked(tensor: Tensor) -> Tensor:
    """Copy the tensor into page-locked (pinned) memory, from which a device copies asynchronously.
    Torch reuses this memory only after the device has finished the copy."""
    return tensor.pin_memory()
