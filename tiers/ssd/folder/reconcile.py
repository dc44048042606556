# SPDX-License-Identifier: Apache-2.0
"""Holds the rows of an index against the records of a slot file, both in the order of the slots.

Knows nothing of files; it says what is wrong and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...record import Defect, RecordHeader
from ..index.index_file import Row
from .check_result import RANGE, TWICE, UNREADABLE, CheckResult
from .record_walk import Found

_SLOT_BITS = 32


class Reconciler:
    """Fills a result. Without an index every whole record counts as an orphan and is remembered,
    so that an index can be made of them."""

    def __init__(
        self,
        result: CheckResult,
        layout_id: bytes | None,
        *,
        has_index: bool,
        cleared_up_to: int = 0,
    ) -> None:
        self._result = result
        self._cleared_up_to = cleared_up_to  # what has such a generation is forgotten
        self._num_cleared = 0
        self._layout_id = layout_id  # None where nobody knows it: then any is right
        self._has_index = has_index
        self.bad_slots: list[int] = []  # whose rows should go
        # Key → generation and slot of the record that counts, in one number each.
        self._latest: dict[bytes, int] = {}
        self._encoded_bytes: dict[int, int] = {}  # by slot, of orphans that a codec made

    def run(self, rows: Iterable[Row], records: Iterator[Found]) -> None:
        """Walk through both."""
        waiting = iter(rows)
        row = next(waiting, None)
        unreadable = 0
        for found in records:
            if row is not None and row.slot == found.slot:
                self._judge(row, found)
                row = next(waiting, None)
            elif found.error is not None:
                unreadable += 1
            elif found.header is not None and found.defect is None:
                self._note_orphan(found)
        if self._num_cleared:
            self._result.notes.append(
                f"{self._num_cleared} rows are of cleared blocks; the next start removes them"
            )
        while row is not None:
            self._result.rows += 1
            self._refuse(row.slot, RANGE, f"there are {self._result.slots} slots")
            row = next(waiting, None)
        if unreadable:
            self._result.notes.append(f"{unreadable} slots without a row cannot be read")

    def rows_of_records(self) -> Iterator[Row]:
        """A row for the latest record of each key; who was written last was used last."""
        for use, key in enumerate(sorted(self._latest, key=self._latest.__getitem__), 1):
            generation, slot = divmod(self._latest[key], 1 << _SLOT_BITS)
            yield Row(slot, key, generation, use, self._encoded_bytes.get(slot, 0))

    def _judge(self, row: Row, found: Found) -> None:
        if row.generation <= self._cleared_up_to:
            self._num_cleared += 1
            return
        self._result.rows += 1
        if found.error is not None:
            self._refuse(row.slot, UNREADABLE, str(found.error))
            return
        defect = self._defect(row, found)
        if defect is not None:
            self._refuse(row.slot, defect.value, f"its record is not the row's ({defect.value})")
            return
        self._result.whole += 1
        older = self._remember(row.key, row.generation, row.slot)
        if older is not None:
            self._refuse(older, TWICE, f"a later row has its key {row.key.hex()} too")

    def _defect(self, row: Row, found: Found) -> Defect | None:
        header = found.header
        if header is None:
            return Defect.MAGIC
        if header.key != row.key:
            return Defect.KEY
        if self._layout_id not in (None, header.layout_id):
            return Defect.LAYOUT
        if header.generation != row.generation:
            return Defect.GENERATION
        if row.encoded_bytes != _encoded_bytes(header):
            return Defect.LENGTH
        return found.defect

    def _note_orphan(self, found: Found) -> None:
        header = found.header
        if header is None or self._layout_id not in (None, header.layout_id):
            return
        if header.generation <= self._cleared_up_to:
            return
        self._result.orphans += 1
        if not self._has_index:
            if header.codec:
                self._encoded_bytes[found.slot] = _encoded_bytes(header)
            self._remember(header.key, header.generation, found.slot)

    def _remember(self, key: bytes, generation: int, slot: int) -> int | None:
        """Keep the later one of two records for a key; the slot of the other one."""
        mine, known = generation << _SLOT_BITS | slot, self._latest.get(key)
        if known is None:
            self._latest[key] = mine
            return None
        self._latest[key] = max(mine, known)
        return min(mine, known) % (1 << _SLOT_BITS)

    def _refuse(self, slot: int, kind: str, text: str) -> None:
        self.bad_slots.append(slot)
        self._result.add(kind, f"slot {slot}: {text}", slot)


def _encoded_bytes(header: RecordHeader) -> int:
    """As a row says it."""
    return header.payload_bytes if header.codec else 0
