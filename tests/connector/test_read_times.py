# SPDX-License-Identifier: Apache-2.0
"""What the watched loads teach of their stores, under a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stratakv.connector.costs.rates import LinkRate, ReadTimes
from stratakv.tiers.base import RequestContext
from stratakv.tiers.hierarchy.promotions import LoadTicket

BLOCK_BYTES = 1000


class Watch:
    """Read times of two stores, 1 s for a transfer of any size at first."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ended: list[LoadTicket] = []
        self.links = {name: LinkRate(1.0, 1e15) for name in ("ssd", "net")}
        self.hierarchy: Any = SimpleNamespace(
            tiers=["cpu", *self.links],
            block_bytes=BLOCK_BYTES,
            begin_load=self._begin_load,
            end_load=self.ended.append,
        )
        self._tiers: dict[bytes, str] = {}  # of the next load
        self.times = ReadTimes(self.hierarchy, self.links, clock=lambda: self.now)

    def begin(self, tiers: dict[bytes, str]) -> LoadTicket:
        self._tiers = tiers
        return self.times.begin_load(list(tiers))

    def _begin_load(self, keys: list[bytes], _: RequestContext) -> LoadTicket:
        tiers = list(self._tiers.values())
        slots = [0 if tier == "cpu" else None for tier in tiers]
        return LoadTicket(keys, slots, tiers, waiting=slots.count(None))

    def end(self, ticket: LoadTicket, came: bool = True) -> None:
        ticket.slots = [1 if came else slot for slot in ticket.slots]
        ticket.waiting = 0
        self.times.record_ended_loads()

    def look(self, seconds: float) -> None:
        """Some time passes, and somebody looks."""
        self.now += seconds
        self.times.record_ended_loads()

    def seconds(self, name: str) -> float:
        return self.links[name].estimate_transfer(BLOCK_BYTES)


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_a_read_ended_between_two_looks(watch: Watch) -> None:
    ticket = watch.begin({b"a": "ssd"})
    watch.look(0.9)
    watch.now += 0.2
    watch.end(ticket)
    assert watch.seconds("ssd") == pytest.approx(1.0), "it may well have taken a second"
    ticket = watch.begin({b"a": "ssd"})
    watch.look(4.0)
    watch.now += 0.1
    watch.end(ticket)
    assert 1.0 < watch.seconds("ssd") < 4.0
    for _ in range(20):
        ticket = watch.begin({b"a": "ssd"})
        watch.now += 0.1
        watch.end(ticket)
    assert watch.seconds("ssd") == pytest.approx(0.1, rel=0.1)
    assert not watch.times.watched and watch.times.queued["ssd"] == 0


def test_what_two_wait_for_is_read_once(watch: Watch) -> None:
    first = watch.begin({b"a": "ssd", b"b": "ssd"})
    second = watch.begin({b"b": "ssd", b"c": "ssd"})
    assert watch.times.queued["ssd"] == 3
    watch.end(first)
    assert watch.times.queued["ssd"] == 1
    third = watch.begin({b"c": "ssd"})
    assert watch.times.queued["ssd"] == 1
    watch.end(third)
    watch.end(second)
    assert watch.times.queued["ssd"] == 0 and not watch.times.watched


def test_what_waits_before_it_is_part_of_the_transfer(watch: Watch) -> None:
    watch.links["ssd"] = LinkRate(1e-9, BLOCK_BYTES)  # a second for each block
    times = ReadTimes(watch.hierarchy, watch.links, clock=lambda: watch.now)
    watch.times = times
    first = watch.begin({b"a": "ssd", b"b": "ssd"})
    second = watch.begin({b"c": "ssd"})
    assert times.queued["ssd"] == 3
    watch.look(2.0)
    watch.end(first)
    watch.look(1.0)
    watch.end(second)
    assert watch.seconds("ssd") == pytest.approx(1.0, rel=0.01)


def test_what_did_not_come_says_only_that_it_took_so_long(watch: Watch) -> None:
    ticket = watch.begin({b"a": "ssd"})
    watch.look(0.01)
    watch.end(ticket, came=False)
    assert watch.seconds("ssd") == pytest.approx(1.0)
    ticket = watch.begin({b"a": "ssd"})
    watch.look(9.0)
    watch.end(ticket, came=False)
    assert watch.seconds("ssd") > 1.5


def test_a_load_let_go_teaches_at_once_and_is_ended_when_its_reads_have(watch: Watch) -> None:
    ticket = watch.begin({b"x": "cpu", b"a": "ssd"})
    watch.now += 10.0
    watch.times.let_go(ticket)
    assert watch.seconds("ssd") > 1.5
    assert watch.ended == []
    watch.end(ticket)
    assert watch.ended == [ticket]
    whole = watch.begin({b"x": "cpu"})
    watch.times.let_go(whole)
    assert watch.ended == [ticket, whole], "nothing was to be waited for"


def test_who_joins_a_read_teaches_by_the_time_it_began(watch: Watch) -> None:
    first = watch.begin({b"a": "ssd"})
    watch.look(9.9)
    second = watch.begin({b"a": "ssd"})
    watch.now += 0.1
    watch.times.let_go(second)
    slower = watch.seconds("ssd")
    assert slower > 1.5
    second.waiting = 0
    watch.end(first)
    assert watch.seconds("ssd") > slower, "the second one did not take 0.1 s"
    assert watch.ended == [second]


def test_of_two_stores_either_may_have_been_the_slow_one(watch: Watch) -> None:
    ticket = watch.begin({b"a": "ssd", b"b": "net"})
    watch.look(9.0)
    watch.end(ticket)
    assert watch.seconds("ssd") == watch.seconds("net") == pytest.approx(1.0)
    ticket = watch.begin({b"a": "ssd", b"b": "net"})
    watch.now += 0.1
    watch.end(ticket)
    assert watch.seconds("ssd") == watch.seconds("net") < 1.0
