# SPDX-License-Identifier: Apache-2.0
"""A direction of the CUDA device: a stream, a thread that queues copies, and a thread that ends
them.

    copy ─┬─ small, and its events are in streams ──► queued in CUDA by the caller ──────────┐
          └─ else ──► the first thread waits for events outside streams, queues it ──────────┤
                                       the second sleeps until CUDA has come past it, ends it┘

The second thread sleeps in `cudaEventSynchronize`, without processor time and without a lock. A
host function in the stream could report the end of a copy as early. But a host function must not
call CUDA, and the stream would wait while the function waits for the interpreter's lock. With two
threads a copy is queued before the previous one has ended, so the link to the GPU is never idle.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ...kernels.copy.copy_engine import CudaError
from .base import DeviceError, Event
from .cuda_copy_runtime import Runtime
from .cuda_events import Blame, CopyEvent, Point, point_of, wait_for_point

log = logging.getLogger(__name__)

# The most queued jobs. A job has all blocks of a step, so a full queue means a stuck stream.
QUEUE_JOBS = 1024


class Job(ABC):
    """Copies that end together, and the event of their end."""

    def __init__(self, after: Sequence[Event], *, is_quick: bool, is_by_cpu: bool) -> None:
        """`is_quick`: queueing the job takes the caller less time than waking a thread.
        `is_by_cpu`: the CPU itself reads or writes slots, so a thread must wait for the events
        first."""
        self.after = [event for event in after if not event.done()]
        self.is_quick = is_quick
        self.is_by_cpu = is_by_cpu
        self.event = CopyEvent()
        self.began: Point | None = None
        self.ended: Point | None = None
        self.failure: Exception | None = None

    @abstractmethod
    def run(self, stream: int) -> None:
        """Queue the copies in `stream`, and make the CPU's own copies."""

    def arrived(self) -> None:  # noqa: B027 - most jobs need no such work
        """Finish successful copies, before the second thread ends the event."""

    def points(self) -> list[Point] | None:
        """Return the points for which the stream must wait; None if a thread must wait instead."""
        points = [point_of(event) for event in self.after]
        known = [point for point in points if point is not None]
        return known if len(known) == len(points) and not (points and self.is_by_cpu) else None


class Lane:
    """Runs jobs in order. `blame` turns a CudaError into the DeviceError for callers."""

    def __init__(
        self, name: str, runtime: Runtime, blame: Blame, *, dependency_seconds: float
    ) -> None:
        self._runtime = runtime
        self._blame = blame
        self._dependency_seconds = dependency_seconds
        self.stream = runtime.create_stream()
        self.notify: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._in_flight = 0
        self._num_unqueued = 0  # jobs that the first thread has not queued yet
        self._unqueued: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._queued: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # in the stream's order
        self._threads = [
            threading.Thread(target=target, name=f"{name}-{what}", daemon=True)
            for what, target in (("queue", self._queue_jobs), ("end", self._end_jobs))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> CopyEvent:
        """Submit a job and return its event. Never waits. Raises DeviceError for a full queue."""
        with self._lock:
            if self._in_flight >= QUEUE_JOBS:
                raise DeviceError(f"{QUEUE_JOBS} copies wait already in one stream")
            self._in_flight += 1
            points = job.points() if job.is_quick and not self._num_unqueued else None
            if points is not None:
                self._queue(job, points)
                self._queued.put(job)
            else:
                self._num_unqueued += 1
                self._unqueued.put(job)
        return job.event

    def close(self, timeout_seconds: float) -> bool:
        """Wait until the jobs have ended; return False after `timeout_seconds`. Idempotent."""
        deadline = time.monotonic() + timeout_seconds
        for thread, jobs in zip(self._threads, (self._unqueued, self._queued), strict=True):
            if thread.is_alive():
                jobs.put(None)
                thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return False
        if self.stream:
            stream, self.stream = self.stream, 0
            try:
                self._runtime.destroy_stream(stream)
            except CudaError as error:
                self._blame(error)
        return True

    def _queue_jobs(self) -> None:
        self._enter()
        while (job := self._unqueued.get()) is not None:
            points: list[Point] = []
            try:
                points = self._wait_as_a_thread(job)
            except DeviceError as error:
                job.failure = error
            self._queue(job, points)
            self._queued.put(job)
            del job, points  # an idle lane holds no references
            with self._lock:
                self._num_unqueued -= 1

    def _end_jobs(self) -> None:
        self._enter()
        while (job := self._queued.get()) is not None:
            failure = self._wait_for_end(job)
            if failure is None:
                try:
                    job.arrived()
                except Exception as error:  # noqa: BLE001 - the event carries it to its readers
                    failure = error.with_traceback(None)
            job.event.mark_done(failure, 0.0 if failure else self._seconds_of(job))
            with self._lock:
                self._in_flight -= 1
            del job
            self.notify()

    def _enter(self) -> None:
        try:
            self._runtime.enter_thread(is_own=True)
        except CudaError as error:
            self._blame(error)  # then every job fails by itself

    def _wait_as_a_thread(self, job: Job) -> list[Point]:
        """Wait until each event of the job has a point or has ended; if the CPU makes copies, until
        all events have ended. Return the points for the stream. Raises DeviceError at a timeout."""
        deadline = time.monotonic() + self._dependency_seconds
        points = []
        try:
            for event in job.after:
                point = wait_for_point(event, deadline - time.monotonic())
                if point is None:
                    continue
                points.append(point)
                if job.is_by_cpu and not event.wait(max(0.0, deadline - time.monotonic())):
                    raise DeviceError("a copy waited too long")
        except DeviceError as error:
            raise DeviceError(
                f"a copy waited {self._dependency_seconds} s for another stream"
            ) from error
        return points

    def _queue(self, job: Job, points: list[Point]) -> None:
        """Queue the job in CUDA. A job that fails midway still gets an end point, because its
        queued part must have run before the event reports the failure."""
        runtime, stream = self._runtime, self.stream
        if job.failure is None:
            try:
                for point in points:
                    runtime.wait_event(stream, point.handle)
                job.began = Point(runtime, stream)
                job.run(stream)
            except CudaError as error:
                job.failure = self._blame(error)
            except Exception as error:  # noqa: BLE001 - the event carries it to its readers
                job.failure = error.with_traceback(None)
        try:
            job.ended = Point(runtime, stream)
        except CudaError as error:
            job.failure = job.failure or self._blame(error)
        job.after = []
        # The CPU's copies have been made, so `job.ended` is the end of the whole job.
        job.event.queued(job.ended)

    def _wait_for_end(self, job: Job) -> Exception | None:
        try:
            if job.ended is not None:
                job.ended.synchronise()
        except CudaError as error:
            return job.failure or self._blame(error)
        return job.failure

    def _seconds_of(self, job: Job) -> float:
        assert job.began is not None and job.ended is not None
        try:
            return self._runtime.seconds_between(job.began.handle, job.ended.handle)
        except CudaError as error:
            log.warning("a copy's time is unknown: %s", error)
            return 0.0
