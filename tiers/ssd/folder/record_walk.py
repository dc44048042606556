# SPDX-License-Identifier: Apache-2.0
"""Reads a slot file from end to end and verifies every record against its own header.

Several reads are in flight and their buffers are used again, so it runs at the disk's speed in
bounded memory. Knows nothing of the index: whether a record is the one it should be is for others
to say. Changes nothing.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ...record import Defect, RecordHeader, Seal, check_fields, check_record, decode_header
from ..disk.space import HEADER_PAGE_BYTES

_CHUNK_BYTES = 4 * 1024**2
_THREADS = 4
_AHEAD = 2 * _THREADS  # chunks read before somebody asks for them


class Found(NamedTuple):
    """What lies in one slot."""

    slot: int
    header: RecordHeader | None  # None: no record
    defect: Defect | None  # of a record by itself
    error: OSError | None  # the disk did not give it


class RecordFile:
    """A slot file opened for reading only, past the page cache where that can be.

    `seal` is what seals its records. Where that is not to be had, `verifies` is false: then headers
    are looked at and payloads are not.
    """

    def __init__(self, path: Path, seal: Seal | None = None, *, verifies: bool = True) -> None:
        self._seal = seal
        self._check = check_record if verifies else check_fields
        self._descriptor = _open(path)
        self.size = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        os.close(self._descriptor)

    def block_bytes(self) -> int | None:
        """The size of a block that the first whole record claims; None where there is none. For
        a store that has lost everything else which says it."""
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
        """Every slot, in order."""
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
        """Neighbouring slots at once; one by one where that fails, so that a bad sector costs its
        own record only."""
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
        return [self._judge(slot, each, block_bytes) for slot, each in enumerate(records, start)]

    def _judge(self, slot: int, record: memoryview, block_bytes: int) -> Found:
        header = decode_header(record)
        if header is None:
            return Found(slot, None, None, None)
        if header.block_bytes != block_bytes:
            return Found(slot, header, Defect.LENGTH, None)
        # What lies behind an encoded payload is of an earlier record, and not looked at.
        payload = record[HEADER_PAGE_BYTES : HEADER_PAGE_BYTES + header.payload_bytes]
        expected = replace(header, seal=self._seal) if self._seal else header
        return Found(slot, header, self._check(record, payload, expected), None)


def record_bytes_of(block_bytes: int) -> int:
    """What a record of such a block takes in the file."""
    return HEADER_PAGE_BYTES + -(-block_bytes // HEADER_PAGE_BYTES) * HEADER_PAGE_BYTES


def _open(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)
