# SPDX-License-Identifier: Apache-2.0
"""Makes a store smaller and keeps its most recently used (hottest) blocks. A kept block keeps its
slot, or moves to a slot below the new end that is free or has a colder block.

    slots   0 ............ new end ............ old end
                  cold  ◄──────────  hot

Only an opening that shrinks a store moves payloads. Moving takes about `MOST_SECONDS` at most.
Blocks not moved in this time are lost; the hottest blocks are moved first. After a crash at any
time, each row names a slot that holds the row's record: first the colder block's row is removed,
then the hot block's record is copied and synced, and then one commit writes the hot block's new row
and removes the old row. At the end, the rows beyond the new end are removed and the file is
truncated, so that a full disk has room for the smaller index."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from ...settings.sizes import rough_size
from ..disk.space import SpacePlan
from ..index.index_file import IndexFile, Row, RowBatch
from ..index.slot_index import SlotIndex
from .directory import StoreDirectory

log = logging.getLogger(__name__)

MOST_SECONDS = 20.0
_COMMIT_BYTES = 64 * 1024**2  # bytes copied before each sync and commit
_COMMIT_ROWS = 1024


def num_slots_there(slot_file: Path, plan: SpacePlan) -> int:
    """Return the slots that fit into the bytes allocated to the slot file; 0 without a file."""
    try:
        return slot_file.lstat().st_blocks * 512 // plan.record_bytes
    except FileNotFoundError:
        return 0


def shrink(directory: StoreDirectory, plan: SpacePlan, index: SlotIndex) -> SlotIndex:
    """Move the hottest blocks of `index` into the first `plan.num_slots` slots of the files. Return
    the smaller index. A block that cannot be read is lost. May raise OSError and lmdb.Error, after
    which only cold blocks are lost."""
    began = time.monotonic()
    to_be_removed = [entry.slot for entry in index.take_leaving()]
    by_heat = list(index.iter_by_use())[::-1]
    stays = {row.slot: row for row in by_heat if row.slot < plan.num_slots}
    hot = {row.slot for row in by_heat[: plan.num_slots]}
    moves = [row for row in by_heat[: plan.num_slots] if row.slot >= plan.num_slots]
    targets = (slot for slot in range(plan.num_slots) if slot not in hot)
    tried = moved = 0
    with _Mover(directory, plan) as mover:
        mover.remove_slots(to_be_removed)  # the smaller index does not have these slots
        step = max(1, min(_COMMIT_BYTES // plan.record_bytes, _COMMIT_ROWS))
        for start in range(0, len(moves), step):
            if time.monotonic() - began > MOST_SECONDS:
                break
            rows = moves[start : start + step]
            slots = list(islice(targets, len(rows)))
            for slot in slots:
                stays.pop(slot, None)
            for row in mover.move(rows, slots):
                stays[row.slot] = row
                moved += 1
            tried += len(rows)
        mover.cut_off()
    log.info(
        "the SSD tier in %s is smaller than it was: %d of %d blocks are kept, of which %d (%s) "
        "were moved in %.1f s",
        directory.path, len(stays), len(by_heat), moved, rough_size(moved * plan.record_bytes),
        time.monotonic() - began,
    )  # fmt: skip
    if tried < len(moves):
        log.warning(
            "%d blocks that were used lately are lost, since moving them would have taken longer "
            "than %g s", len(moves) - tried, MOST_SECONDS,
        )  # fmt: skip
    if moved < tried:
        log.warning("%d blocks could not be read and are lost", tried - moved)
    return SlotIndex(plan.num_slots, [RowBatch.from_rows(stays[slot] for slot in sorted(stays))])


class _Mover:
    """Moves records within the slot file and changes their rows. Keeps slot file and index open."""

    def __init__(self, directory: StoreDirectory, plan: SpacePlan) -> None:
        self._size = plan.record_bytes
        self._num_slots = plan.num_slots
        self._index = IndexFile(directory.index, 0)
        try:
            self._file = os.open(directory.slot_file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except BaseException:
            self._index.close()
            raise

    def __enter__(self) -> _Mover:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        self._index.close()

    def remove_slots(self, slots: Sequence[int]) -> None:
        for start in range(0, len(slots), _COMMIT_ROWS):
            self._index.delete(slots[start : start + _COMMIT_ROWS])

    def move(self, rows: Sequence[Row], slots: Sequence[int]) -> Iterable[Row]:
        """Copy the records of `rows` to `slots`. Return the new rows of the records that could be
        read. Raises OSError if no record could be read: the disk has failed, not a sector."""
        self._index.delete(slots)
        new: list[Row] = []
        fault: OSError | None = None
        for row, slot in zip(rows, slots, strict=True):
            try:
                record = os.pread(self._file, self._size, row.slot * self._size)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                fault = error
                continue
            self._write_slot(record, slot)
            new.append(row._replace(slot=slot))
        if fault is not None and not new:
            raise fault
        os.fdatasync(self._file)
        self._index.put(new, [row.slot for row in rows])
        return new

    def cut_off(self) -> None:
        """Remove the rows beyond the new end, then truncate the slot file at the new end."""
        self._index.delete_from(self._num_slots)
        if os.fstat(self._file).st_size > self._num_slots * self._size:
            os.ftruncate(self._file, self._num_slots * self._size)

    def _write_slot(self, record: bytes, target: int) -> None:
        view, offset = memoryview(record), target * self._size
        while view:
            count = os.pwrite(self._file, view, offset)
            view, offset = view[count:], offset + count
