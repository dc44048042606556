# SPDX-License-Identifier: Apache-2.0
"""A store that is opened smaller than it was keeps the blocks that were used last.

What a kill in the middle leaves is in `test_kill_points.py`, which shrinks a store too.
"""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.codecs.known_codecs import make_codec
from stratakv.tiers.ssd.folder import shrinking
from stratakv.tiers.ssd.store_check import check_store

from ..blocks import SMALL, make_keys, payload_of
from ..store_contract import SECONDS, fetch, put
from .stores import Open, store_keys

OLD_SLOTS, SLOTS = 60, 20


@pytest.mark.parametrize("codec", [None, "lossless"])
def test_the_hottest_are_kept_wherever_they_lay(
    open_store: Open, tmp_path: Path, rng: random.Random, codec: str | None
) -> None:
    made = None if codec is None else make_codec(codec, SMALL)
    keys = make_keys(OLD_SLOTS)
    store = open_store(slots=OLD_SLOTS, codec=made)
    assert all(put(store, keys))
    hot = rng.sample(keys, SLOTS)
    for key in hot:
        assert fetch(store, [key]) == [payload_of(key, SMALL)]
    assert store.drop(keys[:3]) == 3
    hot = [key for key in hot if key not in keys[:3]]
    store.close(SECONDS)
    store = open_store(slots=SLOTS, codec=made)
    assert fetch(store, hot) == [payload_of(key, SMALL) for key in hot]
    assert len(store_keys(store)) == SLOTS == store.stats().capacity_blocks
    assert store.lookup(keys[:3]) == [Answer.MISS] * 3
    # The order of use goes on: of a chain the tail is evicted first.
    put(store, make_keys(SLOTS // 2, "more"))
    left = store.lookup(hot).count(Answer.HIT)
    assert 0 < left < len(hot)
    assert store.lookup(hot[:left]) == [Answer.HIT] * left
    store.close(SECONDS)
    assert check_store(tmp_path / "ssd").is_clean
    size = os.stat(tmp_path / "ssd" / "blocks").st_size
    assert size == SLOTS * store._state.slot_file.record_bytes


def test_what_fits_is_kept_whole(open_store: Open) -> None:
    """A store that was not full loses nothing."""
    keys = make_keys(OLD_SLOTS)
    store = open_store(slots=OLD_SLOTS)
    put(store, keys)
    store.drop(keys[: OLD_SLOTS - 5])
    store.close(SECONDS)
    store = open_store(slots=SLOTS)
    assert store_keys(store) and None not in fetch(store, keys[-5:])


def test_moving_has_an_end(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow disk costs blocks and not the start."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(shrinking, "MOST_SECONDS", -1.0)
    keys = make_keys(2 * SLOTS)
    store = open_store(slots=OLD_SLOTS)
    put(store, keys[:SLOTS])
    put(store, keys[SLOTS:])
    store.close(SECONDS)
    store = open_store(slots=SLOTS)
    assert sorted(store_keys(store)) == sorted(keys[:SLOTS]), "the cold ones stay where they are"
    assert None not in fetch(store, keys[:SLOTS])
    assert any(line.startswith(f"{SLOTS} blocks that were used lately") for line in caplog.messages)


def test_a_larger_one_keeps_all(open_store: Open) -> None:
    keys = make_keys(SLOTS)
    store = open_store(slots=SLOTS)
    put(store, keys)
    store.close(SECONDS)
    store = open_store(slots=OLD_SLOTS)
    assert None not in fetch(store, keys)
    assert store.stats().capacity_blocks == OLD_SLOTS
