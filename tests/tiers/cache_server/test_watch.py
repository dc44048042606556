# SPDX-License-Identifier: Apache-2.0
"""Watchers are told of blocks that come and go, and of what they missed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.block import KEY_BYTES
from stratakv.tiers.cache_server.watch import Happening, Watcher
from stratakv.tiers.contract import make_keys
from stratakv.tiers.wire.frames import MAX_KEYS
from stratakv.tiers.wire.limits import Limits

from .rig import LAYOUT, WAIT_SECONDS, RunningServer, running_server, store_blocks


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server(cpu_bytes=8 * LAYOUT.slot_bytes) as server:
        server.attach(server.stub())
        yield server


class Stream:
    """What one watcher was told."""

    def __init__(self, server: RunningServer) -> None:
        self.call = server.stub().watch(messages.WatchRequest(), timeout=WAIT_SECONDS)
        self.first = next(self.call)
        self.next_sequence = 1

    def until(self, is_enough: Callable[[Any], bool]) -> Any:
        for event in self.call:
            assert event.sequence == self.next_sequence
            self.next_sequence += 1
            if is_enough(event):
                return event
        raise AssertionError("the stream ended")


def _keys(packed: bytes) -> list[bytes]:
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


def test_blocks_that_come_and_go(server: RunningServer) -> None:
    stub, stream, other = server.stub(), Stream(server), Stream(server)
    assert stream.first.boot_id == server.server.boot_id
    assert (stream.first.sequence, stream.first.stored, stream.first.lost) == (0, b"", 0)
    keys = make_keys(3)
    store_blocks(stub, keys)
    for each in (stream, other):
        found: list[bytes] = []
        while len(found) < 3:
            found += _keys(each.until(lambda event: event.stored).stored)
        assert sorted(found) == sorted(keys)
    stub.delete(messages.DeleteRequest(keys=keys[1]), timeout=WAIT_SECONDS)
    assert _keys(stream.until(lambda event: event.removed).removed) == [keys[1]]
    stub.delete(messages.DeleteRequest(all=True), timeout=WAIT_SECONDS)
    event = stream.until(lambda event: event.cleared)
    assert (event.stored, event.removed) == (b"", b"")


def test_evicted_blocks_are_noticed(server: RunningServer) -> None:
    stub, stream = server.stub(), Stream(server)
    early = make_keys(4, "early")
    store_blocks(stub, early)
    store_blocks(stub, make_keys(8, "late"))
    gone: list[bytes] = []
    began = time.monotonic()
    while len(gone) < 4:
        gone += _keys(stream.until(lambda event: event.removed).removed)
    assert sorted(gone) == sorted(early)
    assert time.monotonic() - began < 10


def test_nobody_looks_again_while_nobody_watches(server: RunningServer) -> None:
    stream = Stream(server)
    service = server.server._service
    assert service is not None and len(service.watches) == 1
    stream.call.cancel()
    deadline = time.monotonic() + WAIT_SECONDS
    while len(service.watches) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not len(service.watches) and service.watches._looking is None
    assert not server.tenant_store()._listeners


def test_watchers_are_bounded() -> None:
    with running_server(limits=Limits(max_watchers=2)) as server:
        server.attach(server.stub())
        streams = [Stream(server) for _ in range(2)]
        with pytest.raises(grpc.RpcError) as raised:
            Stream(server)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 watchers are here already" in raised.value.details()
        for stream in streams:
            stream.call.cancel()


def test_a_drain_ends_every_stream() -> None:
    with running_server() as server:
        server.attach(server.stub())
        stream = Stream(server)
        began = time.monotonic()
        assert server.close(drain_seconds=10.0)
        assert time.monotonic() - began < 5.0
        assert list(stream.call) == []


def test_who_reads_too_slowly_is_told_how_much_is_missing() -> None:
    async def run() -> list[Happening | None]:
        watcher = Watcher(4, asyncio.get_running_loop())
        keys = make_keys(6)
        watcher.tell(Happening(stored=keys[:3]))
        for key in keys[3:]:
            watcher.tell(Happening(removed=[key]))  # the first of these still fits
        taken = [await watcher.next_event()]
        watcher.tell(Happening(cleared=True))
        taken += [await watcher.next_event(), await watcher.next_event()]
        watcher.end_events()
        return [*taken, await watcher.next_event()]

    first, second, third, end = asyncio.run(run())
    assert first is not None and second is not None and third is not None and end is None
    assert (len(first.stored), first.lost) == (3, 0)
    assert (len(second.removed), second.lost) == (1, 0)
    assert (third.cleared, third.lost) == (True, 2)


def test_an_event_fits_into_a_message(server: RunningServer) -> None:
    stream = Stream(server)
    keys = make_keys(MAX_KEYS + 5)
    listener = server.tenant_store()._listeners[0]
    listener.removed(keys)
    sizes = [len(_keys(stream.until(lambda event: event.removed).removed)) for _ in range(2)]
    assert sizes == [MAX_KEYS, 5]
