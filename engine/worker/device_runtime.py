# SPDX-License-Identifier: Apache-2.0
"""What a step asks of a device beside arithmetic: staging memory, marks in its queue, graphs.

`HostRuntime` is the CPU, where nothing is queued and nothing is worth recording; `cuda_runtime.py`
is CUDA. Knows nothing of models or batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Work = Callable[[], Tensor]


class Mark(Protocol):
    """A point in the device's queue."""

    def wait(self) -> None:
        """Return when everything queued before it has been done."""


class DeviceRuntime(Protocol):
    """One device and its queue of work."""

    device: torch.device
    can_record: bool

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeroed host memory from which the device copies by itself while the host goes on."""

    def mark(self) -> Mark:
        """A point behind everything queued until now."""

    def record(self, work: Work) -> Work:
        """Run `work` once and keep what it gave the device. The result runs that again, with
        whatever its buffers then hold and without any of its Python, and returns the same tensor
        each time."""


class _Passed:
    """A mark in a queue that is always empty."""

    def wait(self) -> None:
        return


class HostRuntime:
    """The CPU: work is done when the call returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.can_record = False

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def mark(self) -> Mark:
        return _Passed()

    def record(self, work: Work) -> Work:
        return work
