# SPDX-License-Identifier: Apache-2.0
"""The case of a store's index with a million blocks: look-ups, memory, and time to open.

The index and the opening, with a scan in a child process, are those of the product. The slot file
has the right size but is sparse, because opening reads no payloads and a million blocks would need
gigabytes. The limit for opening is one pass over the index that only decodes each row. The opening
and the limit find the index in the page cache."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
import tracemalloc
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from ...tiers.base import Answer
from ...tiers.ssd import SsdStore
from ...tiers.ssd.disk.space import plan_space
from ...tiers.ssd.folder.directory import StoreDirectory
from ...tiers.ssd.folder.open_store import open_store
from ...tiers.ssd.index.index_file import IndexFile, Row
from ..harness.comparison import Comparison, WrongWork
from .scale import key_of, layout_of
from .store_case import LOOK_UP_KEYS

_LAYOUT = layout_of(4096)
_COMMIT_ROWS = 4096
_BATCHES = 64
_CLOSE_SECONDS = 60.0


class IndexCase:
    """The index of a store in `folder` with `entries` blocks."""

    def __init__(self, folder: Path, entries: int) -> None:
        self._folder = folder
        self.entries = entries
        sizes = range(2**21 + 1, 2**50)  # searched for the smallest size with `entries` slots
        place = bisect_left(sizes, entries, key=lambda size: plan_space(_LAYOUT, size).num_slots)
        self._capacity = sizes[place]
        with _sparse_slots():
            opened = open_store(folder, _LAYOUT, self._capacity, b"", 60.0)
        with contextlib.closing(opened):
            # Slots are in the order of keys, as in a store that was filled; last uses are random.
            uses = list(range(1, entries + 1))
            random.Random(entries).shuffle(uses)
            for start in range(0, entries, _COMMIT_ROWS):
                slots = range(start, min(start + _COMMIT_ROWS, entries))
                opened.index_file.put(
                    [Row(slot, key_of(slot), slot + 1, uses[slot]) for slot in slots]
                )

    def comparison(self) -> Comparison:
        """Return the comparison of `reopen` and `pass_over`, in rows per second."""
        return Comparison("reopen", "rows/s", "cursor", self.reopen, self.pass_over)

    def reopen(self) -> float:
        """Open the whole store; return rows per second."""
        began = time.perf_counter()
        store = self._open()
        seconds = time.perf_counter() - began
        store.close(_CLOSE_SECONDS)
        return self.entries / seconds

    def pass_over(self) -> float:
        """Read and decode all rows once; return rows per second. Rows are decoded, because a cursor
        without decoding is no reader of an index: it takes a third of the time in which a dict of
        as many keys is filled."""
        began = time.perf_counter()
        with contextlib.closing(IndexFile(self._folder / "index", 0)) as index_file:
            count = sum(1 for _ in index_file.iter_rows())
        if count != self.entries:
            raise WrongWork(f"the index has {count} rows, not {self.entries}")
        return count / (time.perf_counter() - began)

    def bytes_per_entry(self) -> float:
        """Return the bytes of Python memory per block of an open store."""
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            store = self._open()
            gc.collect()
            held = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        store.close(_CLOSE_SECONDS)
        return held / self.entries

    def look_ups(self, rounds: int) -> list[float]:
        """Return rates of look-ups in keys per second, in batches with half of the keys stored."""
        store = self._open()
        rng = random.Random(self.entries)
        batches = [
            [key_of(rng.randrange(2 * self.entries)) for _ in range(LOOK_UP_KEYS)]
            for _ in range(_BATCHES)
        ]
        try:
            return [self._look_up(store, batches) for _ in range(rounds)]
        finally:
            store.close(_CLOSE_SECONDS)

    def _look_up(self, store: SsdStore, batches: list[list[bytes]]) -> float:
        began = time.perf_counter()
        hits = sum(store.lookup(batch).count(Answer.HIT) for batch in batches)
        rate = _BATCHES * LOOK_UP_KEYS / (time.perf_counter() - began)
        if not 0 < hits < _BATCHES * LOOK_UP_KEYS:
            raise WrongWork(f"{hits} keys were found, not about half of them")
        return rate

    def _open(self) -> SsdStore:
        with _sparse_slots():
            store = SsdStore(self._folder, _LAYOUT, self._capacity)
        if store.stats().blocks != self.entries:
            raise WrongWork(f"the store opened with {store.stats().blocks} blocks")
        return store


@contextlib.contextmanager
def _sparse_slots() -> Iterator[None]:
    """Create slot files without disk blocks inside the context, which need no free space."""
    with (
        patch.multiple(os, posix_fallocate=lambda fd, _at, size: os.ftruncate(fd, size)),
        patch.multiple(StoreDirectory, check_free_space=lambda _self, _plan: None),
    ):
        yield
