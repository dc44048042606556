# SPDX-License-Identifier: Apache-2.0
"""The driver notices an engine that spins, one that nobody wakes, and one that never ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from .simulation.clock import VirtualClock, VirtualEvent
from .stepping import Driver


class Scheduler:
    """One that has work or not, and computes nothing."""

    def __init__(self, has_work: bool, retry_at: float | None = None) -> None:
        self.has_work = has_work
        self.counts = {"scheduled_tokens": 0}
        self.num_waiting = 1
        self.requests = {"a": None}
        self._retry_at = retry_at

    def has_runnable_work(self) -> bool:
        return self.has_work


def driver(scheduler: Any, clock: VirtualClock, **options: Any) -> Driver:
    options = {"monotonic": clock.monotonic, "grace_seconds": 0.0, **options}
    return Driver(scheduler, lambda: None, VirtualEvent(clock), **options)


def test_steps_without_tokens_are_spinning() -> None:
    with pytest.raises(AssertionError, match="without doing anything"):
        driver(Scheduler(True), VirtualClock()).run(lambda: False)


def test_work_that_nobody_announced_is_a_lost_wake_up() -> None:
    clock = VirtualClock()
    scheduler = Scheduler(False)
    clock.after(0.01, lambda: setattr(scheduler, "has_work", True))
    with pytest.raises(AssertionError, match="nobody woke the engine"):
        driver(scheduler, clock).turn()


def test_work_that_was_due_by_itself_is_not() -> None:
    clock = VirtualClock()
    scheduler = Scheduler(False, retry_at=clock.now)
    clock.after(0.01, lambda: setattr(scheduler, "has_work", True))
    driver(scheduler, clock).turn()


def test_a_wake_up_that_is_on_its_way_counts() -> None:
    scheduler = Scheduler(False)
    woken = threading.Event()

    class Late:
        """Work is there when the sleep ends, and the thread that wakes comes after it."""

        def wait(self, timeout: float | None = None) -> bool:
            if not scheduler.has_work:
                scheduler.has_work = True
                threading.Timer(0.01, woken.set).start()
                return False
            return woken.wait(timeout)

        def set(self) -> None: ...
        def clear(self) -> None: ...

    Driver(scheduler, lambda: None, Late()).turn()  # type: ignore[arg-type]
    assert woken.is_set()


def test_what_never_ends_names_who_waits() -> None:
    clock = VirtualClock()
    with pytest.raises(AssertionError, match=r"stuck with \['a'\]"):
        driver(Scheduler(False), clock, seconds=600.0).run(lambda: False, 5.0)
    assert clock.now < 1010.0
