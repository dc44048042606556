# SPDX-License-Identifier: Apache-2.0
"""Blocks of a store that is not durable between two moments: offered from memory and acknowledged,
but not yet synced and without a row.

They go to the disk together, many batches at once, at the latest `SYNC_SECONDS` after the first of
them was offered. Knows nothing of how. Used by one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from .index.row_writer import ROWS_PER_COMMIT
from .index.slot_index import Entry

SYNC_SECONDS = 2.0  # the most that a power cut or a kill takes


class OfferedBlocks:
    """By slot, of one batch the head last."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._due_at = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entries: Sequence[Entry]) -> None:
        """A batch, head first."""
        if not self._entries:
            self._due_at = time.monotonic() + SYNC_SECONDS
        self._entries.update((entry.slot, entry) for entry in reversed(entries))

    def is_due(self) -> bool:
        """Whether they are to be brought to the disk now."""
        return len(self) >= ROWS_PER_COMMIT or (bool(self) and not self.seconds_left())

    def seconds_left(self) -> float:
        """Until they are due, though no more come."""
        return max(0.0, self._due_at - time.monotonic())

    def take(self) -> list[Entry]:
        """All of them, the newest batch first, each head first: the order in which rows say who was
        used last."""
        entries = list(reversed(self._entries.values()))
        self._entries.clear()
        return entries

    def slots_left(self, entries: Iterable[Entry]) -> None:
        """Slots are free for others, so no row may be committed for what they held."""
        for entry in entries:
            held = self._entries.get(entry.slot)
            if held is not None and held.generation == entry.generation:
                del self._entries[entry.slot]
