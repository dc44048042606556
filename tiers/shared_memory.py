# SPDX-License-Identifier: Apache-2.0
"""Shared memory that exists: a memfd, mapped, with every page faulted in at the start.

The first touch of a page costs many times a warm copy, so it is done here, in parallel, and not by
the first requests. Huge pages, if asked for, come from the pool that the host's operator set apart
(`vm.nr_hugepages`); where that is too small, plain pages do as well. They are worth asking for: a
disk takes a block from scattered small pages in several requests, and up to 1.5 times as long.
Knows nothing of slots.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

from .errors import TierConfigError
from .host_memory import available_memory_bytes

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

HUGE_PAGE_BYTES = 2 * 1024**2

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_PIECE_BYTES = 64 * 1024**2  # small enough to show progress, large enough to be worth a thread hop
_MFD_HUGE_2MB = 21 << os.MFD_HUGE_SHIFT


class SharedMemory:
    """`size` bytes in `map`, of which `fd` is the memfd; `is_huge` says on which pages.

    Raises TierConfigError where the host has less.
    """

    def __init__(
        self, name: str, size: int, *, huge_pages: bool, threads: int, progress: Progress | None
    ) -> None:
        self.is_huge = False
        if huge_pages:
            try:
                self.fd, self.map = _make_huge(name, size, threads, progress)
                self.is_huge = True
                return
            except OSError as error:
                log.warning(
                    "%d bytes of huge pages cannot be had (%s); using plain pages. "
                    "vm.nr_hugepages sets %d of them apart",
                    size,
                    error.strerror,
                    -(-size // HUGE_PAGE_BYTES),
                )
        available = available_memory_bytes()
        if available is not None and size > available:
            raise TierConfigError(
                f"the CPU tier was given {size} bytes and the host has {available} bytes of "
                "memory available; make the tier smaller or free some memory"
            )
        try:
            self.fd, self.map = _make(name, 0, size, threads, progress)
        except OSError as error:
            raise TierConfigError(
                f"the CPU tier could not get {size} bytes of shared memory ({error}); "
                "make it smaller or free some memory"
            ) from error


def _make_huge(
    name: str, size: int, threads: int, progress: Progress | None
) -> tuple[int, mmap.mmap]:
    whole = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return _make(name, os.MFD_HUGETLB | _MFD_HUGE_2MB, whole, threads, progress)


def _make(
    name: str, flags: int, size: int, threads: int, progress: Progress | None
) -> tuple[int, mmap.mmap]:
    """Raises OSError, and then leaves nothing."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | flags)
    try:
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size, mmap.MAP_SHARED)
        try:
            _populate(memory, fd, size, threads, progress)
        except OSError:
            memory.close()
            raise
    except OSError:
        os.close(fd)
        raise
    return fd, memory


def _populate(
    memory: mmap.mmap, fd: int, size: int, threads: int, progress: Progress | None
) -> None:
    """Fault every page in, pieces in parallel. Raises OSError where memory is short."""
    anchor = ctypes.c_char.from_buffer(memory)
    try:
        base = ctypes.addressof(anchor)
        done = 0
        with ThreadPoolExecutor(max(1, threads), "stratakv-populate") as pool:
            starts = range(0, size, _PIECE_BYTES)
            lengths = [min(_PIECE_BYTES, size - start) for start in starts]
            pieces = [
                pool.submit(_populate_piece, base, fd, start, length)
                for start, length in zip(starts, lengths, strict=True)
            ]
            for piece in as_completed(pieces):
                done += piece.result()
                if progress:
                    progress(done, size)
    finally:
        del anchor  # while it lives the map cannot be closed


def _populate_piece(base: int, fd: int, start: int, length: int) -> int:
    # Through ctypes, which releases the GIL; mmap.madvise keeps it.
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(base + start)
    if libc.madvise(address, ctypes.c_size_t(length), _MADV_POPULATE_WRITE) == 0:
        return length
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise OSError(code, os.strerror(code))
    # An older kernel: allocate the pages; only the page-table entries are left to the first touch.
    os.posix_fallocate(fd, start, length)
    return length
