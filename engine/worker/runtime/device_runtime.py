# SPDX-License-Identifier: Apache-2.0
"""DeviceRuntime: the services of a device other than arithmetic: its queue, staging memory, marks
(CUDA events) and graphs.

`HostRuntime` is for the CPU, which has no queue and no graphs; `cuda_runtime.py` is for CUDA."""

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
    """Whether an error, or one of its causes, means that all later calls on the device will fail
    until this process ends. Exhausted memory is not such an error."""
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
    """A point in the device's queue, like a CUDA event."""

    def wait(self) -> None:
        """Wait until all work that was queued before the mark is done."""


class DeviceRuntime(Protocol):
    """A device and its queue of work (in CUDA, a stream)."""

    device: torch.device
    can_record: bool

    def enter_thread(self) -> None:
        """Make the device's queue the current one of the calling thread."""

    def entered(self) -> AbstractContextManager[None]:
        """Return a context whose body runs as in a thread that has called `enter_thread`. At the
        end of the body, the thread's previous queue is current again."""

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeroed host memory (pinned memory in CUDA), from which the device can copy while
        the host continues."""

    def mark(self) -> Mark:
        """Return a mark that is reached after all work that was queued before it."""

    def record_work(self, work: Work) -> Work:
        """Run `work` and capture its device operations in a graph. The returned function replays
        these operations without their Python code, on the present content of the buffers. Each
        replay returns the same tensor."""

    def seconds_of(self, work: Callable[[], object]) -> float:
        """Return the seconds that the device takes for `work`, after waiting for its end."""


class _Passed:
    """A mark that has already been reached, for a device without a queue."""

    def wait(self) -> None:
        return


class HostRuntime:
    """The CPU as a device: work is done when its call returns."""

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
