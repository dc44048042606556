# SPDX-License-Identifier: Apache-2.0
"""The contract of `CopyDevice`, run over every device there is.

A device joins by a row in `HARNESSES`: how to make it, a pool for it, and a gate, which is an
event of that device that ends when the test says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch

from stratakv.connector.device.base import CopyDevice, DeviceError, Event, Stream
from stratakv.connector.device.cpu import CpuCopyDevice, CpuEvent
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.cpu import CpuSlab
from stratakv.tiers.errors import InvalidBlock

LAYOUT = BlockLayout(2, 4, 1, 24, "bfloat16")  # 768 bytes: a page shorter than its slot
NUM_BLOCKS = 12
NUM_SLOTS = 16
WAIT_SECONDS = 10.0


class Gate(NamedTuple):
    """An event, and what ends it."""

    event: Event
    open: Callable[[], None]


class CpuHarness:
    """The CPU device and its surroundings."""

    name = "cpu"

    def device(self) -> CopyDevice:
        return CpuCopyDevice()

    def pool(self, dtype: torch.dtype) -> torch.Tensor:
        shape = (NUM_BLOCKS, LAYOUT.num_layers, 2, LAYOUT.block_size, 1, LAYOUT.head_dim)
        return torch.randint(-99, 99, shape).to(dtype)

    def gate(self) -> Gate:
        event = CpuEvent()
        return Gate(event, event.end)


HARNESSES = [CpuHarness()]


class Rig:
    """A device with a pool of random bytes and an empty slab."""

    def __init__(self, harness: CpuHarness) -> None:
        self.slab = CpuSlab(LAYOUT, NUM_SLOTS * LAYOUT.slot_bytes, populate_threads=1)
        self.device = harness.device()
        self.notified = 0
        self.device.set_notify(self._count)
        self.pool = harness.pool(torch.bfloat16)
        self.device.register_slab(self.slab)
        self.device.register_pool(self.pool)
        self.gate = harness.gate

    def block(self, block_id: int) -> bytes:
        return bytes(self.pool[block_id].cpu().contiguous().view(torch.uint8).flatten().tolist())

    def slot(self, slot: int) -> bytes:
        return bytes(self.slab.buffer(slot)[: LAYOUT.page_bytes])

    def fill(self, slot: int, value: int) -> bytes:
        page = bytes([value]) * LAYOUT.page_bytes
        self.slab.buffer(slot)[: LAYOUT.page_bytes] = page
        return page

    def copy(self, stream: Stream, pairs: dict[int, int], *after: Event) -> Event:
        return self.device.copy(stream, list(pairs), list(pairs.values()), after)

    def _count(self) -> None:
        self.notified += 1


@pytest.fixture(params=HARNESSES, ids=lambda harness: harness.name)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    assert rig.device.close(WAIT_SECONDS)
    rig.slab.close()


def assert_ended(event: Event) -> None:
    assert event.wait(WAIT_SECONDS)
    assert event.done()
    assert event.error() is None


def test_blocks_go_out_and_come_back(rig: Rig) -> None:
    before = [rig.block(i) for i in range(NUM_BLOCKS)]
    # Runs on both sides, neighbours on one side only, and single blocks.
    pairs = {0: 3, 1: 4, 2: 5, 7: 6, 4: 9, 3: 10, 11: 0}
    assert_ended(rig.copy(Stream.STORE, pairs))
    assert {b: rig.slot(s) for b, s in pairs.items()} == {b: before[b] for b in pairs}
    rig.pool.zero_()
    back = {10 - b if b < 11 else 11: s for b, s in pairs.items()}
    assert_ended(rig.copy(Stream.LOAD, back))
    for block_id, slot in back.items():
        assert rig.block(block_id) == rig.slot(slot)
    untouched = set(range(NUM_BLOCKS)) - set(back)
    assert all(not any(rig.block(i)) for i in untouched)


def test_the_rest_of_a_slot_is_left_alone(rig: Rig) -> None:
    rig.slab.buffer(1)[LAYOUT.page_bytes :] = b"x" * (LAYOUT.slot_bytes - LAYOUT.page_bytes)
    assert_ended(rig.copy(Stream.STORE, {0: 0, 1: 1, 2: 2}))
    assert set(bytes(rig.slab.buffer(1)[LAYOUT.page_bytes :])) == {ord("x")}


def test_a_copy_waits_for_its_events_and_reads_what_they_left(rig: Rig) -> None:
    gates = [rig.gate(), rig.gate()]
    event = rig.copy(Stream.STORE, {2: 2}, *(gate.event for gate in gates))
    assert not event.wait(0.02)
    gates[0].open()
    assert not event.wait(0.02)
    assert not any(rig.slot(2))
    rig.pool[2] = 42  # the last writer is late
    gates[1].open()
    assert_ended(event)
    assert rig.slot(2) == rig.block(2)


def test_a_stream_runs_in_order_behind_a_slow_job(rig: Rig) -> None:
    gate = rig.gate()
    first = rig.fill(0, 1)
    second = rig.fill(1, 2)
    slow = rig.copy(Stream.LOAD, {5: 0}, gate.event)
    quick = rig.copy(Stream.LOAD, {5: 1})
    assert not quick.wait(0.02)
    assert rig.block(5) not in (first, second)
    gate.open()
    assert_ended(quick)
    assert slow.done()
    assert rig.block(5) == second


def test_streams_do_not_wait_for_each_other_unasked(rig: Rig) -> None:
    gate = rig.gate()
    stuck = rig.copy(Stream.STORE, {0: 0}, gate.event)
    page = rig.fill(1, 7)
    assert_ended(rig.copy(Stream.LOAD, {1: 1}))
    assert rig.block(1) == page
    gate.open()
    assert_ended(stuck)


def test_a_block_is_reused_only_after_its_store(rig: Rig) -> None:
    """The load into a block that is being stored waits for the store's event."""
    old, new = rig.block(4), rig.fill(9, 9)
    gate = rig.gate()
    store = rig.copy(Stream.STORE, {4: 8}, gate.event)
    load = rig.copy(Stream.LOAD, {4: 9}, store)
    assert not load.wait(0.02)
    assert rig.block(4) == old
    gate.open()
    assert_ended(load)
    assert rig.slot(8) == old
    assert rig.block(4) == new


