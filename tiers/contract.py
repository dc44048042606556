# SPDX-License-Identifier: Apache-2.0
"""Checks of the contracts in `tiers/base.py`, for any implementation.

Authors of tiers, also in other packages, call `check_store_contract` or `check_slab_contract` on an
empty, open tier with room for 16 blocks or more. The check stores and loads real blocks, waits for
the answers, closes the tier, and raises ContractBroken at the first violation."""

from __future__ import annotations

import hashlib
import mmap
import random
from collections.abc import Callable, Sequence
from typing import Any

from .base import Answer, SlabTier, Stored, StoreTier, TierStats
from .block import BlockLayout, pack_key
from .errors import InvalidBlock, TierClosed
from .tag import Proof, Tagger, payload_digest

SECONDS = 10.0  # the longest wait for an answer
BLOCKS = 8


class ContractBroken(AssertionError):
    """Raised if a tier violates its contract. The message has the expected and the actual value."""


def check_store_contract(store: StoreTier) -> None:
    """Check every guarantee of `StoreTier` that a single thread can observe."""
    _keeps_what_it_is_given(store)
    _answers_in_the_order_of_the_keys(store)
    _carries_tags(store)
    _leaves_the_padding_alone(store)
    _takes_a_key_twice(store)
    _drops_and_clears(store)
    _refuses_what_cannot_be_right(store)
    _takes_empty_calls(store)
    _store_closes(store)


def check_slab_contract(slab: SlabTier) -> None:
    """Check every guarantee of `SlabTier` that a single thread can observe."""
    _cuts_its_memory_into_slots(slab)
    _pairs_reserve_and_commit(slab)
    _never_takes_a_pinned_slot(slab)
    _forgets_what_is_idle(slab)
    _slab_closes(slab)


def make_keys(count: int, salt: str = "") -> list[bytes]:
    """Make `count` keys, which are equal in every run. A different `salt` gives different keys."""
    return [pack_key(hashlib.sha256(f"{salt}/{i}".encode()).digest()) for i in range(count)]


def payload_of(key: bytes, layout: BlockLayout) -> bytes:
    return random.Random(key).randbytes(layout.page_bytes)  # noqa: S311 - bytes of no secrecy


def make_buffers(count: int, layout: BlockLayout) -> list[memoryview]:
    size = layout.slot_bytes
    memory = memoryview(mmap.mmap(-1, max(1, count) * size))
    return [memory[i * size : (i + 1) * size] for i in range(count)]


def filled_buffers(keys: Sequence[bytes], layout: BlockLayout) -> list[memoryview]:
    """Make one buffer for each key, filled with the key's payload."""
    buffers = make_buffers(len(keys), layout)
    for key, buffer in zip(keys, buffers, strict=True):
        buffer[: layout.page_bytes] = payload_of(key, layout)
    return buffers


def put(store: StoreTier, keys: Sequence[bytes]) -> list[bool]:
    """Store the payloads of `keys` and wait. Return for each block whether it was kept."""
    outcomes = store.store(keys, filled_buffers(keys, store.layout)).result(SECONDS)
    return [outcome is Stored.KEPT for outcome in outcomes]


def fetch(store: StoreTier, keys: Sequence[bytes]) -> list[bytes | None]:
    """Load blocks and return their payloads, None for a miss. Raises ContractBroken for wrong
    bytes."""
    buffers = make_buffers(len(keys), store.layout)
    proofs = store.load(keys, buffers).result(SECONDS)
    _expect("one answer for each key", len(keys), len(proofs))
    found: list[bytes | None] = []
    for key, proof, buffer in zip(keys, proofs, buffers, strict=True):
        if proof is None:
            found.append(None)
            continue
        payload = bytes(buffer[: store.layout.page_bytes])
        _expect("the digest of the bytes that came", payload_digest(payload), proof.digest)
        if payload != payload_of(key, store.layout):
            raise ContractBroken(f"a hit brought other bytes than were stored under {key.hex()}")
        found.append(payload)
    return found


def _keeps_what_it_is_given(store: StoreTier) -> None:
    keys = make_keys(BLOCKS)
    _expect("an empty store", [Answer.MISS] * BLOCKS, store.lookup(keys))
    _expect("nothing from an empty store", [None] * BLOCKS, fetch(store, keys))
    future = store.store(keys, filled_buffers(keys, store.layout))
    early = set(store.lookup(keys)) - {Answer.PENDING, Answer.HIT}
    _expect("blocks being stored to be PENDING or HIT", set(), early)
    _expect("all blocks kept", [Stored.KEPT] * BLOCKS, future.result(SECONDS))
    _expect("kept blocks to be found", [Answer.HIT] * BLOCKS, store.lookup(keys))
    _expect("no miss", 0, fetch(store, keys).count(None))
    stats = store.stats()
    _expect("blocks", BLOCKS, stats.blocks)
    _expect("stored and loaded blocks", (BLOCKS,) * 2, (stats.stored_blocks, stats.loaded_blocks))
    _expect("hits and misses", (BLOCKS, BLOCKS), (stats.hits, stats.misses))
    size = BLOCKS * store.layout.page_bytes
    _expect("stored and loaded bytes", (size, size), (stats.stored_bytes, stats.loaded_bytes))
    _check_room(stats)
    stats.errors["mine"] = 1
    _expect("statistics to be a copy", False, "mine" in store.stats().errors)


