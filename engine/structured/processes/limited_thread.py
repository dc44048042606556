# SPDX-License-Identifier: Apache-2.0
"""A thread for work that should end soon but could not be stopped. Another thread can read how long
the present piece of work has taken, and can abandon the working thread.

The limit counts CPU time, so that no piece of work fails because the machine is busy; a second, far
larger limit counts wall-clock time. An abandoned thread ends after its present piece, and has the
lowest priority until then.

A thread that gives way runs only while a CPU is free (SCHED_IDLE). Any other thread that wakes
preempts the giving-way thread at once; with a low `nice` priority alone the other thread would wait
for the end of a time slice. A thread gives way for one job only, so that threads started in the
next job do not inherit SCHED_IDLE. A thread that gets almost no CPU time stops giving way for good,
because it may hold the interpreter's lock. Linux lets a thread leave SCHED_IDLE only with
CAP_SYS_NICE or a large RLIMIT_NICE. Without either permission, no thread gives way."""

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

LAST_OF_ALL = 19  # the niceness of an abandoned thread
Job = Callable[["LimitedThread"], None]
# A thread stops giving way after STARVED_SECONDS, in one job or in several, with less than
# _STARVED_SHARE of a processor.
STARVED_SECONDS = 2.0
_STARVED_SHARE = 0.05
_TRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Limit:
    """The time limits of one piece of work."""

    cpu_seconds: float
    seconds: float = 120.0  # wall-clock time, for a piece that waits (none should)


class Jobs(Protocol):
    """A source of jobs for a thread. None ends the thread."""

    def get(self) -> Job | None: ...


class LimitedThread:
    """A thread that does the jobs of a queue, which several threads may share. A job calls
    `next_piece` between its pieces of work. The limit applies to each piece separately."""

    def __init__(self, name: str, jobs: Jobs) -> None:
        self._jobs = jobs
        # While the thread gives way: its processor time and the clock when it began to give way,
        # each minus the amount in `_had` from earlier jobs.
        self._gave_way: tuple[float, float] | None = None
        self._had = 0.0, 0.0
        self._starved = threading.Event()  # set: the thread gives way no more
        self._lock = threading.Lock()
        self._is_left = False
        self._began: tuple[float, float] | None = None  # start of the piece: processor time, clock
        self._clock: int | None = None
        self.job: Job | None = None  # the present or last job
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def give_way(self) -> None:
        """Run with SCHED_IDLE until the job ends. The job calls this method, and from then on must
        wait only for a CPU."""
        if self._gave_way is None and not self._starved.is_set() and _may_come_back():
            self._gave_way = time.thread_time() - self._had[0], time.monotonic() - self._had[1]
            _schedule(threading.get_native_id(), "SCHED_IDLE")
            if self._starved.is_set():  # `is_over` has set the event meanwhile
                _schedule(threading.get_native_id(), "SCHED_OTHER")

    def next_piece(self, note: Callable[[], None] = lambda: None) -> bool:
        """Begin another piece of the job. The job calls this method; `note` records the piece. If
        the thread was abandoned, return False without calling `note`: the job must end."""
        with self._lock:
            if self._is_left:
                return False
            self._began = time.thread_time(), time.monotonic()
            note()
            return True

    def is_over(self, limit: Limit) -> bool:
        """Whether the present piece has taken longer than the limit. The check takes no lock,
        because each step calls it and a thread without CPU time may hold the lock."""
        began = self._began
        if began is None or self._clock is None or not self._thread.is_alive():
            return False
        try:
            cpu = time.clock_gettime(self._clock) - began[0]
        except OSError:  # the thread has ended meanwhile
            return False
        now = time.monotonic()
        seconds, gave_way = now - began[1], self._gave_way
        if gave_way is not None and not self._starved.is_set():
            if _is_next_to_nothing(cpu + began[0] - gave_way[0], now - gave_way[1]):
                self._starved.set()
                _schedule(self._thread.native_id, "SCHED_OTHER")
        return cpu > limit.cpu_seconds or seconds > limit.seconds

    def abandon_if_over(self, limit: Limit) -> bool:
        """Abandon the thread if its present piece is over the limit, and return whether the thread
        was abandoned. Later results of the thread are ignored."""
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
        """Wait up to `seconds` for the thread's end. The queue must hold a None for the thread."""
        self._thread.join(seconds)

    def _run(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        while not self._is_left and (job := self._jobs.get()) is not None:
            self.job = job
            if self.next_piece():
                try:
                    job(self)
                except Exception:  # each job handles its own errors
                    logger.exception("a grammar's thread met a fault")
                self._come_back()
            with self._lock:
                self._began = None

    def _come_back(self) -> None:
        """Stop giving way at the end of a job, and add up the CPU time of the job."""
        if self._gave_way is None:
            return
        _schedule(threading.get_native_id(), "SCHED_OTHER")
        since, self._gave_way = self._gave_way, None
        had = time.thread_time() - since[0], time.monotonic() - since[1]
        if _is_next_to_nothing(*had):
            self._starved.set()
        self._had = had if had[1] <= STARVED_SECONDS else (0.0, 0.0)


def _put_last(thread_id: int | None) -> None:
    """Give a thread the lowest priority. The thread must be abandoned, because a thread in use
    could hold the interpreter's lock without getting a CPU. On Linux each thread has its own `nice`
    value, which can always be raised."""
    if thread_id is not None and sys.platform.startswith("linux"):
        with suppress(OSError):  # the thread has ended
            os.setpriority(os.PRIO_PROCESS, thread_id, LAST_OF_ALL)


def _is_next_to_nothing(cpu: float, seconds: float) -> bool:
    return seconds > STARVED_SECONDS and cpu < _STARVED_SHARE * seconds


def _schedule(thread_id: int | None, policy: str) -> bool:
    """Set a thread's Linux scheduling policy, and return whether the system allowed it."""
    if thread_id is not None and hasattr(os, policy):
        with suppress(OSError):  # the thread has ended, or the policy is not allowed
            os.sched_setscheduler(thread_id, getattr(os, policy), os.sched_param(0))
            return True
    return False


@cache
def _may_come_back() -> bool:
    """Whether a SCHED_IDLE thread may become SCHED_OTHER again. A separate thread tries the change,
    because the process's capabilities alone do not show whether it is allowed."""
    tried: list[bool] = []

    def attempt() -> None:
        own = threading.get_native_id()
        tried.append(_schedule(own, "SCHED_IDLE") and _schedule(own, "SCHED_OTHER"))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(_TRY_SECONDS)
    return tried == [True]
