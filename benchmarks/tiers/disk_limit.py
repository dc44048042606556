# SPDX-License-Identifier: Apache-2.0
"""Limits of the disk for blocks of one size: random, O_DIRECT, eight at a time or more.

fio where it is installed; a plain loop of eight threads where it is not. Both overwrite and read
a file that was written once before. A sync follows, or the first sync of the store would wait for
what the limit left in the cache of the disk. It is in the time of what is written durably only. fio
writes all and then syncs once; the loop syncs as the store does: whenever a batch has been written,
while it writes on, all that has been.

Their buffers lie in the slab that the store's blocks lie in. How fast a disk of a virtual machine
is depends on nothing as much:
- Of scattered pages every request has a part for each, of neighbouring pages one for all, and reads
  then are 2.7 times as fast. With buffers of its own a limit is as fast as the pages it chanced
  upon.
- Eight buffers of 256 KiB stay in a processor's cache, where the host finds them 1.5 times as fast
  as in memory. A store has as many buffers as blocks on their way, so its limit has as many.
- 400 requests at a time may be slower than a few. fio gives each of its buffers a request of its
  own and cannot do otherwise; the loop uses all buffers in turn, for any number of requests, so it
  is what tells how many a disk likes best.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

from ...tiers.slab.cpu_slab import CpuSlab
from ..harness.comparison import WrongWork

QUEUE_DEPTH = 8  # at least
READ_DEPTHS = (8, 16, 32)  # requests at a time, of which the best one counts
_LAY_OUT_BYTES = 4 * 1024**2
_TIMEOUT_SECONDS = 300.0


def make_limit(
    choice: str | None, path: Path, block_bytes: int, file_bytes: int, slab: CpuSlab
) -> LoopLimit:
    """`choice` is "fio", "loop" or None for fio where there is one. Buffers are taken from `slab`,
    so nothing in it may be in use while a limit is measured. Raises OSError, and ValueError where
    it is too small."""
    if len(slab.memory()) < QUEUE_DEPTH * block_bytes:
        raise ValueError(
            f"the buffers of the limit take {QUEUE_DEPTH * block_bytes} bytes and the slab has "
            f"{len(slab.memory())}"
        )
    has_fio = choice == "fio" or (choice is None and shutil.which("fio"))
    return (FioLimit if has_fio else LoopLimit)(path, block_bytes, file_bytes // block_bytes, slab)


class LoopLimit:
    """Threads, eight unless told otherwise, each with one request after the other and its share of
    the slab's blocks as buffers. Rates are in bytes a second."""

    name = "loop"

    def __init__(self, path: Path, block_bytes: int, num_blocks: int, slab: CpuSlab) -> None:
        self._path = path
        self._slab = slab
        self._block_bytes = block_bytes
        self.most_buffers = len(slab.memory()) // block_bytes
        self._num_blocks = num_blocks
        _lay_out(path, num_blocks * block_bytes)

    def write(self, num_bytes: int) -> float:
        """Overwrite about so many bytes at random places; bytes a second."""
        return self._loop(os.O_WRONLY, os.pwritev, num_bytes, QUEUE_DEPTH)

    def write_durably(self, num_bytes: int, batch_bytes: int) -> float:
        """The same, with the time in which the bytes reach the disk."""
        return self.write_in_turn(num_bytes, batch_bytes)

    def write_in_turn(self, num_bytes: int, batch_bytes: int) -> float:
        """The same by the loop, also where this limit is fio."""
        return self._loop(os.O_WRONLY, os.pwritev, num_bytes, QUEUE_DEPTH + 1, batch_bytes)

    def read(self, num_bytes: int) -> float:
        """Read about so many bytes at random places; bytes a second."""
        return self.read_in_turn(num_bytes, QUEUE_DEPTH)

    def read_in_turn(self, num_bytes: int, requests: int) -> float:
        """The same by the loop, also where this limit is fio, by so many requests at a time."""
        return self._loop(os.O_RDONLY, os.preadv, num_bytes, requests)

    def close(self) -> None:
        self._path.unlink()

    def _loop(
        self,
        flags: int,
        call: Callable[[int, list[memoryview], int], int],
        num_bytes: int,
        requests: int,
        batch_bytes: int = 0,
    ) -> float:
        """Move the bytes. With `batch_bytes`, one of the threads at a time syncs whenever so much
        was written."""
        buffers = self.most_buffers
        requests = min(requests, buffers)
        count = max(requests, num_bytes // self._block_bytes)
        places = [random.randrange(self._num_blocks) * self._block_bytes for _ in range(count)]
        size = self._block_bytes
        memory = self._slab.memory()
        descriptor = os.open(self._path, flags | os.O_DIRECT)
        moved, synced, syncing = [0] * requests, [0], threading.Lock()

        def work(number: int) -> None:
            own = [memory[i * size : (i + 1) * size] for i in range(number, buffers, requests)]
            for place, buffer in zip(places[number::requests], cycle(own), strict=False):
                moved[number] += call(descriptor, [buffer], place)
                is_due = batch_bytes and sum(moved) - synced[0] >= batch_bytes
                if is_due and syncing.acquire(blocking=False):
                    synced[0] = sum(moved)
                    os.fdatasync(descriptor)
                    syncing.release()

        began = time.perf_counter()
        with ThreadPoolExecutor(requests) as threads:
            list(threads.map(work, range(requests)))
        if batch_bytes:
            os.fdatasync(descriptor)
        seconds = time.perf_counter() - began
        os.close(descriptor)
        _sync(self._path)
        if sum(moved) != count * self._block_bytes:
            raise WrongWork(f"{sum(moved)} of {count * self._block_bytes} bytes were moved")
        return sum(moved) / seconds


class FioLimit(LoopLimit):
    """fio with libaio, its queue as deep as it has buffers."""

    name = "fio"

    def write(self, num_bytes: int) -> float:
        return self._fio("write", num_bytes)

    def write_durably(self, num_bytes: int, batch_bytes: int) -> float:
        return self._fio("write", num_bytes, durable=True)

    def read(self, num_bytes: int) -> float:
        return self._fio("read", num_bytes)

    def _fio(self, direction: str, num_bytes: int, *, durable: bool = False) -> float:
        command = [
            "fio",
            "--name=limit",
            f"--filename={self._path}",
            f"--rw=rand{direction}",
            f"--bs={self._block_bytes}",
            f"--size={self._num_blocks * self._block_bytes}",
            f"--io_size={num_bytes // self._block_bytes * self._block_bytes}",
            f"--iodepth={self.most_buffers}",
            "--ioengine=libaio",
            "--direct=1",
            "--norandommap=1",
            f"--mem=mmapshared:/proc/self/fd/{self._slab.fd}",
            "--iomem_align=0",  # fio adds it to where the memory begins
            "--randrepeat=0",
            "--output-format=json",
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            pass_fds=(self._slab.fd,),
        )
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise WrongWork(f"fio ended with status {done.returncode}: {' '.join(lines[-1:])}")
        seconds = _sync(self._path) * durable
        # Warnings of fio may stand before the JSON.
        result = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]
        return float(result["io_bytes"] / (max(1, result["runtime"]) / 1e3 + seconds))


def _sync(path: Path) -> float:
    """Sync the file; return the seconds that it takes."""
    descriptor, began = os.open(path, os.O_RDWR), time.perf_counter()
    try:
        os.fdatasync(descriptor)
        return time.perf_counter() - began
    finally:
        os.close(descriptor)


def _lay_out(path: Path, num_bytes: int) -> None:
    """Write the file once: the first write of a place costs more than every later one."""
    with mmap.mmap(-1, _LAY_OUT_BYTES) as memory, memoryview(memory) as view:
        view[:] = os.urandom(_LAY_OUT_BYTES)  # zeros would flatter a disk that compresses
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            for offset in range(0, num_bytes, _LAY_OUT_BYTES):
                os.pwritev(descriptor, [view[: num_bytes - offset]], offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