def _answers_in_the_order_of_the_keys(store: StoreTier) -> None:
    known, unknown = make_keys(BLOCKS), make_keys(BLOCKS, "unknown")
    mixed = [key for pair in zip(reversed(known), unknown, strict=True) for key in pair]
    expected = [Answer.HIT, Answer.MISS] * BLOCKS
    _expect("answers in the order of the keys", expected, store.lookup(mixed))
    found = [payload is not None for payload in fetch(store, mixed)]
    _expect("loads in the order of the keys", [True, False] * BLOCKS, found)


def _carries_tags(store: StoreTier) -> None:
    tagger = Tagger(store.layout.layout_id(), store.layout.page_bytes)
    keys = make_keys(3, "tagged")
    proofs = [tagger.prove(key, payload_of(key, store.layout)) for key in keys]
    buffers = filled_buffers(keys, store.layout)
    buffers[1][0] ^= 1
    outcomes = store.store(keys, buffers, [*proofs[:2], None]).result(SECONDS)
    expected = [Stored.KEPT, Stored.DAMAGED, Stored.KEPT]
    _expect("a block that is not what its proof says to be damaged", expected, outcomes)
    _expect("a damaged block not to be kept", Answer.MISS, store.lookup(keys)[1])
    found = store.load(keys, make_buffers(3, store.layout)).result(SECONDS)
    _expect("the proofs of all that was kept", [proofs[0], None, proofs[2]], found)
    store.drop(keys)


def _leaves_the_padding_alone(store: StoreTier) -> None:
    size = store.layout.page_bytes
    buffers = make_buffers(2, store.layout)
    for buffer in buffers:
        buffer[size:] = b"\xa5" * (len(buffer) - size)
    proofs = store.load(make_keys(2), buffers).result(SECONDS)
    _expect("two hits", 0, proofs.count(None))
    for buffer in buffers:
        untouched = bytes(buffer[size:]) == b"\xa5" * (len(buffer) - size)
        _expect("what lies behind a payload to stay", True, untouched)


def _takes_a_key_twice(store: StoreTier) -> None:
    stored = store.stats().stored_blocks
    _expect("a known block to be kept", [True], put(store, make_keys(1)))
    _expect("a known block not to be stored again", stored, store.stats().stored_blocks)
    twice = make_keys(1, "twice") * 2
    _expect("a key given twice to be kept", [True, True], put(store, twice))
    _expect("a key given twice to be stored once", stored + 1, store.stats().stored_blocks)
    _expect("no miss", 0, fetch(store, twice).count(None))


def _drops_and_clears(store: StoreTier) -> None:
    keys = make_keys(BLOCKS)
    _expect("three known blocks", 3, store.drop(keys[:3] + make_keys(2, "unknown")))
    _expect("nothing left to drop", 0, store.drop(keys[:3]))
    left = [Answer.MISS] * 3 + [Answer.HIT] * (BLOCKS - 3)
    _expect("dropped blocks to be misses", left, store.lookup(keys))
    _expect("dropped blocks not to be loaded", 3, fetch(store, keys).count(None))
    _expect("a dropped block to be stored again", [True] * 3, put(store, keys[:3]))
    _expect("no miss", 0, fetch(store, keys).count(None))
    store.clear()
    _expect("what was forgotten to stay so", True, store.wait_forgotten(SECONDS))
    _expect("a cleared store", [Answer.MISS] * BLOCKS, store.lookup(keys))
    _expect("a cleared store", BLOCKS, fetch(store, keys).count(None))
    _expect("a cleared store to go on", [True] * BLOCKS, put(store, keys))
    _expect("no miss", 0, fetch(store, keys).count(None))


def _refuses_what_cannot_be_right(store: StoreTier) -> None:
    keys, buffers = make_keys(2, "wrong"), make_buffers(2, store.layout)
    short = [buffers[0][: store.layout.page_bytes - 1]]
    for call in (store.load, store.store):
        _expect_error(InvalidBlock, "two keys with one buffer", call, keys, buffers[:1])
        _expect_error(InvalidBlock, "a buffer that is too short", call, keys[:1], short)
    _expect("refused blocks to be misses", [Answer.MISS] * 2, store.lookup(keys))


def _takes_empty_calls(store: StoreTier) -> None:
    _expect("no answers", [], store.lookup([]))
    _expect("no answers", [], store.load([], []).result(SECONDS))
    _expect("no answers", [], store.store([], []).result(SECONDS))
    _expect("nothing dropped", 0, store.drop([]))


def _store_closes(store: StoreTier) -> None:
    store.close(SECONDS)
    store.close(SECONDS)
    keys, buffers = make_keys(1), make_buffers(1, store.layout)
    for call in (store.load, store.store):
        _expect_error(TierClosed, "a call after close", call, keys, buffers)


