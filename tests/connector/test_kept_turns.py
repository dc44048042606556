# SPDX-License-Identifier: Apache-2.0
"""Turns of jobs in the tiers: held until the next one, read when it is due, and never for longer
than was said."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from stratakv.connector import kept_turns as module
from stratakv.tiers.base import Answer
from stratakv.tiers.block import pack_key
from stratakv.tiers.slab import cpu_slab as cpu_module

from ..clock import Clock
from .scheduler_rig import Rig, digest

JOB = b"\0job"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for each in (module, cpu_module):
        monkeypatch.setattr(each, "time", clock)
    return clock


@pytest.fixture
def rig(clock: Clock) -> Iterator[Rig]:
    made = Rig()
    yield made
    made.side.shutdown(1.0)


def in_slab(rig: Rig, *numbers: int) -> list[bool]:
    answers = rig.slab.lookup([pack_key(digest(number)) for number in numbers])
    return [answer is Answer.HIT for answer in answers]


def collect(rig: Rig) -> None:
    """As an engine does in every step; a read of the store in memory takes two."""
    for _ in range(3):
        rig.side.has_pending_work()


def end_turn(
    rig: Rig, *numbers: int, job: bytes = JOB, seconds: float = 60.0, due: float | None = None
) -> None:
    rig.side.job_retention.turn_ended(job, [digest(number) for number in numbers], seconds, due)


def test_a_turn_is_not_evicted_before_its_next_one(rig: Rig, clock: Clock) -> None:
    rig.put(1, 2, 3)
    end_turn(rig, 1, 2, 3)
    for start in range(10, 50, 10):
        rig.put(*range(start, start + 10))
    assert in_slab(rig, 1, 2, 3) == [True] * 3
    # Its next turn has other blocks too, and takes its place.
    end_turn(rig, 1, 2)
    rig.put(*range(50, 64))
    assert in_slab(rig, 1, 2, 3) == [True, True, False]
    rig.side.job_retention.job_ended(JOB)
    rig.put(*range(70, 86))
    assert in_slab(rig, 1, 2) == [False] * 2


def test_no_turn_is_kept_longer_than_was_said(rig: Rig, clock: Clock) -> None:
    rig.put(1, 2)
    end_turn(rig, 1, 2, seconds=5.0, due=7.0)  # it is not read after its end
    clock.now += 5.0
    collect(rig)
    assert rig.side.stats()["kept_turns"] == 0
    rig.put(*range(10, 26))
    assert in_slab(rig, 1, 2) == [False] * 2
    end_turn(rig, 3, seconds=0.0)
    assert rig.side.stats()["kept_turns"] == 0


def test_what_only_a_store_has_is_read_when_it_is_due(rig: Rig, clock: Clock) -> None:
    rig.put_below(1, 2, 3)
    end_turn(rig, 1, 2, 3, due=4.0)
    clock.now += 3.9
    collect(rig)
    assert in_slab(rig, 1, 2, 3) == [False] * 3
    clock.now += 0.2
    collect(rig)
    assert in_slab(rig, 1, 2, 3) == [True] * 3
    assert rig.side.stats()["blocks_read_ahead_of_turns"] == 3
    assert rig.slab.stats().pinned_blocks == 0
    rig.put(*range(10, 24))
    assert in_slab(rig, 1, 2, 3) == [True] * 3


def test_it_is_known_later_when_a_turn_is_due(rig: Rig, clock: Clock) -> None:
    rig.put_below(1)
    rig.side.job_retention.turn_expected(JOB, 1.0)  # of a job that nobody knows
    end_turn(rig, 1)
    rig.side.job_retention.turn_expected(JOB, 0.0)
    collect(rig)
    assert in_slab(rig, 1) == [True]


def test_reads_hold_a_share_of_the_slab_and_end_with_the_job(rig: Rig, clock: Clock) -> None:
    rig.put_below(*range(1, 13))
    with rig.held_reads():
        end_turn(rig, *range(1, 4), job=b"a", due=0.0)
        end_turn(rig, *range(4, 13), job=b"b", due=0.0)
        collect(rig)
        assert rig.slab.stats().reserved_blocks == 4  # a quarter of 16
        rig.side.job_retention.job_ended(b"a")
        rig.side.job_retention.job_ended(b"b")
    collect(rig)
    assert rig.slab.stats().reserved_blocks == rig.slab.stats().pinned_blocks == 0
    end_turn(rig, *range(4, 13), job=b"b", due=0.0)
    collect(rig)
    assert rig.side._kept_turns._room == 4


def test_a_reset_keeps_nothing(rig: Rig, clock: Clock) -> None:
    rig.put(1)
    end_turn(rig, 1, due=0.0)
    rig.side.reset()
    assert rig.side.stats()["kept_turns"] == 0
    assert in_slab(rig, 1) == [False]


@pytest.mark.parametrize("seed", range(10))
def test_random_jobs_leave_nothing_behind(rig: Rig, clock: Clock, seed: int) -> None:
    rng = random.Random(seed)
    rig.put_below(*range(40))
    for _ in range(60):
        job = b"%d" % rng.randrange(5)
        action = rng.random()
        if action < 0.4:
            start = rng.randrange(36)
            numbers = range(start, start + rng.randrange(1, 5))
            end_turn(rig, *numbers, job=job, seconds=rng.choice([0.5, 3.0]),
                     due=rng.choice([None, 0.0, 1.0]))  # fmt: skip
        elif action < 0.5:
            rig.side.job_retention.turn_expected(job, rng.random())
        elif action < 0.6:
            rig.side.job_retention.job_ended(job)
        elif action < 0.8:
            rig.put(*rng.sample(range(100, 200), 3))
        clock.now += rng.choice([0.0, 0.3])
        rig.side.has_pending_work()
        assert len(rig.slab._holds.times) <= rig.slab._holds.most_blocks
    clock.now += 3.0
    collect(rig)
    turns = rig.side._kept_turns
    assert (len(turns.turns), turns._room) == (0, 4)
    rig.slab._holds.expire(clock.now)
    assert len(rig.slab._holds.times) == rig.slab.stats().pinned_blocks == 0


def test_a_turn_that_is_due_again_while_it_is_read_is_read_once(rig: Rig, clock: Clock) -> None:
    rig.put_below(1, 2, 3)
    with rig.held_reads():
        end_turn(rig, 1, 2, 3, due=0.0)
        collect(rig)
        rig.side.job_retention.turn_expected(JOB, 0.0)
        collect(rig)
    collect(rig)
    rig.side.job_retention.job_ended(JOB)
    assert rig.slab.stats().pinned_blocks == rig.slab.stats().reserved_blocks == 0
    assert rig.side._kept_turns._room == 4
