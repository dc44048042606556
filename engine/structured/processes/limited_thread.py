# SPDX-License-Identifier: Apache-2.0
"""A thread for work that should be bounded, but that could not be stopped if it were not. The
thread that waits for it can read how long the present piece takes, and leave the thread behind.

The limit counts processor time, so a busy machine fails no piece; a second limit, far larger,
counts time by the clock. A thread that was left behind ends after its present piece, and has the
lowest priority until then.

A thread that gives way runs only while other threads leave a processor free (SCHED_IDLE). A thread
that wakes up takes its place at once; with a niceness alone it would wait for the end of a slice.
Giving way lasts for one job, so threads started in the next job do not inherit it. A thread that
gets almost no processor time stops giving way for good, since it may hold the interpreter's lock.
Linux lets a thread come back from SCHED_IDLE only with CAP_SYS_NICE or a large RLIMIT_NICE; without
them no thread gives way.
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
# A thread that gives way, and gets less than this share of a processor for so long, in one job or
# in several, stops giving way.
STARVED_SECONDS = 2.0
_STARVED_SHARE = 0.05
_TRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits of one piece of work."""

    cpu_seconds: float
    seconds: float = 120.0  # by the clock, for a piece that waits, which none should do


class Jobs(Protocol):
    """The source of a thread's jobs; None ends the thread."""

    def get(self) -> Job | None: ...


class LimitedThread:
    """A thread that does jobs from a queue, which threads may share. A job calls `next_piece`
    between its pieces, each of which has the whole limit."""

    def __init__(self, name: str, jobs: Jobs) -> None:
        self._jobs = jobs
        # While it gives way: its processor time and the clock at the beginning, each less the
        # amount `_had` that the jobs before took.
        self._gave_way: tuple[float, float] | None = None
        self._had = 0.0, 0.0
        self._starved = threading.Event()  # for good
        self._lock = threading.Lock()
        self._is_left = False
        self._began: tuple[float, float] | None = None  # of the piece: processor time, clock
        self._clock: int | None = None
        self.job: Job | None = None  # the present or last one
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def give_way(self) -> None:
        """Run only while no other thread wants the processor, until the job ends. The job calls
        this, and must wait only for a processor from then on."""
        if self._gave_way is None and not self._starved.is_set() and _may_come_back():
            self._gave_way = time.thread_time() - self._had[0], time.monotonic() - self._had[1]
            _schedule(threading.get_native_id(), "SCHED_IDLE")
            if self._starved.is_set():  # `is_over` has set it meanwhile
                _schedule(threading.get_native_id(), "SCHED_OTHER")

    def next_piece(self, note: Callable[[], None] = lambda: None) -> bool:
        """Begin another piece of the job, which calls this. `note` records the piece. Return False,
        without a call of `note`, if the thread was left behind: the job must end."""
        with self._lock:
            if self._is_left:
                return False
            self._began = time.thread_time(), time.monotonic()
            note()
            return True

    def is_over(self, limit: Limit) -> bool:
        """Whether the present piece has taken longer than it may. Takes no lock: a thread that gets
        no processor may hold it, and each step calls this."""
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
        """Leave the thread behind if its present piece is over the limit, and return whether it
        was. Its later results are ignored."""
        if not self.is_over(limit):
            return False
        with self._lock:
            if not self.is_over(limit):  # another piece has begun meanwhile
                return False
            self._is_left = True
        _put_last(self._thread.native_id)
        logger.error("a grammar hangs: a thread is left behind with it")
        return True

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` for the thread's end, for which a None must be in the queue."""
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
        """Stop giving way at the end of a job, and add up the time it had."""
        if self._gave_way is None:
            return
        _schedule(threading.get_native_id(), "SCHED_OTHER")
        since, self._gave_way = self._gave_way, None
        had = time.thread_time() - since[0], time.monotonic() - since[1]
        if _is_next_to_nothing(*had):
            self._starved.set()
        self._had = had if had[1] <= STARVED_SECONDS else (0.0, 0.0)


def _put_last(thread_id: int | None) -> None:
    """Give a thread the lowest priority. Linux has a niceness for each thread, which can always be
    raised. Only for threads that were left behind: others could hold the interpreter's lock without
    getting a processor."""
    if thread_id is not None and sys.platform.startswith("linux"):
        with suppress(OSError):  # it has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, thread_id, LAST_OF_ALL)


def _is_next_to_nothing(cpu: float, seconds: float) -> bool:
    return seconds > STARVED_SECONDS and cpu < _STARVED_SHARE * seconds


def _schedule(thread_id: int | None, policy: str) -> bool:
    """Schedule a thread by this policy of Linux, and return whether the system allows that."""
    if thread_id is not None and hasattr(os, policy):
        with suppress(OSError):  # it has ended meanwhile, or may not
            os.sched_setscheduler(thread_id, getattr(os, policy), os.sched_param(0))
            return True
    return False


@cache
def _may_come_back() -> bool:
    """Whether a SCHED_IDLE thread may be SCHED_OTHER again. A thread of its own tries it, since the
    capabilities alone do not tell."""
    tried: list[bool] = []

    def attempt() -> None:
        own = threading.get_native_id()
        tried.append(_schedule(own, "SCHED_IDLE") and _schedule(own, "SCHED_OTHER"))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(_TRY_SECONDS)
    return tried == [True]
