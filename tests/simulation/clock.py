# SPDX-License-Identifier: Apache-2.0
"""Virtual time: a clock that jumps from event to event, and a process that believes it.

`virtual_time` gives every module of the product that looks at the monotonic clock this one, so a
simulated minute costs what happens in it and nothing more, and a run depends on its seed alone.
There is no wall clock: whoever asks for it gets an AttributeError.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import random
import sys
import time
from collections.abc import Callable, Iterator
from unittest import mock

from stratakv.tiers import mailbox
from stratakv.tiers.hierarchy.breaker import Breaker
from stratakv.tiers.mailbox import Alarm

PRODUCT = "stratakv."


class VirtualClock:
    """Seconds since an arbitrary moment, and what will happen when."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def restart(self) -> None:
        """From the beginning, for another life."""
        self.now = 1000.0
        self._events.clear()
        self._count = 0

    def monotonic(self) -> float:
        return self.now

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Do something then, or now if that is over. Equal moments keep their order."""
        self._count += 1
        heapq.heappush(self._events, (max(moment, self.now), self._count, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def advance(self, seconds: float) -> None:
        """Let time pass, with all that happens in it."""
        self.wait_for(lambda: False, seconds)

    def wait_for(self, reached: Callable[[], bool], timeout_seconds: float | None) -> bool:
        """Let time pass until something is reached, at most so long; whether it is."""
        end = None if timeout_seconds is None else self.now + max(0.0, timeout_seconds)
        while not reached():
            if not self._events or (end is not None and self._events[0][0] > end):
                self.now = end if end is not None else self.now
                return reached()
            self.now, _, action = heapq.heappop(self._events)
            action()
        return True


class VirtualAlarm:
    """What `tiers.alarm.Alarm` is, without its thread."""

    def __init__(self, clock: VirtualClock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._closed = False

    def at(self, moment: float) -> None:
        self._clock.at(moment, self._go_off)

    def close(self) -> None:
        self._closed = True

    def _go_off(self) -> None:
        if not self._closed:
            self._ring()


class VirtualEvent:
    """What `threading.Event` is, where the one who waits makes the time pass."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._clock.wait_for(lambda: self._is_set, timeout)


class _Threading:
    """The part of `threading` that a mailbox uses."""

    def __init__(self, clock: VirtualClock) -> None:
        self.Event = functools.partial(VirtualEvent, clock)


@contextlib.contextmanager
def virtual_time(
    clock: VirtualClock, rng: random.Random, *, but_for: str | None = None
) -> Iterator[None]:
    """Meanwhile the product's clock is `clock`, and what it draws at random comes from `rng`. The
    modules below the package `but_for` keep the real one: threads of theirs wait for a disk."""
    real = {"time": time, "Alarm": Alarm, "Breaker": Breaker}
    virtual = {
        "time": clock,
        "Alarm": functools.partial(VirtualAlarm, clock),
        "Breaker": functools.partial(Breaker, clock=clock.monotonic, jitter=rng.random),
    }
    with contextlib.ExitStack() as stack:
        for module_name, module in list(sys.modules.items()):
            if not module_name.startswith(PRODUCT):
                continue
            if but_for is not None and module_name.startswith(but_for):
                continue
            for name, part in real.items():
                if vars(module).get(name) is part:
                    setattr(module, name, virtual[name])
                    stack.callback(setattr, module, name, part)
        stack.enter_context(mock.patch.object(mailbox, "threading", _Threading(clock)))
        yield
