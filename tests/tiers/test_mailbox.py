# SPDX-License-Identifier: Apache-2.0
"""The alarm rings once for each moment, in time, and not after it was closed."""

from __future__ import annotations

import threading
import time

from stratakv.tiers.mailbox import Alarm

WAIT_SECONDS = 10.0


def rings_in_turn(seconds_between: float) -> bool:
    """Whether two moments were rung for one after the other, the one first that was given last.
    A thread that gets no processor until both are over rings once for both."""
    rings: list[float] = []
    rung = threading.Semaphore(0)

    def ring() -> None:
        rings.append(time.monotonic())
        rung.release()

    alarm = Alarm(ring)
    first = time.monotonic() + 0.03
    alarm.at(first + 60.0)
    alarm.at(first + seconds_between)
    alarm.at(first)
    assert rung.acquire(timeout=WAIT_SECONDS)
    assert rings[0] >= first
    if rings[0] >= first + seconds_between:
        alarm.close()
        return False
    assert rung.acquire(timeout=WAIT_SECONDS)
    assert rings[1] >= first + seconds_between
    assert not rung.acquire(timeout=0.02)
    alarm.close()
    return True


def test_it_rings_for_the_earliest_moment_first() -> None:
    assert any(rings_in_turn(seconds) for seconds in (0.07, 1.0, 5.0))


def test_a_closed_alarm_is_silent_and_its_thread_gone() -> None:
    threads = threading.active_count()
    rung = threading.Event()
    alarm = Alarm(rung.set)
    alarm.close()
    alarm.at(time.monotonic())
    alarm = Alarm(rung.set)
    alarm.at(time.monotonic() + 0.05)
    alarm.close()
    alarm.close()
    assert not rung.wait(0.1)
    assert threading.active_count() == threads
