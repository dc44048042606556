# SPDX-License-Identifier: Apache-2.0
"""Faults that were found and mended, those behind the pinned seeds too, in a few lines each."""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from stratakv.connector.connector_context import ConnectorContext
from stratakv.connector.copy_signal import CopySignal
from stratakv.connector.costs.economics import Choice
from stratakv.connector.messages import Match, MatchKind
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.parts import Parts
from stratakv.engine.cli.serve import _tell_start
from stratakv.engine.config.engine_options import EMBEDDED_MODEL, engine_config
from stratakv.engine.config.server_options import ServerConfig
from stratakv.engine.request.core_messages import PROTOCOL_VERSION, Ready
from stratakv.tiers.admission import AdmissionFilter
from stratakv.tiers.base import Answer
from stratakv.tiers.block import BlockLayout, pack_key
from stratakv.tiers.hierarchy.breaker import LATE_ANSWERS
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.hierarchy.hierarchy_options import HierarchyOptions
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.testing.fault_plan import parse_faults
from stratakv.tiers.testing.faulty_store import FaultyStore
from stratakv.tiers.testing.memory_store import MemoryStore

from ..connector.order_checker import RecordingDevice
from ..connector.order_walk import LAYOUT, Role, Walk
from ..simulation.clock import VirtualClock, virtual_time
from ..simulation.small_slab import small_slab
from ..tiers.hierarchy.prefetching_store import PrefetchingStore


def test_652341014_a_refused_store_ahead_of_need(caplog: pytest.LogCaptureFixture) -> None:
    """It stayed among those that a pass need not wait for."""
    caplog.set_level(logging.CRITICAL)
    walk = Walk(1, RecordingDevice(lambda _count: 0, fails=lambda: "refuse"))
    walk.step([Role.COLD])
    walk.end()
    walk.close()


class Refusing(AdmissionFilter):
    """Finds nothing worth writing."""

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        return [False] * len(keys)


def test_203883_a_refused_block_that_is_in_another_store_only() -> None:
    """It was marked for writing although the slab did not have it."""
    wanted, others = pack_key(b"w" * 32), [pack_key(bytes([i]) * 32) for i in range(2)]
    slab = small_slab(LAYOUT, 2)
    ssd = MemoryStore(LAYOUT, 100 * LAYOUT.page_bytes, name="ssd")
    net = MemoryStore(LAYOUT, 100 * LAYOUT.page_bytes, name="net")
    net.is_shared = True
    hierarchy = Hierarchy(
        slab,
        [ssd, net],
        wakeup=lambda: None,
        options=HierarchyOptions(watermark=1.0, admission=Refusing()),
    )
    for keys in ([wanted], others):
        hierarchy.end_store(hierarchy.begin_store(keys), ok=True)
        for _ in range(3):
            hierarchy.poll()
    held = hierarchy.begin_load(others)
    assert hierarchy.find_prefix([wanted]).tiers == ["net"]
    hierarchy.end_load(hierarchy.begin_load([wanted]))  # there is no room for it
    for write_back in hierarchy._write_backs._all:
        assert wanted not in write_back._dirty
    hierarchy.end_load(held)
    assert hierarchy.close(1.0)


def faulty_hierarchy(faults: str) -> Hierarchy:
    """Sixteen slots over a store that has the blocks 0 to 9, and its faults."""
    inner = MemoryStore(LAYOUT, 10**6, name="ssd")
    names = [pack_key(bytes([i]) * 32) for i in range(10)]
    inner.store(names, [memoryview(bytearray(LAYOUT.page_bytes))] * 10).result(0)
    store = FaultyStore(inner, parse_faults(faults))
    slab = small_slab(LAYOUT, 16)
    return Hierarchy(
        slab,
        [store],
        wakeup=lambda: None,
        options=HierarchyOptions(watermark=1.0, read_seconds=0.5),
    )


def test_few_requests_to_a_store_that_hangs() -> None:
    """Three late answers within a second opened the breaker, so requests that came more rarely
    each waited for the deadline, and each left slots behind that nothing gave back."""
    clock = VirtualClock()
    with virtual_time(clock, random.Random(1)):
        hierarchy = faulty_hierarchy("load:hang=1")
        waited = 0
        for number in range(10):
            began = clock.now
            ticket = hierarchy.begin_load([pack_key(bytes([number]) * 32)])
            while ticket.waiting:
                clock.advance(0.1)
                hierarchy.poll()
            hierarchy.end_load(ticket)
            waited += clock.now > began
            clock.advance(5.0)
            hierarchy.poll()
        assert waited == LATE_ANSWERS
        assert hierarchy.stats()["cpu"].reserved_blocks == LATE_ANSWERS
        assert hierarchy.close(1.0)


