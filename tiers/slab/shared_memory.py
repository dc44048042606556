# SPDX-License-Identifier: Apache-2.0
"""Shared memory: a mapped memfd whose pages are all allocated at the start.

The first access to a page takes many times as long as a later copy, so every page is touched at the
start, in parallel, and not during the first requests. Huge pages, if requested, come from the pool
that the host's operator has reserved (`vm.nr_hugepages`). Otherwise, or if the pool is too small,
normal pages are allocated, which the kernel is requested to merge into huge pages. The merge needs
no setting on the host, but the kernel may refuse it. A virtual machine's disk took three times as
long for blocks on scattered pages.

The size is sealed before another process gets `fd`, because SIGBUS kills a process that has mapped
a memfd if another process shrinks the memfd."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

from ..errors import TierConfigError
from ..settings.sizes import MIB, rough_size
from .host_memory import available_memory_bytes

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # called with the bytes done and the bytes in all

HUGE_PAGE_BYTES = 2 * 1024**2

_MADV_POPULATE_WRITE = 23  # since Linux 5.14; not in Python's mmap
_MADV_COLLAPSE = 25  # since Linux 6.1; works unless the host's setting is "deny"
_PIECE_BYTES = 64 * 1024**2  # small enough to show progress, large enough for a thread
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MFD_HUGE_2MB = 21 << os.MFD_HUGE_SHIFT


class SharedMemory:
    """`size` bytes in `map`, backed by the memfd `fd`. `is_huge`: whether these bytes are on huge
    pages. Raises TierConfigError if less memory is available."""

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
                    "%s of huge pages cannot be had (%s); using plain pages. "
                    "vm.nr_hugepages sets %d of them apart",
                    rough_size(size),
                    error.strerror,
                    -(-size // HUGE_PAGE_BYTES),
                )
        available = available_memory_bytes()
        if available is not None and size > available:
            raise TierConfigError(
                f"the CPU tier was given {rough_size(size)} and the host has "
                f"{rough_size(available)} of memory available; make the tier smaller by "
                f"{-(-(size - available) // MIB)}MiB or more, or free some memory"
            )
        try:
            self.fd, self.map = _make(name, 0, size, threads, progress)
        except OSError as error:
            raise TierConfigError(
                f"the CPU tier could not get {rough_size(size)} of shared memory ({error}); "
                "make it smaller or free some memory"
            ) from error


def has_fixed_size(fd: int) -> bool:
    """Whether the size of this memfd is sealed; False for any other file."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SIZE_SEALS == _SIZE_SEALS
    except OSError:
        return False


def _make_huge(
    name: str, size: int, threads: int, progress: Progress | None
) -> tuple[int, mmap.mmap]:
    whole = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return _make(name, os.MFD_HUGETLB | _MFD_HUGE_2MB, whole, threads, progress)


def _make(
    name: str, flags: int, size: int, threads: int, progress: Progress | None
) -> tuple[int, mmap.mmap]:
    """Make and populate a memfd. Raises OSError, and then leaves nothing open."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
        memory = _map_aligned(fd, size)
        try:
            _populate(memory, fd, size, threads, progress)
        except OSError:
            memory.close()
            raise
    except OSError:
        os.close(fd)
        raise
    return fd, memory


def _map_aligned(fd: int, size: int) -> mmap.mmap:
    """Map the memfd, if possible at a multiple of the huge page size, since the kernel can merge
    pages only there. If the first map is not aligned, a temporary map as long as the misalignment
    shifts a second map, because the kernel places new maps side by side."""
    memory = mmap.mmap(fd, size, mmap.MAP_SHARED)
    off = _address(memory) % HUGE_PAGE_BYTES
    if not off or size < HUGE_PAGE_BYTES:
        return memory
    memory.close()
    with mmap.mmap(-1, off):
        return mmap.mmap(fd, size, mmap.MAP_SHARED)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _populate(
    memory: mmap.mmap, fd: int, size: int, threads: int, progress: Progress | None
) -> None:
    """Allocate every page, several pieces in parallel. Raises OSError if memory is short."""
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
        del anchor  # the map cannot be closed while `anchor` exists


def _populate_piece(base: int, fd: int, start: int, length: int) -> int:
    # ctypes releases the GIL; mmap.madvise does not.
    libc = ctypes.CDLL(None, use_errno=True)
    # One huge page at a time, as merging just cleared pages costs a third of merging cold ones.
    for offset in range(start, start + length, HUGE_PAGE_BYTES):
        address = ctypes.c_void_p(base + offset)
        size = ctypes.c_size_t(min(HUGE_PAGE_BYTES, start + length - offset))
        if libc.madvise(address, size, _MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise OSError(code, os.strerror(code))
            # An older kernel: allocate the pages; the first touch adds only page-table entries.
            os.posix_fallocate(fd, start, length)
            return length
        # Older kernels refuse the merge, and all kernels for an unaligned map or scattered memory.
        libc.madvise(address, size, _MADV_COLLAPSE)
    return length
