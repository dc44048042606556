# SPDX-License-Identifier: Apache-2.0
"""TransferQueue: a thread that makes the transfers of a server in order, each with a deadline. A
transfer that has not begun by its deadline fails without an attempt."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from ..errors import TierBusy, TierClosed, TierError

_T = TypeVar("_T")


class RemoteError(TierError):
    """The server could not be reached, failed or did not answer in time."""


class RemoteLate(RemoteError):
    """The server did not answer in time."""


class _Job(NamedTuple):
    work: Callable[[float], Any]
    deadline: float
    size: int
    future: Future[Any]


class TransferQueue:
    """A queue of transfers, `most_bytes` at most. The queue's thread calls `ended` at its end."""

    def __init__(
        self, name: str, most_bytes: int, ended: Callable[[], None] = lambda: None
    ) -> None:
        self._name = name
        self._ended = ended
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._bytes = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[float], _T], deadline: float, size: int) -> Future[_T]:
        """Queue the call `work(deadline)`. The future gets the call's result or TierError. Raises
        TierBusy if too many bytes are queued (never for `size` 0), TierClosed after `close`."""
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            if self._closed:
                raise TierClosed(f"the {self._name} was closed")
            if size and self._bytes and self._bytes + size > self._most_bytes:
                raise TierBusy(f"{self._bytes} bytes wait for the {self._name} already")
            self._bytes += size
            self._jobs.append(_Job(work, deadline, size, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    def close(self, deadline: float) -> bool:
        """Stop accepting work; wait until the queue is empty. Return False at the deadline."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        # A job refers to the caller's buffers, so no variable may keep the job after its end.
        while (job := self._next_job()) is not None:
            self._do_job(job)
            del job
        self._ended()

    def _next_job(self) -> _Job | None:
        """Wait for the next job and return it, or None if the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._jobs) or self._closed)
            return self._jobs.popleft() if self._jobs else None

    def _do_job(self, job: _Job) -> None:
        try:
            if time.monotonic() >= job.deadline:
                raise RemoteLate("the deadline passed before the transfer began")
            result = job.work(job.deadline)
        except TierError as error:
            self._end_job(job)
            # The error is set without its frames, which would keep views of the caller's buffers.
            job.future.set_exception(error.with_traceback(None))
        except Exception as error:  # noqa: BLE001 - the caller gets every error
            self._end_job(job)
            job.future.set_exception(RemoteError(f"{type(error).__name__}: {error}"))
        else:
            self._end_job(job)
            job.future.set_result(result)

    def _end_job(self, job: _Job) -> None:
        with self._changed:
            self._bytes -= job.size
