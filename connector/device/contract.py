# SPDX-License-Identifier: Apache-2.0
"""The contract of `connector/device/base.py` as checks that any copy device has to pass.

A test of a new device, perhaps outside this project, subclasses `Surroundings` and calls
`check_device_contract`, or calls each check in `CHECKS` on a new `Rig`. The checks copy real bytes.
A check raises ContractBroken, which names the fault."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from ...tiers.block import BlockLayout
from ...tiers.errors import InvalidBlock
from ...tiers.tag import payload_digest
from .base import DeviceError, Event, Stream
from .contract_rig import (
    LAYOUTS,
    MOMENT_SECONDS,
    NUM_BLOCKS,
    NUM_SLOTS,
    WAIT_SECONDS,
    ContractBroken,
    Rig,
    Surroundings,
    expect,
    expect_end,
)

TURNS = 100


def check_device_contract(surroundings: Surroundings) -> None:
    """Run all checks, on a new device for each check and layout."""
    for layout in LAYOUTS:
        for check in CHECKS:
            with contextlib.closing(Rig(surroundings, layout)) as rig:
                check(rig)


def blocks_go_out_and_come_back(rig: Rig) -> None:
    """Copies work for blocks that are neighbours in both pool and slab, in one, or in neither."""
    before = [rig.block(i) for i in range(NUM_BLOCKS)]
    pairs = {0: 3, 1: 4, 2: 5, 7: 6, 4: 9, 3: 10, 11: 0}
    expect_end(rig.queue_copy(Stream.STORE, pairs))
    for block_id, slot in pairs.items():
        expect(rig.slot(slot) == before[block_id], f"block {block_id} is in slot {slot}")
    rig.pool.zero_()
    rig.surroundings.settle()
    back = {10 - block if block < 11 else 11: slot for block, slot in pairs.items()}
    expect_end(rig.queue_copy(Stream.LOAD, back))
    for block_id, slot in back.items():
        expect(rig.block(block_id) == rig.slot(slot), f"slot {slot} is in block {block_id}")
    for block_id in set(range(NUM_BLOCKS)) - set(back):
        expect(not any(rig.block(block_id)), f"block {block_id} is left alone")


def many_blocks_go_at_once(rig: Rig) -> None:
    """A copy moves all blocks: to neighbouring slots, or in reverse order to scattered slots."""
    before = [rig.block(i) for i in range(NUM_BLOCKS)]
    forwards = {i: i for i in range(NUM_BLOCKS)}
    scattered = {i: NUM_SLOTS - 1 - 2 * i for i in reversed(range(NUM_BLOCKS))}
    for pairs in (forwards, scattered):
        expect_end(rig.queue_copy(Stream.STORE, pairs))
        for block_id, slot in pairs.items():
            expect(rig.slot(slot) == before[block_id], f"block {block_id} is in slot {slot}")
    rig.pool.zero_()
    rig.surroundings.settle()
    expect_end(rig.queue_copy(Stream.LOAD, scattered))
    expect([rig.block(i) for i in range(NUM_BLOCKS)] == before, "all blocks have come back")


def stores_have_digests(rig: Rig) -> None:
    """A store has the digests of its slots' bytes, in the store's order; a load has no digests."""
    rig.device.make_digests()
    pairs = {4: 9, 3: 10, 11: 0}
    event = rig.queue_copy(Stream.STORE, pairs)
    expect_end(event)
    there = [payload_digest(rig.slot(slot)) for slot in pairs.values()]
    expect(rig.device.digests(event) == there, "a store has the digests of its slots")
    event = rig.queue_copy(Stream.LOAD, pairs)
    expect_end(event)
    expect(rig.device.digests(event) is None, "a load has no digests")


def the_rest_of_a_slot_is_left_alone(rig: Rig) -> None:
    """A store does not change the bytes of a slot after the page."""
    behind = slice(rig.layout.page_bytes, None)
    length = rig.layout.slot_bytes - rig.layout.page_bytes
    rig.slab.buffer(1)[behind] = b"x" * length
    expect_end(rig.queue_copy(Stream.STORE, {0: 0, 1: 1, 2: 2}))
    expect(bytes(rig.slab.buffer(1)[behind]) == b"x" * length, "bytes behind a page stay")


def a_copy_waits_for_its_events(rig: Rig) -> None:
    """A copy reads its source only after all events in `after`."""
    gates = [rig.gate(), rig.gate()]
    event = rig.queue_copy(Stream.STORE, {2: 2}, *(gate.event for gate in gates))
    expect(not event.wait(MOMENT_SECONDS), "a copy waits for both of its events")
    gates[0].open()
    expect(not event.wait(MOMENT_SECONDS), "a copy waits for the second of its events")
    expect(not any(rig.slot(2)), "nothing is written before")
    page = rig.write(2, 42)  # the last writer of the block is late
    gates[1].open()
    expect_end(event)
    expect(rig.slot(2) == page, "a copy reads what the events have left")


def a_load_waits_for_its_events(rig: Rig) -> None:
    """A load reads its slots only after all events in `after`."""
    gate = rig.gate()
    rig.fill(3, 1)
    event = rig.queue_copy(Stream.LOAD, {6: 3}, gate.event)
    expect(not event.wait(MOMENT_SECONDS), "a load waits for its event")
    page = rig.fill(3, 2)
    gate.open()
    expect_end(event)
    expect(rig.block(6) == page, "a load reads what the event has left")


def a_stream_runs_in_order(rig: Rig) -> None:
    """A copy does not overtake an earlier copy of its stream that waits for an event."""
    gate = rig.gate()
    first, second = rig.fill(0, 1), rig.fill(1, 2)
    slow = rig.queue_copy(Stream.LOAD, {5: 0}, gate.event)
    quick = rig.queue_copy(Stream.LOAD, {5: 1})
    expect(not quick.wait(MOMENT_SECONDS), "a job waits for the one before")
    expect(rig.block(5) not in (first, second), "neither has run")
    gate.open()
    expect_end(quick)
    expect(slow.done(), "the one before has ended")
    expect(rig.block(5) == second, "the last one is seen")


def streams_do_not_wait_unasked(rig: Rig) -> None:
    """A stuck store does not delay a load whose `after` lacks the store's event."""
    gate = rig.gate()
    stuck = rig.queue_copy(Stream.STORE, {0: 0}, gate.event)
    page = rig.fill(1, 7)
    expect_end(rig.queue_copy(Stream.LOAD, {1: 1}))
    expect(rig.block(1) == page, "the load has run")
    gate.open()
    expect_end(stuck)


