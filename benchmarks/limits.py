# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at most, measured in the same run as the figures held against it.

Knows nothing of blocks or engines: memory copies, direct disk reads, matrix products. Each limit is
the best of a few repeats, since a limit is what the hardware reaches when nothing is in its way.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

_REPEATS = 5
_COPY_BYTES = 64 * 2**20
_FILE_BYTES = 128 * 2**20
_READ_BYTES = 4 * 2**20


def best_seconds(work: Callable[[], object], repeats: int = _REPEATS) -> float:
    """The shortest of `repeats` runs after one warm-up."""
    work()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def memory_copy_gb_per_second() -> float:
    """One thread copying 64 MiB that no cache holds, in 10⁹ bytes of payload a second."""
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.zeros(_COPY_BYTES, np.uint8)
    return _COPY_BYTES / best_seconds(lambda: np.copyto(target, source)) / 1e9


def disk_read_gb_per_second(directory: Path) -> float:
    """One thread reading a fresh 128 MiB file by O_DIRECT in pieces of 4 MiB, in 10⁹ bytes/s.

    Where the file system refuses O_DIRECT the page cache is dropped for the file instead.
    """
    path = directory / "limit.probe"
    buffer = mmap.mmap(-1, _READ_BYTES)
    view = memoryview(buffer)
    try:
        _write_probe(path, view)
        return _FILE_BYTES / best_seconds(lambda: _read_probe(path, view), repeats=3) / 1e9
    finally:
        view.release()
        buffer.close()
        path.unlink(missing_ok=True)


def matmul_gflops(threads: int) -> float:
    """A float32 matrix product of 1,024³ on `threads` threads, in 10⁹ operations a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left, right, product = (torch.rand(1024, 1024) for _ in range(3))
        # Into memory that is there: fresh pages would be measured as arithmetic.
        seconds = best_seconds(lambda: torch.mm(left, right, out=product), repeats=20)
        return 2 * 1024**3 / seconds / 1e9
    finally:
        torch.set_num_threads(before)


def _write_probe(path: Path, view: memoryview) -> None:
    view[:] = os.urandom(_READ_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for _ in range(_FILE_BYTES // _READ_BYTES):
            os.write(descriptor, view)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_probe(path: Path, view: memoryview) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        for offset in range(0, _FILE_BYTES, _READ_BYTES):
            os.preadv(descriptor, [view], offset)
    finally:
        os.close(descriptor)
