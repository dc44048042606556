# SPDX-License-Identifier: Apache-2.0
"""The loop around an engine, for tests: step while there is work, else sleep until woken.

Time is what ends a test, not a count of steps: an engine that waits for a transfer makes thousands
of them where the machine is busy. The time is the machine's, or a clock's that jumps
(`simulation/clock.py`); the engine is a whole core, or a scheduler with a worker of numbers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import TokenOutput
from stratakv.engine.scheduler.scheduler import RETRY_SECONDS, Scheduler

WAIT_SECONDS = 60.0
PAUSE_SECONDS = 0.0005
IDLE_SECONDS = 5.0  # what an engine lets itself sleep with nobody waiting
# An engine that steps so often in a row without a token or a sleep is spinning.
MAX_EMPTY_STEPS = 200


class Wakeup(Protocol):
    """A `threading.Event`, or a virtual one."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Driver:
    """Runs one engine. `woken` is set by whoever wakes it, `step` makes one step of it.

    Fails where the engine spins, where there is work and nobody woke it (`grace_seconds` after its
    sleep; a thread may be about to), and where `seconds` are over. `has_work` knows of work that
    the scheduler does not, such as steps in flight.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        step: Callable[[], None],
        woken: Wakeup,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        seconds: float = WAIT_SECONDS,
        longest_sleep: float = IDLE_SECONDS,
        grace_seconds: float = 10.0,
        has_work: Callable[[], bool] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._has_work = has_work or scheduler.has_runnable_work
        self._step = step
        self._woken = woken
        self._monotonic = monotonic
        self._deadline = monotonic() + seconds
        self._longest_sleep = longest_sleep
        self._grace_seconds = grace_seconds
        self._empty_steps = 0

    def turn(self) -> None:
        """One step, or one sleep."""
        scheduler = self._scheduler
        assert self._monotonic() < self._deadline, f"stuck with {sorted(scheduler.requests)}"
        if self._has_work():
            self.step()
        else:
            self._empty_steps = 0
            self._sleep()

    def step(self) -> None:
        """One step, whether or not there is work."""
        counts = self._scheduler.counts
        self._woken.clear()
        before = counts["scheduled_tokens"]
        self._step()
        got_tokens = counts["scheduled_tokens"] > before
        self._empty_steps = 0 if got_tokens else self._empty_steps + 1
        assert self._empty_steps < MAX_EMPTY_STEPS, "the engine steps without doing anything"

    def run(self, is_over: Callable[[], bool], seconds: float | None = None) -> None:
        """Turn until it is; `seconds` from now on, where that is sooner than the time given."""
        end = self._deadline
        if seconds is not None:
            self._deadline = min(end, self._monotonic() + seconds)
        while not is_over():
            self.turn()
        self._deadline = end

    def calm_down(self, is_busy: Callable[[], bool]) -> None:
        """Let everything end that is under way; a step in between tells the worker who is gone."""
        for _ in range(2):
            # Asking for work may start some.
            self.run(lambda: not (self._has_work() or is_busy()))
            self.step()
        self.run(lambda: not (self._has_work() or is_busy()))

    def _sleep(self) -> None:
        scheduler = self._scheduler
        idle = RETRY_SECONDS if scheduler.num_waiting else IDLE_SECONDS
        if self._woken.wait(min(idle, self._longest_sleep)):
            self._woken.clear()
        # Whoever wakes it from here on must find the event as it is: not even cleared once more.
        elif self._has_work():
            retry_at = scheduler._retry_at
            if retry_at is None or retry_at > self._monotonic():
                came = self._woken.wait(self._grace_seconds)
                assert came, "there is work, and nobody woke the engine"


@contextlib.contextmanager
def noted(what: str) -> Iterator[None]:
    """A failure in it says what was going on, so that it can be seen again."""
    try:
        yield
    except BaseException as error:
        error.add_note(what)
        raise


def step_outputs(core: EngineCore, seconds: float = WAIT_SECONDS) -> Iterator[list[TokenOutput]]:
    """What each step brings, without end until the time is over; who has enough stops asking."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if core.has_work():
            yield core.step()
        else:  # until a transfer ends, or it is time to ask a store again
            time.sleep(PAUSE_SECONDS)
