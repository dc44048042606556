# SPDX-License-Identifier: Apache-2.0
"""The promise of `StoreTier` as a function that every implementation has to pass.

`check_store` takes an empty, open store with room for 16 blocks or more and leaves it closed.
"""

from __future__ import annotations

import time

import pytest

from stratakv.tiers.base import Answer, StoreTier
from stratakv.tiers.errors import InvalidBlock, TierClosed

from .blocks import filled_buffers, make_buffers, make_keys, payload_of

SECONDS = 10.0


def check_store(store: StoreTier) -> None:
    _keeps_what_it_is_given(store)
    _answers_in_the_order_of_the_keys(store)
    _leaves_the_padding_alone(store)
    _takes_a_key_twice(store)
    _drops_and_clears(store)
    _refuses_what_cannot_be_right(store)
    _takes_empty_calls(store)
    _closes(store)


def fetch(store: StoreTier, keys: list[bytes]) -> list[bytes | None]:
    """The payloads of hits, None for misses; a hit with other bytes fails here."""
    buffers = make_buffers(len(keys), store.layout)
    answers = store.load(keys, buffers).result(SECONDS)
    assert len(answers) == len(keys)
    found: list[bytes | None] = []
    for key, answer, buffer in zip(keys, answers, buffers, strict=True):
        if answer is Answer.MISS:
            found.append(None)
            continue
        assert answer is Answer.HIT
        payload = bytes(buffer[: store.layout.page_bytes])
        assert payload == payload_of(key, store.layout)
        found.append(payload)
    return found


def put(store: StoreTier, keys: list[bytes]) -> list[bool]:
    """Store what belongs to the keys and wait."""
    return store.store(keys, filled_buffers(keys, store.layout)).result(SECONDS)


def wait_until(condition: object, seconds: float = SECONDS) -> None:
    """Until the callable is true; fails after `seconds`."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.002)


def _keeps_what_it_is_given(store: StoreTier) -> None:
    keys = make_keys(8)
    assert store.lookup(keys) == [Answer.MISS] * 8
    assert fetch(store, keys) == [None] * 8
    future = store.store(keys, filled_buffers(keys, store.layout))
    assert set(store.lookup(keys)) <= {Answer.PENDING, Answer.HIT}
    assert future.result(SECONDS) == [True] * 8
    assert store.lookup(keys) == [Answer.HIT] * 8
    assert None not in fetch(store, keys)
    stats = store.stats()
    assert (stats.blocks, stats.stored_blocks, stats.loaded_blocks) == (8, 8, 8)
    assert (stats.hits, stats.misses) == (8, 8)
    assert stats.stored_bytes == stats.loaded_bytes == 8 * store.layout.page_bytes
    assert 0 < stats.used_bytes <= stats.capacity_bytes
    stats.errors["mine"] = 1
    assert "mine" not in store.stats().errors


def _answers_in_the_order_of_the_keys(store: StoreTier) -> None:
    known, unknown = make_keys(8), make_keys(8, "unknown")
    mixed = [key for pair in zip(reversed(known), unknown, strict=True) for key in pair]
    assert store.lookup(mixed) == [Answer.HIT, Answer.MISS] * 8
    assert [found is not None for found in fetch(store, mixed)] == [True, False] * 8


def _leaves_the_padding_alone(store: StoreTier) -> None:
    size = store.layout.page_bytes
    buffers = make_buffers(2, store.layout)
    for buffer in buffers:
        buffer[size:] = b"\xa5" * (len(buffer) - size)
    assert store.load(make_keys(2), buffers).result(SECONDS) == [Answer.HIT] * 2
    for buffer in buffers:
        assert bytes(buffer[size:]) == b"\xa5" * (len(buffer) - size)


def _takes_a_key_twice(store: StoreTier) -> None:
    key = make_keys(1)[0]
    stored = store.stats().stored_blocks
    assert put(store, [key]) == [True]
    assert store.stats().stored_blocks == stored
    twice = make_keys(1, "twice") * 2
    assert put(store, twice) == [True, True]
    assert store.stats().stored_blocks == stored + 1
    assert None not in fetch(store, twice)


def _drops_and_clears(store: StoreTier) -> None:
    keys = make_keys(8)
    assert store.drop(keys[:3] + make_keys(2, "unknown")) == 3
    assert store.drop(keys[:3]) == 0
    assert store.lookup(keys) == [Answer.MISS] * 3 + [Answer.HIT] * 5
    assert [found is not None for found in fetch(store, keys)] == [False] * 3 + [True] * 5
    assert put(store, keys[:3]) == [True] * 3
    assert None not in fetch(store, keys)
    store.clear()
    assert store.lookup(keys) == [Answer.MISS] * 8
    assert fetch(store, keys) == [None] * 8
    assert put(store, keys) == [True] * 8
    assert None not in fetch(store, keys)


def _refuses_what_cannot_be_right(store: StoreTier) -> None:
    keys, buffers = make_keys(2, "wrong"), make_buffers(2, store.layout)
    for call in (store.load, store.store):
        with pytest.raises(InvalidBlock, match="2 keys"):
            call(keys, buffers[:1])
        with pytest.raises(InvalidBlock, match=str(store.layout.page_bytes)):
            call(keys[:1], [buffers[0][: store.layout.page_bytes - 1]])
    assert store.lookup(keys) == [Answer.MISS] * 2


def _takes_empty_calls(store: StoreTier) -> None:
    assert store.lookup([]) == []
    assert store.load([], []).result(SECONDS) == []
    assert store.store([], []).result(SECONDS) == []
    assert store.drop([]) == 0


def _closes(store: StoreTier) -> None:
    store.close(SECONDS)
    store.close(SECONDS)
    keys, buffers = make_keys(1), make_buffers(1, store.layout)
    for call in (store.load, store.store):
        with pytest.raises(TierClosed):
            call(keys, buffers)
