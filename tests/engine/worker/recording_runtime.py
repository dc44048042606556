# SPDX-License-Identifier: Apache-2.0
"""A device without a device: buffers apart from the staging memory, and graphs that are records.

Once something has waited for the copies, the staging memory is spoilt, so that whoever writes into
it before the wait shows in a wrong answer. A record holds on to what it was made over: replaying it
runs the same work, over the same buffers, and writes into the same output, spoilt in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from stratakv.engine.worker.runtime.device_runtime import Mark, Work

SPOILT = 10**6  # no token, position, slot, length or block of any test


class RecordingRuntime:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.can_record = True
        self.num_marks = self.last_waited = 0  # marks are numbered from 1
        self.num_waits = self.num_replays = self.num_recorded = 0
        self.threads: list[int] = []
        self.seconds = iter(())  # of the works that are timed, one after the other
        self._staging: list[Tensor] = []

    def enter_thread(self) -> None:
        self.threads.append(threading.get_ident())

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._staging.append(torch.zeros(*shape, dtype=dtype))
        return self._staging[-1]

    def mark(self) -> Mark:
        self.num_marks += 1
        return _Counted(partial(self._waited, self.num_marks))

    def record_work(self, work: Work) -> Work:
        with torch.inference_mode(False):
            output = work().clone()
        self.num_recorded += 1

        def replay() -> Tensor:
            self.num_replays += 1
            output.fill_(float("nan"))
            return output.copy_(work())

        return replay

    def seconds_of(self, work: Callable[[], object]) -> float:
        work()
        return next(self.seconds, 1.0)

    def _waited(self, mark: int) -> None:
        self.num_waits += 1
        self.last_waited = mark
        for memory in self._staging:
            memory.fill_(SPOILT)


class _Counted:
    def __init__(self, waited: Callable[[], None]) -> None:
        self.wait = waited
