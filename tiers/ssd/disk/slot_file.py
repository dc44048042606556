# SPDX-License-Identifier: Apache-2.0
"""The slot file: records of equal size, read and written in runs of neighbouring records.

    record = header page (the 128 bytes of `tiers/record.py`, zero padded) | payload, zero padded
    slot i begins at byte i * record_bytes

An encoded payload is shorter than its slot; the bytes after the payload are of an earlier record.

Bytes are moved directly between the disk and the caller's buffers (O_DIRECT), since the page cache
would only hold one more copy of a block. Only header pages and the last, partly filled page of a
payload are copied through a `Scratch`. So bytes after a payload are never read or written."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from array import array
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path

from ...block import ALIGNMENT, BlockLayout
from .disk_queue import DiskQueue, Pieces, Vector, open_queue
from .space import HEADER_PAGE_BYTES

log = logging.getLogger(__name__)

# The bytes that one call reads or writes, enough for four blocks of 256 KiB with header pages.
# Several calls of this size keep a disk busy, and a sync or a read after them waits only briefly.
RUN_BYTES = 1024**2 + 64 * 1024
_SHORTAGES = (errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ENOBUFS)
_IOV_MAX = os.sysconf("SC_IOV_MAX")


class Scratch:
    """Page-aligned memory for the header pages and the last, partly filled pages of one run."""

    def __init__(self, records: int, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        memory = memoryview(mmap.mmap(-1, 2 * records * ALIGNMENT))
        self._held = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._held)  # address of the header pages
        # Address and length of the header page and payload of each record, valid for the first
        # `num_laid` records.
        self.laid = array("Q", bytes(32 * records))
        self.num_laid = 0
        pages = [memory[i * ALIGNMENT : (i + 1) * ALIGNMENT] for i in range(2 * records)]
        self.headers = pages[:records]
        self.tails = pages[records:]

    @cached_property
    def encoded(self) -> memoryview:
        """A buffer for one encoded payload, allocated at its first use."""
        return memoryview(mmap.mmap(-1, self._slot_bytes))


class SlotFile:
    """A preallocated file of `num_slots` records, mode 0600. Thread-safe, but each scratch and each
    queue must be used by one thread only. Raises OSError if the file cannot be created or cannot
    get its full size."""

    def __init__(self, path: Path, layout: BlockLayout, num_slots: int) -> None:
        self._path = path
        self._whole = layout.page_bytes // ALIGNMENT * ALIGNMENT
        self._tail = layout.page_bytes - self._whole
        # Whether the payload of a record is a whole number of pages, at least one.
        self.can_be_laid = self._whole > 0 and not self._tail
        self.record_bytes = HEADER_PAGE_BYTES + layout.slot_bytes
        per_record = 1 + (self._whole > 0) + (self._tail > 0)
        self.run_slots = max(1, min(RUN_BYTES // self.record_bytes, _IOV_MAX // per_record))
        self.run_bytes = self.run_slots * self.record_bytes  # bytes of the longest run
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._buffered = os.open(path, flags, 0o600)
        try:
            os.ftruncate(self._buffered, num_slots * self.record_bytes)
            os.posix_fallocate(self._buffered, 0, num_slots * self.record_bytes)
            self._direct = self._open_direct()
        except BaseException:
            os.close(self._buffered)
            raise

    def scratch(self) -> Scratch:
        return Scratch(self.run_slots, self.record_bytes - HEADER_PAGE_BYTES)

    def open_queue(self, most: int) -> DiskQueue:
        """Return a queue for one thread's requests to this file, at most `most` at a time."""
        return open_queue(self._direct, self._buffered, most)

    def start_read(
        self,
        disk: DiskQueue,
        number: int,
        slot: int,
        payloads: Sequence[memoryview],
        scratch: Scratch,
    ) -> None:
        """Start to read neighbouring records, the first from `slot`: headers into the scratch,
        payloads into their buffers. The payloads are complete only after `take_read`."""
        disk.start(number, False, self._vector(payloads, scratch), slot * self.record_bytes)

    def take_read(self, num_bytes: int, payloads: Sequence[memoryview], scratch: Scratch) -> int:
        """Return how many whole records a read of `num_bytes` has brought, which are fewer at the
        end of the file. Copy the partly filled last page of each record to its buffer."""
        whole = num_bytes // self.record_bytes
        if self._tail:
            for payload, tail in zip(payloads[:whole], scratch.tails, strict=False):
                payload[self._whole :] = tail[: self._tail]
        return whole

    def start_write(
        self,
        disk: DiskQueue,
        number: int,
        slot: int,
        payloads: Sequence[memoryview],
        scratch: Scratch,
    ) -> None:
        """Start to write neighbouring records, the first to `slot`, with headers from the scratch.
        The records are durable only after `sync`."""
        if self._tail:
            for payload, tail in zip(payloads, scratch.tails, strict=False):
                tail[: self._tail] = payload[self._whole :]
        vector: Vector
        if scratch.num_laid == len(payloads):
            views = partial(self._vector, payloads, scratch)
            vector = Pieces(scratch.laid, 2 * len(payloads), views)
        else:
            vector = self._vector(payloads, scratch)
        disk.start(number, True, vector, slot * self.record_bytes)

    def start_read_encoded(
        self, disk: DiskQueue, number: int, slot: int, size: int, scratch: Scratch
    ) -> None:
        """Start to read a record into the scratch: header and `size` bytes of encoded payload."""
        disk.start(number, False, _encoded_vector(size, scratch), slot * self.record_bytes)

    def start_write_encoded(
        self, disk: DiskQueue, number: int, slot: int, size: int, scratch: Scratch
    ) -> None:
        """Start to write a record from the scratch: its header and `size` bytes of encoded payload.
        The rest of the payload's last page is zeroed. The record is durable only after `sync`."""
        scratch.encoded[size : _whole_pages(size)] = bytes(_whole_pages(size) - size)
        disk.start(number, True, _encoded_vector(size, scratch), slot * self.record_bytes)

    def encoded_record_bytes(self, size: int) -> int:
        """Return the bytes read or written for a record with an encoded payload of `size` bytes."""
        return HEADER_PAGE_BYTES + _whole_pages(size)

    def saved_bytes(self, size: int) -> int:
        """Return the bytes that encoding in `size` bytes saves; 0 for `size` 0 (no codec)."""
        return self.record_bytes - HEADER_PAGE_BYTES - _whole_pages(size) if size else 0

    def erase(self, slots: Sequence[int]) -> None:
        """Zero the header pages of `slots`, which erases their records. No write to these slots may
        be running. The change is durable only after `sync`. May raise OSError."""
        for slot in slots:
            os.pwrite(self._buffered, bytes(HEADER_PAGE_BYTES), slot * self.record_bytes)

    def sync(self) -> None:
        """Flush all finished writes to the disk (fdatasync). May raise OSError."""
        os.fdatasync(self._buffered)

    def can_be_read(self) -> bool:
        """Whether one of up to four trial reads succeeds or finds a temporary shortage. Waits."""
        descriptor = self._buffered if self._direct is None else self._direct
        page = Scratch(1, 0).headers[0]
        num_slots = os.fstat(self._buffered).st_size // self.record_bytes
        for slot in {0, num_slots // 3, num_slots // 2, num_slots - 1}:
            try:
                os.preadv(descriptor, [page], max(0, slot) * self.record_bytes)
            except OSError as error:
                if error.errno in _SHORTAGES:
                    return True  # a shortage of memory is no fault of the disk
            else:
                return True
        return False

    def close(self) -> None:
        """Close both file descriptors. No other call may be running."""
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)

    def _open_direct(self) -> int | None:
        """Return a descriptor that bypasses the page cache; None without direct I/O."""
        descriptor = None
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            os.preadv(descriptor, [Scratch(1, 0).headers[0]], 0)
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            if error.errno != errno.EINVAL:
                raise
            log.warning(
                "%s is on a file system without direct I/O; blocks pass through the page cache",
                self._path,
            )
            return None
        return descriptor

    def _vector(self, payloads: Sequence[memoryview], scratch: Scratch) -> list[memoryview]:
        vector: list[memoryview] = []
        for index, payload in enumerate(payloads):
            vector.append(scratch.headers[index])
            if self._whole:
                vector.append(payload[: self._whole])
            if self._tail:
                vector.append(scratch.tails[index])
        return vector


def _encoded_vector(size: int, scratch: Scratch) -> list[memoryview]:
    return [scratch.headers[0], scratch.encoded[: _whole_pages(size)]]


def _whole_pages(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
