# SPDX-License-Identifier: Apache-2.0
"""A device's services beside arithmetic: its queue, staging memory, marks, graphs.

`HostRuntime` is the CPU, which has no queue and records no work; `cuda_runtime.py` is CUDA.
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

# CUDA's codes after which every later call in this process fails too: uncorrectable memory (214,
# 220), an illegal access or instruction of a kernel (700, 714 to 719), a timeout (702), an
# assertion (710), a lost context (709). Their messages follow, since torch does not always give the
# code.
_LOST = frozenset({214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})
_LOST_WORDS = (
    "uncorrectable", "illegal memory access", "launch timed out", "context is destroyed",
    "device-side assert", "hardware stack error", "illegal instruction", "misaligned address",
    "global/shared address space", "invalid program counter", "unspecified launch failure",
)  # fmt: skip


def is_device_lost(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, makes all later calls on the device fail until this
    process ends. Exhausted memory does not."""
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
        """Wait until all work that was queued before the mark is done."""


class DeviceRuntime(Protocol):
    """A device and its queue of work."""

    device: torch.device
    can_record: bool

    def enter_thread(self) -> None:
        """Put the calling thread's later work into the device's queue."""

    def entered(self) -> AbstractContextManager[None]:
        """Return a context whose body runs as in an entered thread; its end restores the previous
        state."""

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeroed host memory, which the device can copy while the host goes on."""

    def mark(self) -> Mark:
        """Return a mark after all work that was queued before."""

    def record_work(self, work: Work) -> Work:
        """Run `work` and record its device operations. The result repeats these without Python
        code, on the present content of the buffers, and returns the same tensor each time."""

    def seconds_of(self, work: Callable[[], object]) -> float:
        """Return the seconds that the device takes for `work`; waits for the end."""


class _Passed:
    """A mark in a queue that is always empty."""

    def wait(self) -> None:
        return


class HostRuntime:
    """The CPU: work is done when its call returns."""

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