def a_block_is_reused_after_its_store(rig: Rig) -> None:
    """A load with a store's event in `after` overwrites the block only after the store."""
    old, new = rig.block(4), rig.fill(9, 9)
    gate = rig.gate()
    store = rig.queue_copy(Stream.STORE, {4: 8}, gate.event)
    load = rig.queue_copy(Stream.LOAD, {4: 9}, store)
    expect(not load.wait(MOMENT_SECONDS), "a load waits for the store")
    expect(rig.block(4) == old, "the block is still there")
    gate.open()
    expect_end(load)
    expect(rig.slot(8) == old, "the store has read the old block")
    expect(rig.block(4) == new, "the load has written the new one")


def a_slot_is_read_after_its_store(rig: Rig) -> None:
    """A load with a store's event in `after` reads the slot only after the store."""
    page = rig.block(3)
    gate = rig.gate()
    store = rig.queue_copy(Stream.STORE, {3: 7}, gate.event)
    load = rig.queue_copy(Stream.LOAD, {10: 7}, store)
    gate.open()
    expect_end(load)
    expect(rig.block(10) == page, "the load has read what the store brought")


def the_writer_event_ends_without_help(rig: Rig) -> None:
    """The writer event ends once the computing that was queued before it has run."""
    rig.surroundings.write(rig.pool, 0, 5)
    event = rig.device.writer_event()
    expect_end(rig.queue_copy(Stream.STORE, {0: 0}, event))
    expect(event.wait(WAIT_SECONDS) and event.error() is None, "the writer event ends well")
    expect(event.seconds() == 0.0, "the writer event is no copy")
    expect(rig.slot(0) == rig.block(0), "the store has read what was written")


def what_computes_is_held(rig: Rig) -> None:
    """Computing queued after `hold_compute` runs after the store."""
    gate = rig.gate()
    old = rig.block(2)
    store = rig.queue_copy(Stream.STORE, {2: 2}, gate.event)
    threading.Timer(MOMENT_SECONDS, gate.open).start()
    late = rig.device.hold_compute([store], WAIT_SECONDS)
    expect(late == [], "a store that ends is waited for")
    rig.surroundings.write(rig.pool, 2, 77)
    rig.surroundings.settle()
    expect_end(store)
    expect(rig.slot(2) == old, "the store has read the block from before")


