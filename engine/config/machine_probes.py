# SPDX-License-Identifier: Apache-2.0
"""Measures rates of this machine: memory copies, disk reads, matrix multiplications.

Each probe takes some tenths of a second and returns the rate of its fastest try, because only a try
without other load on the machine shows the limit of the hardware."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ..models.layers import Linear

_TRIES = 5
_COPY_BYTES = 64 * 2**20
_FILE_BYTES = 64 * 2**20
_READ_BYTES = 4 * 2**20
_MATRIX_ROWS = 1024


def memory_copy_bytes_per_second() -> float:
    """Return how fast one thread copies 64 MiB, which is more than most CPU caches hold."""
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.zeros(_COPY_BYTES, np.uint8)
    return _COPY_BYTES / _best_seconds(lambda: np.copyto(target, source))


def disk_read_bytes_per_second(directory: Path) -> float:
    """Return how fast one thread reads a new 64 MiB file under `directory`, in pieces of 4 MiB and
    without the page cache. The file is removed. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix="stratakv-probe-", dir=directory) as folder:
        path = Path(folder) / "probe"
        with mmap.mmap(-1, _READ_BYTES) as buffer, memoryview(buffer) as view:
            _write_file(path, view)
            return _FILE_BYTES / _best_seconds(lambda: _read_file(path, view))


def multiply_operations_per_second() -> float:
    """Return the rate of the float32 product of two square matrices, with all threads of torch and
    torch's fastest library. On some processors `torch.mm` reaches less than half of this rate."""
    left, right = (torch.rand(_MATRIX_ROWS, _MATRIX_ROWS) for _ in range(2))
    multiply = Linear(right)
    with torch.inference_mode():
        return 2 * _MATRIX_ROWS**3 / _best_seconds(lambda: multiply(left))


def _best_seconds(work: Callable[[], object]) -> float:
    """Run `work` once to warm up, then a few times, and return the seconds of the fastest run."""
    work()
    best = float("inf")
    for _ in range(_TRIES):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def _write_file(path: Path, view: memoryview) -> None:
    view[:] = os.urandom(_READ_BYTES)  # a disk may compress zeros, but not random bytes
    with path.open("xb", buffering=0) as file:
        for _ in range(_FILE_BYTES // _READ_BYTES):
            file.write(view)
        os.fsync(file.fileno())


def _read_file(path: Path, view: memoryview) -> None:
    """Read a file with O_DIRECT; without O_DIRECT, drop the file's cached pages first."""
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