def test_the_writer_event_ends_without_help(rig: Rig) -> None:
    rig.pool[0] = 5
    assert_ended(rig.copy(Stream.STORE, {0: 0}, rig.device.writer_event()))
    assert rig.slot(0) == rig.block(0)


def test_every_end_is_announced(rig: Rig) -> None:
    events = [rig.copy(Stream.STORE, {i: i}) for i in range(5)]
    assert all(event.wait(WAIT_SECONDS) for event in events)
    deadline = time.monotonic() + WAIT_SECONDS
    while rig.notified < 5 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert rig.notified == 5


@pytest.mark.parametrize(
    ("block_ids", "slots"),
    [([NUM_BLOCKS], [0]), ([-1], [0]), ([0], [NUM_SLOTS]), ([0], [-1]), ([0, 1], [0])],
)
def test_pairs_that_cannot_be_are_refused(rig: Rig, block_ids: list[int], slots: list[int]) -> None:
    for stream in Stream:
        with pytest.raises(InvalidBlock):
            rig.device.copy(stream, block_ids, slots)


def test_a_pool_of_another_shape_is_refused(rig: Rig) -> None:
    with pytest.raises(InvalidBlock, match="768"):
        rig.device.register_pool(torch.zeros(4, 100))
    with pytest.raises(InvalidBlock, match="contiguous"):
        rig.device.register_pool(rig.pool.transpose(0, 1))


def test_close_lets_queued_copies_end(rig: Rig) -> None:
    gate = rig.gate()
    event = rig.copy(Stream.STORE, {1: 1}, gate.event)
    assert not rig.device.close(0.02)
    with pytest.raises(DeviceError):
        rig.copy(Stream.STORE, {0: 0})
    threading.Timer(0.02, gate.open).start()
    assert rig.device.close(WAIT_SECONDS)
    assert_ended(event)
    assert rig.slot(1) == rig.block(1)


def test_copies_at_once_in_both_streams_keep_every_byte(rig: Rig) -> None:
    """Each block goes round: out, then in at another place, 200 times, ordered by events alone."""
    expected = [rig.block(i) for i in range(NUM_BLOCKS)]
    stored: Event | None = None
    loaded: Event | None = None
    for turn in range(200):
        slots = [(turn + i) % NUM_SLOTS for i in range(NUM_BLOCKS)]
        stored = rig.device.copy(Stream.STORE, range(NUM_BLOCKS), slots, [loaded] if loaded else [])
        turned = [(i + 1) % NUM_BLOCKS for i in range(NUM_BLOCKS)]
        loaded = rig.device.copy(Stream.LOAD, turned, slots, [stored])
    assert loaded is not None
    assert_ended(loaded)
    shift = 200 % NUM_BLOCKS
    assert [rig.block((i + shift) % NUM_BLOCKS) for i in range(NUM_BLOCKS)] == expected
