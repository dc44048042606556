# SPDX-License-Identifier: Apache-2.0
"""The alarm rings once for each moment, in time, and not after it was closed."""

from __future__ import annotations

import threading
import time

from stratakv.tiers.mailbox import Alarm

WAIT_SECONDS = 10.0


def test_it_rings_for_the_earliest_moment_first() -> None:
    rings: list[float] = []
    rung = threading.Semaphore(0)

    def ring() -> None:
        rings.append(time.monotonic())
        rung.release()

    alarm = Alarm(ring)
    now = time.monotonic()
    alarm.at(now + 60.0)
    alarm.at(now + 0.1)
    alarm.at(now + 0.03)
    assert rung.acquire(timeout=WAIT_SECONDS)
    assert rung.acquire(timeout=WAIT_SECONDS)
    assert rings[0] >= now + 0.03
    assert rings[1] >= now + 0.1
    assert not rung.acquire(timeout=0.02)
    alarm.close()


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
