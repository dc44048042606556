# SPDX-License-Identifier: Apache-2.0
"""Events of the CUDA device, for which streams and threads can wait.

A `Point` is an event of CUDA, recorded once. A copy's event gets its point when the copy has been
queued in CUDA. Until then only a thread can wait for the event, not a stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ...kernels.copy.copy_engine import CudaError
from .base import DeviceError, Event
from .cpu import CpuEvent
from .cuda_copy_runtime import Runtime

# The seconds between two polls of a ComputeEvent.
SHORTEST_NAP, LONGEST_NAP = 50e-6, 1e-3

Blame = Callable[[CudaError], DeviceError]


class Point:
    """A recorded event of CUDA, destroyed with the last reference to it."""

    __slots__ = ("_runtime", "handle")

    def __init__(self, runtime: Runtime, stream: int) -> None:
        self._runtime = runtime
        self.handle = runtime.create_event()
        runtime.record_event(self.handle, stream)

    def synchronise(self) -> None:
        self._runtime.synchronise_event(self.handle)

    def __del__(self) -> None:
        try:
            self._runtime.destroy_event(self.handle)
        except Exception:  # noqa: BLE001, S110 - there is no caller; the process may be ending
            pass


class CopyEvent(CpuEvent):
    """The event of a copy; its `Lane` ends it. `point` is set once the whole copy has been queued
    in CUDA and the CPU has made its part of the copy, if any."""

    __slots__ = ("_unqueued", "point")

    def __init__(self) -> None:
        super().__init__()
        self.point: Point | None = None
        self._unqueued = threading.Lock()
        self._unqueued.acquire()

    def queued(self, point: Point | None) -> None:
        """Set the point of the copy; None for a copy that could not be queued. Called once."""
        self.point = point
        self._unqueued.release()

    def wait_queued(self, timeout_seconds: float) -> None:
        """Wait, `timeout_seconds` at most, until `queued` was called, so that `point` is final."""
        if self._unqueued.acquire(timeout=max(0.0, timeout_seconds)):
            self._unqueued.release()  # for the next waiter


class ComputeEvent:
    """The end of all computing queued before. Threads seldom wait for it, so they poll."""

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
    """Return the CUDA point of an event, for which a stream can wait; None if only a thread can."""
    return event.point if isinstance(event, CopyEvent | ComputeEvent) else None


def wait_for_point(event: Event, timeout_seconds: float) -> Point | None:
    """Wait for an event's CUDA point; None without one. Raises DeviceError at the timeout."""
    deadline = time.monotonic() + timeout_seconds
    if isinstance(event, CopyEvent) and not event.done():
        event.wait_queued(timeout_seconds)
    point = point_of(event)
    if point is None and not event.wait(max(0.0, deadline - time.monotonic())):
        raise DeviceError("a copy waited too long for what it depends on")
    return point