def every_end_is_announced(rig: Rig) -> None:
    """The device calls `notify` once after the end of each copy."""
    events = [rig.queue_copy(Stream.STORE, {i: i}) for i in range(5)]
    for event in events:
        expect_end(event)
    deadline = time.monotonic() + WAIT_SECONDS
    while rig.notified < len(events) and time.monotonic() < deadline:
        time.sleep(MOMENT_SECONDS / 20)
    expect(rig.notified == len(events), f"5 ends are announced, not {rig.notified}")


def pairs_that_cannot_be_are_refused(rig: Rig) -> None:
    """A copy with wrong block or slot numbers raises InvalidBlock; an empty copy ends well."""
    wrong = [([NUM_BLOCKS], [0]), ([-1], [0]), ([0], [NUM_SLOTS]), ([0], [-1]), ([0, 1], [0])]
    for stream in Stream:
        for block_ids, slots in wrong:
            with _raises(InvalidBlock, f"blocks {block_ids} and slots {slots} are refused"):
                rig.device.copy(stream, block_ids, slots)
    expect_end(rig.device.copy(Stream.STORE, [], []))


def a_pool_of_another_shape_is_refused(rig: Rig) -> None:
    """Pools of another block size and strided pools are refused, with the reason in the error."""
    other = BlockLayout(3, 4, 1, 24, "bfloat16")
    with _raises(InvalidBlock, "a pool with other blocks is refused", str(other.page_bytes)):
        rig.device.register_pool(rig.surroundings.pool(4, other))
    with _raises(InvalidBlock, "a pool that is not contiguous is refused", "contiguous"):
        rig.device.register_pool(rig.pool.transpose(0, 1))


def close_lets_queued_copies_end(rig: Rig) -> None:
    """`close` waits for queued copies, and the device refuses new copies."""
    gate = rig.gate()
    event = rig.queue_copy(Stream.STORE, {1: 1}, gate.event)
    expect(not rig.device.close(MOMENT_SECONDS), "a device with a stuck copy says so")
    with _raises(DeviceError, "a device that is being closed takes nothing"):
        rig.queue_copy(Stream.STORE, {0: 0})
    threading.Timer(MOMENT_SECONDS, gate.open).start()
    expect(rig.device.close(WAIT_SECONDS), "it closes when the copy has ended")
    expect_end(event)
    expect(rig.slot(1) == rig.block(1), "the copy has ended well")


def copies_at_once_keep_every_byte(rig: Rig) -> None:
    """All blocks are stored and loaded to other blocks many times, ordered by events alone."""
    expected = [rig.block(i) for i in range(NUM_BLOCKS)]
    stored: Event | None = None
    loaded: Event | None = None
    for turn in range(TURNS):
        slots = [(turn + i) % NUM_SLOTS for i in range(NUM_BLOCKS)]
        stored = rig.device.copy(Stream.STORE, range(NUM_BLOCKS), slots, [loaded] if loaded else [])
        turned = [(i + 1) % NUM_BLOCKS for i in range(NUM_BLOCKS)]
        loaded = rig.device.copy(Stream.LOAD, turned, slots, [stored])
    assert loaded is not None
    expect_end(loaded)
    shift = TURNS % NUM_BLOCKS
    seen = [rig.block((i + shift) % NUM_BLOCKS) for i in range(NUM_BLOCKS)]
    expect(seen == expected, "every block has come round whole")


CHECKS: tuple[Callable[[Rig], None], ...] = (
    blocks_go_out_and_come_back,
    many_blocks_go_at_once,
    stores_have_digests,
    the_rest_of_a_slot_is_left_alone,
    a_copy_waits_for_its_events,
    a_load_waits_for_its_events,
    a_stream_runs_in_order,
    streams_do_not_wait_unasked,
    a_block_is_reused_after_its_store,
    a_slot_is_read_after_its_store,
    the_writer_event_ends_without_help,
    what_computes_is_held,
    every_end_is_announced,
    pairs_that_cannot_be_are_refused,
    a_pool_of_another_shape_is_refused,
    close_lets_queued_copies_end,
    copies_at_once_keep_every_byte,
)


@contextlib.contextmanager
def _raises(kind: type[Exception], what: str, text: str = "") -> Iterator[None]:
    try:
        yield
    except kind as error:
        expect(text in str(error), f"{what} with {text!r} in the message, not {error}")
    else:
        raise ContractBroken(f"expected that {what}")
