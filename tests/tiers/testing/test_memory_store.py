# SPDX-License-Identifier: Apache-2.0
"""The memory store keeps the promise of a store, and fails the way a test asks it to."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from stratakv.tiers.base import Answer, Stored, TierStats
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.errors import TierBusy, TierClosed, TierConfigError
from stratakv.tiers.testing.memory_store import MemoryStore

from ..blocks import ODD, SMALL, filled_buffers, make_buffers, make_keys
from ..store_contract import SECONDS, check_store, fetch, put


@pytest.mark.parametrize("layout", [SMALL, ODD], ids=["whole-pages", "odd"])
@pytest.mark.parametrize("delay", [0.0, 0.003], ids=["at-once", "delayed"])
def test_contract(layout: BlockLayout, delay: float) -> None:
    check_store(MemoryStore(layout, 64 * layout.page_bytes, fault=lambda _op, _keys: delay))


def test_capacity_is_a_bound_and_the_least_recently_used_leaves() -> None:
    store = MemoryStore(SMALL, 4 * SMALL.page_bytes)
    keys = make_keys(6)
    put(store, keys[:4])
    fetch(store, keys[:1])  # the oldest is used again
    put(store, keys[4:])
    assert store.stats().used_bytes == store.stats().capacity_bytes
    assert store.stats().evicted_blocks == 2
    # Of the first batch the tail is colder than its head.
    hits = [answer is Answer.HIT for answer in store.lookup(keys)]
    assert hits == [True, True, False, False, True, True]


def test_a_batch_beyond_the_capacity_keeps_the_last_blocks() -> None:
    store = MemoryStore(SMALL, 2 * SMALL.page_bytes)
    keys = make_keys(5)
    assert put(store, keys) == [True] * 5
    assert store.stats().blocks == 2


def test_too_small_for_one_block_is_refused() -> None:
    with pytest.raises(TierConfigError, match="at least 4KiB for one block, not 4095 bytes"):
        MemoryStore(SMALL, SMALL.page_bytes - 1)


def test_a_fault_is_raised_by_the_chosen_call_and_changes_nothing() -> None:
    def busy(op: str, keys: Sequence[bytes]) -> float | None:
        if op == "store" and len(keys) == 2:
            raise TierBusy("as asked")
        return None

    store = MemoryStore(SMALL, 8 * SMALL.page_bytes, fault=busy)
    keys = make_keys(2)
    with pytest.raises(TierBusy):
        store.store(keys, filled_buffers(keys, SMALL))
    assert store.lookup(keys) == [Answer.MISS] * 2
    assert put(store, keys[:1]) == [True]


def test_a_delay_leaves_the_store_pending_and_the_caller_free() -> None:
    delays = [0.1, 600.0]
    store = MemoryStore(
        SMALL, 8 * SMALL.page_bytes, fault=lambda op, _k: delays.pop() if op == "store" else None
    )
    late, soon = make_keys(2)
    began = time.monotonic()
    future = store.store([late], filled_buffers([late], SMALL))
    assert store.lookup([late]) == [Answer.PENDING]
    assert not future.done()
    assert time.monotonic() - began < 300.0
    began = time.monotonic()
    assert store.store([soon], filled_buffers([soon], SMALL)).result(SECONDS) == [Stored.KEPT]
    assert time.monotonic() - began >= 0.1
    assert store.lookup([soon]) == [Answer.HIT]
    store.close(0.0)


def test_close_ends_delayed_calls_and_leaves_their_buffers_alone() -> None:
    store = MemoryStore(SMALL, 8 * SMALL.page_bytes)
    keys = make_keys(1)
    put(store, keys)
    store.fault = lambda _op, _keys: 600.0
    buffers = make_buffers(1, SMALL)
    future = store.load(keys, buffers)
    timer = store._delayed[future]
    began = time.monotonic()
    store.close(0.05)
    assert time.monotonic() - began < 300.0
    with pytest.raises(TierClosed):
        future.result(0)
    timer.function(*timer.args, **timer.kwargs)  # it went off at the last moment
    assert bytes(buffers[0]) == bytes(SMALL.slot_bytes)


def test_a_copy_of_statistics_no_longer_changes() -> None:
    stats = TierStats(blocks=1, errors={"busy": 1})
    copied = stats.copy()
    stats.blocks += 1
    stats.errors["busy"] += 1
    stats.rejected["key"] = 1
    assert copied == TierStats(blocks=1, errors={"busy": 1})
