# SPDX-License-Identifier: Apache-2.0
"""RowWriter: writes new rows, removed rows and last uses to the index on disk, in few commits.

A commit is slow. So if the store is full, the commit of a batch also removes rows of blocks that
later batches will replace. A steady stream of batches then takes one commit for each batch instead
of two. The caller must have synced the records of new rows. One thread at a time uses this module.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ..state import StoreState
from .index_file import IndexFile
from .slot_index import Entry

ROWS_PER_COMMIT = 4096
# The largest share of slots that are freed in advance: a sixteenth below _FEW_SLOTS slots, else a
# sixth. With less than a batch freed in advance, the batch takes a second commit.
_AHEAD_SHARE, _LARGER_SHARE = 16, 6
_FEW_SLOTS = 1024
# Last uses are written with the rows of new blocks, but not in every commit, because a block in use
# would be written again and again. A power cut or a kill loses the last uses of this many seconds,
# but no block.
USES_SECONDS = 10.0
SYNC_SECONDS = 2.0  # blocks of this time may be lost in a power cut or a kill


class OfferedBlocks:
    """Blocks of a store that is not durable. Look-ups find an offered block and its `store` call
    has ended, but it is not synced and has no row. Many batches are synced and committed together,
    at the latest about `SYNC_SECONDS` after the first block was added. Used by one thread."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}  # by slot; a batch's head is last
        self._due_at = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entries: Sequence[Entry]) -> None:
        if not self._entries:
            self._due_at = time.monotonic() + SYNC_SECONDS
        self._entries.update((entry.slot, entry) for entry in reversed(entries))

    def is_due(self) -> bool:
        return len(self) >= ROWS_PER_COMMIT or (bool(self) and not self.seconds_left())

    def seconds_left(self) -> float:
        return max(0.0, self._due_at - time.monotonic())

    def drain_entries(self) -> list[Entry]:
        """Remove and return all entries, last used first: newest batch first, each head first."""
        entries = list(reversed(self._entries.values()))
        self._entries.clear()
        return entries

    def slots_left(self, entries: Iterable[Entry]) -> None:
        """Drop entries whose slots were freed, so that no row is committed for these entries."""
        for entry in entries:
            held = self._entries.get(entry.slot)
            if held is not None and held.generation == entry.generation:
                del self._entries[entry.slot]


class RowWriter:
    """A writer of rows. Removes a block from `offered` together with the block's row."""

    def __init__(
        self,
        state: StoreState,
        index_file: IndexFile,
        offered: OfferedBlocks,
    ) -> None:
        self._state = state
        self._index_file = index_file
        self._offered = offered
        num_slots = state.index.num_slots
        self._ahead = num_slots // (_AHEAD_SHARE if num_slots < _FEW_SLOTS else _LARGER_SHARE)
        self._uses_at = 0.0  # when last uses must be written (monotonic)

    def remove_leaving(self) -> bool:
        """Remove the rows of all evicted and dropped blocks, which frees their slots. Return False
        if some rows could not be removed; a later call removes these rows."""
        with self._state.lock:
            leaving = self._state.index.take_leaving()
        for start in range(0, len(leaving), ROWS_PER_COMMIT):
            chunk = leaving[start : start + ROWS_PER_COMMIT]
            try:
                self._index_file.delete([entry.slot for entry in chunk])
            except Exception as error:  # noqa: BLE001 - or their slots were lost
                self._state.count_fault(error)
                with self._state.lock:
                    self._state.index.keep_leaving(leaving[start:])
                return False
            self._release_entries(chunk)
        return True

    def commit(self, entries: Sequence[Entry]) -> bool:
        """Commit rows of new entries, and remove rows to free slots for later batches. Without
        entries, or after `USES_SECONDS`, write last uses too. Return False if the commit failed."""
        index, now = self._state.index, time.monotonic()
        with_uses = not entries or now >= self._uses_at
        num_ahead = min(len(entries), self._ahead)
        with self._state.lock:
            plan = index.plan_commit(entries, num_ahead, ROWS_PER_COMMIT, with_uses=with_uses)
            self._state.stats.evicted_blocks += plan.num_evicted
        if with_uses:
            self._uses_at = now + USES_SECONDS
        rows, leaving = plan.rows, plan.leaving
        if not rows:
            return True
        try:
            self._index_file.put(rows, [entry.slot for entry in leaving])
        except Exception as error:  # noqa: BLE001 - or their slots were lost
            self._state.count_fault(error)
            with self._state.lock:
                index.keep_leaving(leaving)
            return False
        self._release_entries(leaving)
        return True

    def write_last_uses(self, stop_at: float) -> None:
        """Write the last uses of blocks to the disk, until `stop_at` (monotonic seconds)."""
        while True:
            with self._state.lock:
                rows = self._state.index.touched_rows(ROWS_PER_COMMIT)
            if not rows or time.monotonic() > stop_at:
                return
            try:
                self._index_file.put(rows)
            except Exception as error:  # noqa: BLE001 - the order of use is worth no more
                self._state.count_fault(error)
                return

    def _release_entries(self, gone: Sequence[Entry]) -> None:
        with self._state.lock:
            self._state.index.free_entries(gone)
            self._offered.slots_left(gone)
