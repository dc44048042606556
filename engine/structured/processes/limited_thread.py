# SPDX-License-Identifier: Apache-2.0
"""A thread for work that is bounded, and that nothing could stop: whoever waits for it can see how
long it has been at one piece, and leave it behind, should that not be so.

What counts is the processor's time, so that a busy machine fails nobody; the clock on the wall has
a limit of its own, far beyond. A thread that was left behind ends with the piece it is at, and has
the lowest priority until then.

A thread that gives way has what others leave of the processors (SCHED_IDLE): whoever wakes up takes
its place at once, where a niceness alone would have them wait for the end of its slice. It does so
for one job, so that nothing it starts in the next one inherits that. Where others leave next to
nothing it is scheduled as they are from then on, for it may hold the interpreter's lock. Linux lets
only those come back that have CAP_SYS_NICE, or a large RLIMIT_NICE: no thread of others gives way.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Protocol

logger = logging.getLogger(__name__)

LAST_OF_ALL = 19  # niceness
Job = Callable[["LimitedThread"], None]
# A thread that gives way, and gets less than this of a processor in so long, be it in one job or in
# several, does so no longer.
STARVED_SECONDS = 2.0
_STARVED_SHARE = 0.05
_TRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Limit:
    """For one piece of work."""

    cpu_seconds: float
    seconds: float = 120.0  # for one that waits for something, as it never should


class Jobs(Protocol):
    """Where a thread gets its jobs from; None: it is to end."""

    def get(self) -> Job | None: ...


class LimitedThread:
    """Does jobs from a queue, which it may share. A job calls `next_piece` between its pieces, each
    of which has the whole limit."""

    def __init__(self, name: str, jobs: Jobs) -> None:
        self._jobs = jobs
        # While it gives way: of its clock and the wall's, when it began, less what it had and how
        # long that took in the jobs before.
        self._gave_way: tuple[float, float] | None = None
        self._had = 0.0, 0.0
        self._starved = threading.Event()  # for good
        self._lock = threading.Lock()
        self._is_left = False
        self._began: tuple[float, float] | None = None  # of the clocks: its own, the wall's
        self._clock: int | None = None
        self.job: Job | None = None  # at which it is
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def give_way(self) -> None:
        """Called by the job, which from now on waits for nothing but a processor: it has one only
        while nobody else wants it, until the job ends."""
        if self._gave_way is None and not self._starved.is_set() and _may_come_back():
            self._gave_way = time.thread_time() - self._had[0], time.monotonic() - self._had[1]
            _schedule(threading.get_native_id(), "SCHED_IDLE")
            if self._starved.is_set():  # found meanwhile
                _schedule(threading.get_native_id(), "SCHED_OTHER")

    def next_piece(self, note: Callable[[], None] = lambda: None) -> bool:
        """Called by the job: what follows is another piece. False where nobody waits any more, and
        then `note` was not called, which says what the piece is."""
        with self._lock:
            if self._is_left:
                return False
            self._began = time.thread_time(), time.monotonic()
            note()
            return True

    def is_over(self, limit: Limit) -> bool:
        """Whether its present piece has taken longer than it may. Without the lock, which a thread
        that is not run may hold: whoever asks in every step must not wait for it."""
        began = self._began
        if began is None or self._clock is None or not self._thread.is_alive():
            return False
        try:
            cpu = time.clock_gettime(self._clock) - began[0]
        except OSError:  # it has ended since
            return False
        now = time.monotonic()
        seconds, gave_way = now - began[1], self._gave_way
        if gave_way is not None and not self._starved.is_set():
            if _is_next_to_nothing(cpu + began[0] - gave_way[0], now - gave_way[1]):
                self._starved.set()
                _schedule(self._thread.native_id, "SCHED_OTHER")
        return cpu > limit.cpu_seconds or seconds > limit.seconds

    def abandon_if_over(self, limit: Limit) -> bool:
        """Leave it behind where its present piece is over the limit; whether it was. What it does
        from then on, it does for nobody."""
        if not self.is_over(limit):
            return False
        with self._lock:
            if not self.is_over(limit):  # it has come to another one meanwhile
                return False
            self._is_left = True
        _put_last(self._thread.native_id)
        logger.error("a grammar hangs: a thread is left behind with it")
        return True

    def join(self, seconds: float) -> None:
        """Wait for its end, for which a None must be in the queue."""
        self._thread.join(seconds)

    def _run(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        while not self._is_left and (job := self._jobs.get()) is not None:
            self.job = job
            if self.next_piece():
                try:
                    job(self)
                except Exception:  # a job answers for its own faults
                    logger.exception("a grammar's thread met a fault")
                self._come_back()
            with self._lock:
                self._began = None

    def _come_back(self) -> None:
        """The job has ended."""
        if self._gave_way is None:
            return
        _schedule(threading.get_native_id(), "SCHED_OTHER")
        since, self._gave_way = self._gave_way, None
        had = time.thread_time() - since[0], time.monotonic() - since[1]
        if _is_next_to_nothing(*had):
            self._starved.set()
        self._had = had if had[1] <= STARVED_SECONDS else (0.0, 0.0)


def _put_last(thread_id: int | None) -> None:
    """Linux has a niceness for each thread, which can always be raised. Only for one that nobody
    waits for: on a busy machine it would hold the interpreter's lock, and not be run."""
    if thread_id is not None and sys.platform.startswith("linux"):
        with suppress(OSError):  # it has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, thread_id, LAST_OF_ALL)


def _is_next_to_nothing(cpu: float, seconds: float) -> bool:
    return seconds > STARVED_SECONDS and cpu < _STARVED_SHARE * seconds


def _schedule(thread_id: int | None, policy: str) -> bool:
    """By this policy of Linux's; whether the system lets it."""
    if thread_id is not None and hasattr(os, policy):
        with suppress(OSError):  # it has ended meanwhile, or may not
            os.sched_setscheduler(thread_id, getattr(os, policy), os.sched_param(0))
            return True
    return False


@cache
def _may_come_back() -> bool:
    """Whether a thread that is SCHED_IDLE may be SCHED_OTHER again, which one that ends then has
    tried: capabilities alone do not tell."""
    tried: list[bool] = []

    def attempt() -> None:
        own = threading.get_native_id()
        tried.append(_schedule(own, "SCHED_IDLE") and _schedule(own, "SCHED_OTHER"))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(_TRY_SECONDS)
    return tried == [True]