def test_reads_of_a_store_that_cannot_be_written_to() -> None:
    """One breaker for both: writes that failed opened it and reads closed it, in turn for ever, and
    what a read-only disk had was not to be had most of the time."""
    hierarchy = faulty_hierarchy("store:error=1")
    for number in range(100, 200):
        hierarchy.end_store(hierarchy.begin_store([pack_key(bytes([number]) * 32)]), ok=True)
        hierarchy.poll()
    assert hierarchy.traffic()["ssd"].write_breaker == "open"
    assert hierarchy.find_prefix([pack_key(bytes([3]) * 32)]).tiers == ["ssd"]
    assert hierarchy.close(1.0)


@pytest.mark.parametrize("faults", ["store:error=1", "store:hang=1"])
def test_a_flush_into_a_store_that_takes_nothing(faults: str) -> None:
    """It took all the time it was given, asking a hundred times a second."""
    clock = VirtualClock()
    with virtual_time(clock, random.Random(1)):
        hierarchy = faulty_hierarchy(faults)
        names = [pack_key(bytes([i]) * 32) for i in range(100, 110)]
        hierarchy.end_store(hierarchy.begin_store(names), ok=True)
        began, really_began = clock.now, time.monotonic()
        assert not hierarchy.flush(300.0)
        assert clock.now - began < 10.0
        assert time.monotonic() - really_began < 5.0
        assert hierarchy.close(1.0)


def prefetching_hierarchy() -> tuple[Hierarchy, PrefetchingStore]:
    """A slab over a store that is far away."""
    layout = BlockLayout(1, 4, 1, 8, "float32")
    store = PrefetchingStore(layout, 1000 * layout.page_bytes, name="remote")
    slab = CpuSlab(layout, 32 * layout.slot_bytes, populate_threads=1)
    return Hierarchy(slab, [store], wakeup=lambda: None), store


def test_a_prompt_that_is_asked_about_sooner_than_the_answer_comes() -> None:
    """`Lookups` remembered what it had found before the question, which the question did not
    change: the request computed everything unless the answer came before the next step."""
    hierarchy, store = prefetching_hierarchy()
    side = OffloadScheduler(ConnectorContext(hierarchy, Parts(4), CopySignal(), choice=Choice.LOAD))
    asks = SimpleNamespace(
        request_id="a", block_hashes=[bytes([1]) * 32], tail_hash=None, num_tokens=5
    )
    buffer = memoryview(bytearray(store.layout.page_bytes))
    store.store([pack_key(asks.block_hashes[0])], [buffer]).result(0)
    side.request_queued(asks)
    assert side.get_matched_tokens(asks, 0).kind is MatchKind.RETRY
    store.answer()
    assert side.has_pending_work()
    assert side.get_matched_tokens(asks, 0) == Match(4, MatchKind.LOAD)
    side.shutdown(5.0)


def test_blocks_that_are_computed_while_a_store_is_asked_for_them() -> None:
    """Write-back took the open question for a store under way, and never wrote the blocks."""
    hierarchy, store = prefetching_hierarchy()
    names = [pack_key(bytes([number]) * 32) for number in range(3)]
    assert hierarchy.prefetch_lookup(names)
    hierarchy.end_store(hierarchy.begin_store(names), ok=True)
    hierarchy.poll()
    store.answer()
    hierarchy.poll()
    assert store.lookup(names) == [Answer.HIT] * 3
    assert hierarchy.close(5.0)


def test_a_server_tells_of_tiers_that_have_no_size(caplog: pytest.LogCaptureFixture) -> None:
    """`stratakv serve --kv-offload cpu,grpc://…` ended where it said which tiers it has."""
    caplog.set_level(logging.INFO)
    config = engine_config(EMBEDDED_MODEL, {"kv_offload": "cpu,grpc://host:9400"})
    ready = Ready(PROTOCOL_VERSION, 64, 100, 10, 16, [])
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        _tell_start(config, ServerConfig(), ready, sock)
    assert "tiers below the pool: cpu 4GiB, grpc://host:9400" in caplog.messages
