# SPDX-License-Identifier: Apache-2.0
"""Turns of jobs on a real cache server, over a socket: leased until the next one, and given up by
the server itself when nobody asks for them any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from stratakv.connector import kept_turns as module
from stratakv.tiers.base import Answer
from stratakv.tiers.block import pack_key
from stratakv.tiers.contract import filled_buffers
from stratakv.tiers.remote.membership import ServerAddress
from stratakv.tiers.remote.remote_settings import RemoteSettings
from stratakv.tiers.remote.remote_store import RemoteStore, open_remote

from ..tiers.cache_server.rig import WAIT_SECONDS, RunningServer, running_server
from .scheduler_rig import LAYOUT, Rig, digest

JOB = b"\0job"
SLOTS = 16  # of the server
HIT, MISS = Answer.HIT, Answer.MISS


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server(cpu_bytes=SLOTS * LAYOUT.slot_bytes) as made:
        yield made


def connect(server: RunningServer) -> RemoteStore:
    settings = RemoteSettings(shares_memory=False)
    store = open_remote([ServerAddress("127.0.0.1", server.port)], LAYOUT, settings)
    assert store.wait_up(WAIT_SECONDS)
    return store


class Clients:
    """An engine's side with the server below its slab, and another engine's client."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.rig = Rig(connect(server))
        self.other = connect(server)

    def put(self, *numbers: int) -> None:
        """The other one stores blocks, a few at a time."""
        keys = [pack_key(digest(number)) for number in numbers]
        for start in range(0, len(keys), 4):
            part = keys[start : start + 4]
            self.other.store(part, filled_buffers(part, LAYOUT)).result(WAIT_SECONDS)

    def on_server(self, *numbers: int) -> list[Answer]:
        store = connect(self.server)  # that has heard of nothing yet
        try:
            keys = [pack_key(digest(number)) for number in numbers]
            future = store.prefetch_lookup(keys)
            assert future is not None
            future.result(WAIT_SECONDS)
            return store.lookup(keys)
        finally:
            store.close(WAIT_SECONDS)

    def end_turn(self, *numbers: int, seconds: float) -> None:
        hashes = [digest(number) for number in numbers]
        self.rig.side.job_retention.turn_ended(JOB, hashes, seconds, None)

    def num_leases(self) -> int:
        return self.server.tenant_store().num_leases

    def step_until(self, what: Callable[[], bool]) -> None:
        """As an engine does in every step."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not what():
            assert time.monotonic() < deadline
            self.rig.side.has_pending_work()
            time.sleep(0.005)

    def close(self) -> None:
        self.rig.side.shutdown(WAIT_SECONDS)
        self.other.close(WAIT_SECONDS)


@pytest.fixture
def clients(server: RunningServer) -> Iterator[Clients]:
    made = Clients(server)
    yield made
    made.close()


def test_what_a_turn_has_stays_while_others_are_evicted(clients: Clients) -> None:
    clients.put(1, 2, 3, 4, 5, 6)
    # For longer than a server lends, which is no fault of the server.
    clients.end_turn(1, 2, 3, seconds=300.0)
    clients.step_until(lambda: clients.num_leases() == 1)
    clients.put(*range(10, 10 + 3 * SLOTS))
    assert clients.on_server(1, 2, 3, 4, 5, 6) == [HIT] * 3 + [MISS] * 3
    [store] = clients.rig.hierarchy._stores
    assert store.breaker.allows
    assert store.stats().errors.keys() <= {"not_ready"}, "before it was attached"


def test_blocks_that_come_behind_the_turn_are_leased_too(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(module, "LEASE_SECONDS", 0.1)
    clients.end_turn(1, 2, seconds=WAIT_SECONDS)
    clients.put(1, 2)
    clients.step_until(lambda: clients.num_leases() > 0)


@pytest.mark.parametrize("end", ["killed", "job ended", "time"])
def test_a_lease_does_not_outlive_what_it_is_for(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(module, "LEASE_SECONDS", 0.3)
    clients.put(1, 2)
    clients.end_turn(1, 2, seconds=1.0 if end == "time" else 300.0)
    clients.step_until(lambda: clients.num_leases() > 0)
    if end == "job ended":
        clients.rig.side.job_retention.job_ended(JOB)
    if end == "killed":  # it says nothing more
        deadline = time.monotonic() + WAIT_SECONDS
        while clients.num_leases():
            assert time.monotonic() < deadline
            time.sleep(0.005)
    else:
        clients.step_until(lambda: not (clients.rig.side._kept_turns.turns or clients.num_leases()))
    clients.put(*range(10, 10 + 3 * SLOTS))
    assert clients.on_server(1, 2) == [MISS] * 2
