# SPDX-License-Identifier: Apache-2.0
"""The index of a slab: what another process sees of it, and what it keeps from being evicted."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from stratakv.tiers.contract import make_keys
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.slab.slab_index import MAX_HOLD_SECONDS, SlabIndex, SlabReader
from stratakv.tiers.tag import Proof

SLOTS = 8
LATER = 60.0


def proof_of(key: bytes) -> Proof:
    return Proof(key[:16], key[16:32])


@pytest.fixture
def index() -> Iterator[SlabIndex]:
    made = SlabIndex(SLOTS)
    yield made
    made.close()


@pytest.fixture
def reader(index: SlabIndex) -> Iterator[SlabReader]:
    made = SlabReader(index.fd, SLOTS, share=0.5)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(40))
def test_reader_sees_what_the_slab_holds(index: SlabIndex, reader: SlabReader, seed: int) -> None:
    rng = random.Random(seed)
    keys = make_keys(12)
    slots: dict[int, bytes] = {}  # what the slab holds
    told: set[bytes] = set()  # what somebody believes who heard of all changes
    for _ in range(400):
        slot, key = rng.randrange(SLOTS), rng.choice(keys)
        if rng.random() < 0.01:
            index.clear()
            slots.clear()
        elif slot in slots:
            index.retract(slot)
            del slots[slot]
        elif key not in slots.values():
            index.publish(slot, key, proof_of(key))
            slots[slot] = key
        # Often enough for single changes, seldom enough for the journal to come round.
        if rng.random() < (0.3 if seed % 2 else 0.002):
            changes = reader.refresh()
            told = told.difference(changes.removed).union(changes.stored)
            assert told == set(slots.values())
            assert reader.lookup(keys) == [key in told for key in keys]
    reader.refresh()
    now = time.monotonic()
    for key in keys:
        (found,) = reader.acquire_blocks([key], now + LATER)
        assert (found is not None) == (key in slots.values())
        if found is not None:
            assert slots[found.slot] == key
            assert found.proof == proof_of(key)
            assert index.is_held(found.slot)
            reader.release_slots([found.slot])
            assert not index.is_held(found.slot)


def test_reader_that_comes_late_or_misses_a_round_sees_all(index: SlabIndex) -> None:
    first, second = make_keys(2)
    index.publish(3, first, proof_of(first))
    reader = SlabReader(index.fd, SLOTS, share=1.0)
    assert reader.refresh().stored == [first]
    for _ in range(2000):  # more than the journal has entries
        index.retract(3)
        index.publish(3, second, proof_of(second))
    changes = reader.refresh()
    assert (changes.stored, changes.removed) == ([second], [first])
    assert not reader.refresh().stored
    reader.close()


def test_block_that_went_since_the_last_look_is_not_held(
    index: SlabIndex, reader: SlabReader
) -> None:
    first, second = make_keys(2)
    index.publish(0, first, proof_of(first))
    reader.refresh()
    index.retract(0)
    index.publish(0, second, proof_of(second))
    assert reader.acquire_blocks([first], time.monotonic() + LATER) == [None]
    assert not index.is_held(0)
    assert not reader.is_still(first, 0)
    assert reader.is_still(second, 0)


def test_holds_have_a_share_and_an_end(index: SlabIndex, reader: SlabReader) -> None:
    keys = make_keys(SLOTS)
    for slot, key in enumerate(keys):
        index.publish(slot, key, proof_of(key))
    reader.refresh()
    now = time.monotonic()
    found = reader.acquire_blocks(keys, now + LATER)
    assert [each is not None for each in found] == [True] * 4 + [False] * 4
    # One that is held already may be held again.
    (again,) = reader.acquire_blocks(keys[:1], now + LATER)
    assert again is not None
    reader.release_slots([again.slot])
    assert index.is_held(again.slot)
    reader.release_slots([each.slot for each in found if each is not None])
    assert not any(map(index.is_held, range(SLOTS)))
    # Nothing is held for ever, whatever the other process writes there.
    reader.acquire_blocks(keys[:1], now - 1)
    reader.acquire_blocks(keys[1:2], now + 2 * MAX_HOLD_SECONDS)
    assert not any(map(index.is_held, range(SLOTS)))


def test_what_a_dead_process_held_is_free_again(index: SlabIndex, reader: SlabReader) -> None:
    (key,) = make_keys(1)
    index.publish(0, key, proof_of(key))
    reader.refresh()
    reader.acquire_blocks([key], time.monotonic() + LATER)
    index.release_all()
    assert not index.is_held(0)
    reader.acquire_blocks([key], time.monotonic() + LATER)
    SlabReader(index.fd, SLOTS, share=0.5).close()  # the next one begins with nothing
    assert not index.is_held(0)


def test_record_that_is_being_written_is_nothing(index: SlabIndex, reader: SlabReader) -> None:
    (key,) = make_keys(1)
    index.publish(0, key, proof_of(key))
    at = index._shape.record_at(0)
    sequence = index._memory[at]
    index._memory[at] = sequence - 1  # its writer was stopped in the middle
    assert not reader.refresh().stored
    index._memory[at] = sequence
    index._append_journal(0)
    assert reader.refresh().stored == [key]


def test_index_of_another_slab_is_refused(index: SlabIndex) -> None:
    with pytest.raises((TierConfigError, ValueError)):
        SlabReader(index.fd, SLOTS - 1, share=0.5)
