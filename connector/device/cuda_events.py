# SPDX-License-Identifier: Apache-2.0
"""Events of the CUDA device: those that streams wait for, and those that threads wait for.

A `Point` is an event of CUDA, recorded once. An event of the copy device has one from the moment
when it is queued. Before that CUDA takes it for reached, so only a thread can wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ...kernels.copy.copy_engine import CudaError
from .base import DeviceError, Event
from .cpu import CpuEvent
from .cuda_copy_runtime import Runtime

# Times between two looks at an event for which no thread sleeps in CUDA.
SHORTEST_NAP, LONGEST_NAP = 50e-6, 1e-3

Blame = Callable[[CudaError], DeviceError]


class Point:
    """A recorded event of CUDA, freed with the last reference that a stream might wait by."""

    __slots__ = ("_runtime", "handle")

    def __init__(self, runtime: Runtime, stream: int) -> None:
        self._runtime = runtime
        self.handle = runtime.create_event()
        runtime.record_event(self.handle, stream)

    def synchronise(self) -> None:
        """Sleep until the stream has come past it."""
        self._runtime.synchronise_event(self.handle)

    def __del__(self) -> None:
        try:
            self._runtime.destroy_event(self.handle)
        except Exception:  # noqa: BLE001, S110 - no caller to tell; the process may be ending
            pass


class CopyEvent(CpuEvent):
    """The end of a copy, ended by its lane. `point` is set from the moment when all of the copy is
    queued in CUDA, and the CPU's part of it, if it has one, is done."""

    __slots__ = ("_unqueued", "point")

    def __init__(self) -> None:
        super().__init__()
        self.point: Point | None = None
        self._unqueued = threading.Lock()
        self._unqueued.acquire()

    def queued(self, point: Point | None) -> None:
        """Set the point. Called once, also for a copy that cannot be queued: it may have none."""
        self.point = point
        self._unqueued.release()

    def wait_queued(self, timeout_seconds: float) -> None:
        """Wait until `point` is final, `timeout_seconds` at most."""
        if self._unqueued.acquire(timeout=max(0.0, timeout_seconds)):
            self._unqueued.release()  # for the next waiter


class ComputeEvent:
    """The end of all computing that was queued before. Threads seldom ask for it, so none sleeps in
    CUDA for it: a waiting thread looks now and then."""

    __slots__ = ("_blame", "_ended", "_error", "_runtime", "point")

    def __init__(self, runtime: Runtime, blame: Blame) -> None:
        self._runtime = runtime
        self._blame = blame
        self._ended = False
        self._error: Exception | None = None
        self.point = Point(runtime, runtime.compute_stream())

    def done(self) -> bool:
        if not self._ended:
            try:
                self._ended = self._runtime.has_ended(self.point.handle)
            except CudaError as error:
                self._error = self._blame(error)
                self._ended = True
        return self._ended

    def wait(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        nap = SHORTEST_NAP
        while not self.done() and time.monotonic() < deadline:
            time.sleep(min(nap, max(0.0, deadline - time.monotonic())))
            nap = min(2 * nap, LONGEST_NAP)
        return self.done()

    def error(self) -> Exception | None:
        return self._error if self._ended else None

    def seconds(self) -> float:
        return 0.0


def point_of(event: Event) -> Point | None:
    """A point that a stream can wait for in place of the event; None if only a thread can wait."""
    return event.point if isinstance(event, CopyEvent | ComputeEvent) else None


def wait_for_point(event: Event, timeout_seconds: float) -> Point | None:
    """Wait for a point that a stream can wait for, and return it; None if instead the event has
    ended. Raises DeviceError if the time is too short for either."""
    deadline = time.monotonic() + timeout_seconds
    if isinstance(event, CopyEvent) and not event.done():
        event.wait_queued(timeout_seconds)
    point = point_of(event)
    if point is None and not event.wait(max(0.0, deadline - time.monotonic())):
        raise DeviceError("a copy waited too long for what it depends on")
    return point
