# SPDX-License-Identifier: Apache-2.0
"""What a step asks of a device beside arithmetic: its queue, staging memory, marks, graphs.

`HostRuntime` is the CPU, where nothing is queued and nothing is worth recording; `cuda_runtime.py`
is CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from ....kernels.copy.copy_engine import CudaError

Work = Callable[[], Tensor]

# CUDA's codes after which every later call fails too, in this process: memory that cannot be
# corrected (214, 220), a kernel that read or ran what it may not (700, 714 to 719), ran too long
# (702) or asserted (710), and a context that is gone (709). And the words for them, since torch
# does not always tell the code.
_LOST = frozenset({214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})
_LOST_WORDS = (
    "uncorrectable", "illegal memory access", "launch timed out", "context is destroyed",
    "device-side assert", "hardware stack error", "illegal instruction", "misaligned address",
    "global/shared address space", "invalid program counter", "unspecified launch failure",
)  # fmt: skip


def is_device_lost(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, says that nothing will work on the device any
    more until this process has ended. Running out of its memory does not."""
    seen: set[BaseException] = set()
    while error is not None and error not in seen:
        seen.add(error)
        if isinstance(error, CudaError):
            if error.code in _LOST:
                return True
        elif getattr(error, "error_code", None) in _LOST or (
            "CUDA error" in str(error) and any(words in str(error) for words in _LOST_WORDS)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


class Mark(Protocol):
    """A point in the device's queue."""

    def wait(self) -> None:
        """Return when everything queued before it has been done."""


class DeviceRuntime(Protocol):
    """One device and its queue of work."""

    device: torch.device
    can_record: bool

    def enter_thread(self) -> None:
        """Put whatever the calling thread does from now on into the device's queue."""

    def entered(self) -> AbstractContextManager[None]:
        """A context in which the calling thread has entered; behind it, all is as before."""

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeroed host memory from which the device copies by itself while the host goes on."""

    def mark(self) -> Mark:
        """A point behind everything queued until now."""

    def record_work(self, work: Work) -> Work:
        """Run `work` once and keep what it gave the device. The result runs that again, with
        whatever its buffers then hold and without any of its Python, and returns the same tensor
        each time."""

    def seconds_of(self, work: Callable[[], object]) -> float:
        """Seconds that the device works on it; waits for that."""


class _Passed:
    """A mark in a queue that is always empty."""

    def wait(self) -> None:
        return


class HostRuntime:
    """The CPU: work is done when the call returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.can_record = False

    def enter_thread(self) -> None:
        return

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def mark(self) -> Mark:
        return _Passed()

    def record_work(self, work: Work) -> Work:
        return work

    def seconds_of(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