def _cuts_its_memory_into_slots(slab: SlabTier) -> None:
    size = slab.layout.slot_bytes
    _expect("all slots free", slab.num_slots, slab.free_slots())
    _expect("the bytes of all slots", slab.num_slots * size, slab.memory().nbytes)
    slab.memory()[size] = 0x5A
    _expect("slots one after the other", 0x5A, slab.buffer(1)[0])
    _expect("the bytes of a slot", size, slab.buffer(0).nbytes)
    _expect_error(InvalidBlock, "a slot beyond the last", slab.buffer, slab.num_slots)


def _pairs_reserve_and_commit(slab: SlabTier) -> None:
    kept, refused = make_keys(2, "slab")
    slots = slab.reserve([kept, refused])
    _expect("two different slots", 2, len(set(slots) - {None}))
    _expect("reserved blocks", [Answer.PENDING] * 2, slab.lookup([kept, refused]))
    _expect("no slot for what is reserved", [None], slab.reserve([kept]))
    _expect("no pin on what is reserved", [None], slab.pin([kept]))
    slab.commit([kept, refused], [True, False])
    _expect("a kept and a refused block", [Answer.HIT, Answer.MISS], slab.lookup([kept, refused]))
    _expect("one slot in use", slab.num_slots - 1, slab.free_slots())
    _expect_error(InvalidBlock, "a commit of what is not reserved", slab.commit, [kept], [True])
    proof = Proof(b"t" * 16, b"d" * 16)
    tagged, late = make_keys(2, "proofs")
    slab.reserve([tagged, late])
    slab.commit([tagged], [True], [proof])
    _expect("what came with each block", [proof, None, None], slab.proofs([tagged, kept, refused]))
    free = slab.free_slots()
    withheld = slab.withhold([late])
    _expect("a withheld block to be a miss", [Answer.MISS], slab.lookup([late]))
    _expect("a withheld slot not to be free", free, slab.free_slots())
    slab.restore(withheld)
    _expect("a restored slot to be free", free + 1, slab.free_slots())
    _expect("nothing to be forgotten", None, slab.forget([late]))
    slab.reserve([late])
    slab.pin([tagged])
    slab.forget([tagged, late])
    _expect("a forgotten block not to be published", [], slab.commit([late], [True]))
    _expect("forgotten blocks to be misses", [Answer.MISS] * 2, slab.lookup([tagged, late]))
    slab.unpin([tagged])
    _expect("their slots to be free", free + 2, slab.free_slots())
    _expect("the block's slot", slots[:1], slab.pin([kept]))
    slab.unpin([kept])
    _expect_error(InvalidBlock, "an unpin of what is not pinned", slab.unpin, [kept])


def _never_takes_a_pinned_slot(slab: SlabTier) -> None:
    keys = make_keys(slab.num_slots, "fill")
    reserved = [k for k, s in zip(keys, slab.reserve(keys), strict=True) if s is not None]
    slab.commit(reserved, [True] * len(reserved))
    slab.pin(reserved[:1])
    slab.pin(reserved[:1])
    slab.unpin(reserved[:1])
    _expect("a pinned block not to be cold", False, reserved[0] in slab.coldest(slab.num_slots))
    other = make_keys(slab.num_slots, "other")
    granted = [k for k, s in zip(other, slab.reserve(other), strict=True) if s is not None]
    _expect("all slots but the pinned one", slab.num_slots - 1, len(granted))
    slab.commit(granted, [True] * len(granted))
    _expect("a pinned block to stay", [Answer.HIT], slab.lookup(reserved[:1]))
    _check_room(slab.stats())
    slab.unpin(reserved[:1])


def _forgets_what_is_idle(slab: SlabTier) -> None:
    keys = slab.keys()
    _expect("the coldest first", keys[:2], slab.coldest(2))
    slab.pin(keys[:1])
    slab.unpin(keys[:1])
    _expect("a used block not to be the coldest", False, slab.coldest(1) == keys[:1])
    slab.forget(keys)
    _expect("all slots free", slab.num_slots, slab.free_slots())
    _expect("no block", [], slab.keys())


def _slab_closes(slab: SlabTier) -> None:
    slab.close()
    slab.close()
    _expect_error(TierClosed, "memory after close", slab.memory)


def _check_room(stats: TierStats) -> None:
    within = 0 < stats.used_bytes <= stats.capacity_bytes
    _expect("used bytes within the capacity", True, within)


def _expect(what: str, expected: object, got: object) -> None:
    if expected != got:
        raise ContractBroken(f"expected {what}: {expected!r}, got {got!r}")


def _expect_error(
    error: type[Exception], what: str, call: Callable[..., Any], *arguments: object
) -> None:
    try:
        call(*arguments)
    except error:
        return
    except Exception as other:
        raise ContractBroken(f"expected {error.__name__} for {what}, got {other!r}") from other
    raise ContractBroken(f"expected {error.__name__} for {what}, got no error")
