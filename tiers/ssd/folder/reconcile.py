# SPDX-License-Identifier: Apache-2.0
"""Compares the records of a slot file with the rows of its index, for `ssd/store_check.py`.

`RecordFile` reads a whole slot file and verifies every record against its own header. `Reconciler`
compares the rows of an index with these records, in the order of the slots. Faults go into a
`CheckResult`; the store is not changed."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ...block import unpack_key
from ...record import Defect, RecordHeader, Seal, check_fields, check_record, decode_header
from ..disk.space import HEADER_PAGE_BYTES
from ..index.index_file import Row

# Kinds of problems. The kind of a row with a wrong record is a `record.Defect`.
INDEX = "index"  # the index is lost or damaged
IDENTITY = "identity"  # the index and the identity file differ
RANGE = "range"  # a row names a slot that does not exist
TWICE = "twice"  # two rows for one key
UNREADABLE = "unreadable"  # a record that a row names cannot be read
SIZE = "size"  # a file is missing or too large

_CHUNK_BYTES = 4 * 1024**2
_THREADS = 4
_AHEAD = 2 * _THREADS  # chunks that are read before the caller needs them

_SLOT_BITS = 32


def _of_group(key: bytes) -> str:
    """Return message text with the block's KV cache group; empty for the first group."""
    group = unpack_key(key).group
    return f", a block of cache group {group}" if group else ""


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault found in a store: the kind, a description, and the slot of a fault in one slot."""

    kind: str
    text: str
    slot: int | None = None


@dataclass(slots=True)
class CheckResult:
    """The faults that one check of a store has found, and the repairs that were made."""

    path: Path
    max_problems: int  # limit of the texts in `problems`
    slots: int = 0
    rows: int = 0
    whole: int = 0  # rows whose records are undamaged, as far as checked
    orphans: int = 0  # undamaged records without a row
    bytes_read: int = 0
    payloads_verified: bool = True  # False: sealed records, and no key
    counts: dict[str, int] = field(default_factory=dict)  # number of problems by kind
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # harmless findings, such as remains of a crash
    removed_rows: int = 0
    rebuilt_rows: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether no fault was found. False even if all faults were repaired."""
        return not self.counts

    def add(self, kind: str, text: str, slot: int | None = None) -> None:
        """Count a problem. Keep its text unless `max_problems` texts are kept already."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if len(self.problems) < self.max_problems:
            self.problems.append(Problem(kind, text, slot))


class Found(NamedTuple):
    """The content of one slot."""

    slot: int
    header: RecordHeader | None  # None: no record
    defect: Defect | None  # defect of the record, without regard to a row
    error: OSError | None  # error of the read


class RecordFile:
    """A slot file opened for reading only, with direct I/O if the file system has it. `seal` is the
    seal of the records. With `verifies` false, for an unknown seal, only headers are checked."""

    def __init__(self, path: Path, seal: Seal | None = None, *, verifies: bool = True) -> None:
        self._seal = seal
        self._check = check_record if verifies else check_fields
        self._descriptor = _open(path)
        self.size = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        os.close(self._descriptor)

    def block_bytes(self) -> int | None:
        """The block size in bytes, from the header of the first undamaged record; None without such
        a record. Needed for a store without an identity file."""
        page = memoryview(mmap.mmap(-1, HEADER_PAGE_BYTES))
        for offset in range(0, self.size - HEADER_PAGE_BYTES, HEADER_PAGE_BYTES):
            os.preadv(self._descriptor, [page], offset)
            header = decode_header(page)
            size = record_bytes_of(header.block_bytes) if header else 0
            if header is None or offset % size or offset + size > self.size:
                continue
            buffer = memoryview(mmap.mmap(-1, size))
            if self._look(offset // size, 1, header.block_bytes, buffer)[0].defect is None:
                return header.block_bytes
        return None

    def records(self, block_bytes: int) -> Iterator[Found]:
        """Yield the content of every slot, in the order of the slots."""
        size = record_bytes_of(block_bytes)
        total, step = self.size // size, max(1, _CHUNK_BYTES // size)
        local = threading.local()

        def look(start: int) -> list[Found]:
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(mmap.mmap(-1, step * size))
            return self._look(start, min(step, total - start), block_bytes, local.buffer)

        waiting: deque[Future[list[Found]]] = deque()
        with ThreadPoolExecutor(_THREADS, "stratakv-check") as pool:
            for start in range(0, total, step):
                waiting.append(pool.submit(look, start))
                if len(waiting) == _AHEAD:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()

    def _look(self, start: int, count: int, block_bytes: int, buffer: memoryview) -> list[Found]:
        """Read neighbouring slots with one call and check them. If the call fails, read the slots
        one by one, so that a bad sector loses only one record."""
        size = record_bytes_of(block_bytes)
        try:
            done = os.preadv(self._descriptor, [buffer[: count * size]], start * size)
            if done != count * size:
                raise OSError(errno.EIO, f"{done} of {count * size} bytes were read")
        except OSError as error:
            if count == 1:
                return [Found(start, None, None, error)]
            slots = range(start, start + count)
            return [found for slot in slots for found in self._look(slot, 1, block_bytes, buffer)]
        records = (buffer[i * size : (i + 1) * size] for i in range(count))
        return [
            self._classify_record(slot, each, block_bytes)
            for slot, each in enumerate(records, start)
        ]

    def _classify_record(self, slot: int, record: memoryview, block_bytes: int) -> Found:
        header = decode_header(record)
        if header is None:
            return Found(slot, None, None, None)
        if header.block_bytes != block_bytes:
            return Found(slot, header, Defect.LENGTH, None)
        # The bytes after an encoded payload belong to an earlier record and are not checked.
        payload = record[HEADER_PAGE_BYTES : HEADER_PAGE_BYTES + header.payload_bytes]
        expected = replace(header, seal=self._seal) if self._seal else header
        return Found(slot, header, self._check(record, payload, expected), None)


def record_bytes_of(block_bytes: int) -> int:
    """Return the bytes that the record of a block of `block_bytes` takes in the slot file."""
    return HEADER_PAGE_BYTES + -(-block_bytes // HEADER_PAGE_BYTES) * HEADER_PAGE_BYTES


def _open(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)


class Reconciler:
    """A comparison of rows with records, which adds faults to a result. Without an index, every
    undamaged record counts as an orphan and is recorded, so that an index can be rebuilt."""

    def __init__(
        self,
        result: CheckResult,
        layout_id: bytes | None,
        *,
        has_index: bool,
        cleared_up_to: int = 0,
    ) -> None:
        self._result = result
        self._cleared_up_to = cleared_up_to  # blocks up to this generation are removed
        self._num_cleared = 0
        self._layout_id = layout_id  # None: unknown, so that any layout is accepted
        self._has_index = has_index
        self.bad_slots: list[int] = []  # slots whose rows should be removed
        # Key → generation and slot of the key's latest record, packed into one number.
        self._latest: dict[bytes, int] = {}
        self._encoded_bytes: dict[int, int] = {}  # slot of an encoded orphan → bytes

    def run(self, rows: Iterable[Row], records: Iterator[Found]) -> None:
        """Compare rows and records, both in the order of their slots."""
        waiting = iter(rows)
        row = next(waiting, None)
        unreadable = 0
        for found in records:
            if row is not None and row.slot == found.slot:
                self._reconcile_row(row, found)
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
        """Yield a row for each key's latest record. The order of writes is that of last use."""
        for use, key in enumerate(sorted(self._latest, key=self._latest.__getitem__), 1):
            generation, slot = divmod(self._latest[key], 1 << _SLOT_BITS)
            yield Row(slot, key, generation, use, self._encoded_bytes.get(slot, 0))

    def _reconcile_row(self, row: Row, found: Found) -> None:
        if row.generation <= self._cleared_up_to:
            self._num_cleared += 1
            return
        self._result.rows += 1
        if found.error is not None:
            self._refuse(row.slot, UNREADABLE, str(found.error))
            return
        defect = self._defect(row, found)
        if defect is not None:
            whose = _of_group(row.key)
            text = f"its record is not the row's{whose} ({defect.value})"
            self._refuse(row.slot, defect.value, text)
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
        """Record the later of two records of a key. Return the earlier record's slot, if any."""
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
    """Return the length of the encoded payload, as in rows: 0 for a record without a codec."""
    return header.payload_bytes if header.codec else 0
