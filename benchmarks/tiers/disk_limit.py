# SPDX-License-Identifier: Apache-2.0
"""Limits of the disk for blocks of one size: random I/O with O_DIRECT and concurrent requests.

The limit is fio, if installed, or else a loop in eight threads. fio or the loop overwrites and
reads a file that has been written once. Each run ends with a sync, because otherwise the store's
first sync would wait for the limit's bytes in the disk's cache. The time of the sync counts only
for durable writes. fio writes everything and then syncs once. Like the store, the loop syncs after
each batch, during further writes.

The buffers of a limit are in the same slab as the store's blocks, because on a virtual machine the
buffers determine the speed of a disk:
- A request to scattered pages has a part for each page; a request to adjacent pages has one part,
  with which reads are 2.7 times as fast. The pages of separate buffers would be random.
- Eight buffers of 256 KiB stay in a processor's cache, which the host reads 1.5 times as fast as
  memory. So the limit has as many buffers as the store.
- 400 concurrent requests may be slower than a few requests. fio needs a request for each buffer.
  The loop uses all buffers in turn with any number of requests, so it finds the best number."""

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

QUEUE_DEPTH = 8  # the smallest number of concurrent requests
READ_DEPTHS = (8, 16, 32)  # numbers of concurrent requests, of which the fastest is the limit
_LAY_OUT_BYTES = 4 * 1024**2
_TIMEOUT_SECONDS = 300.0


def make_limit(
    choice: str | None, path: Path, block_bytes: int, file_bytes: int, slab: CpuSlab
) -> LoopLimit:
    """Return the limit named `choice` ("fio" or "loop"; for None, fio if it is installed). The
    limit's buffers are in `slab`, which must not be used while a limit is measured. Raises OSError,
    and ValueError if the slab is too small."""
    if len(slab.memory()) < QUEUE_DEPTH * block_bytes:
        raise ValueError(
            f"the buffers of the limit take {QUEUE_DEPTH * block_bytes} bytes and the slab has "
            f"{len(slab.memory())}"
        )
    has_fio = choice == "fio" or (choice is None and shutil.which("fio"))
    return (FioLimit if has_fio else LoopLimit)(path, block_bytes, file_bytes // block_bytes, slab)


class LoopLimit:
    """A limit by threads, eight by default. Each thread makes one request after the other, with its
    share of the slab's blocks as buffers. Rates are in bytes per second."""

    name = "loop"

    def __init__(self, path: Path, block_bytes: int, num_blocks: int, slab: CpuSlab) -> None:
        self._path = path
        self._slab = slab
        self._block_bytes = block_bytes
        self.most_buffers = len(slab.memory()) // block_bytes
        self._num_blocks = num_blocks
        _lay_out(path, num_blocks * block_bytes)

    def write(self, num_bytes: int) -> float:
        """Overwrite about `num_bytes` at random places; return bytes per second."""
        return self._loop(os.O_WRONLY, os.pwritev, num_bytes, QUEUE_DEPTH)

    def write_durably(self, num_bytes: int, batch_bytes: int) -> float:
        """Overwrite about `num_bytes` and sync; return bytes per second, including the syncs."""
        return self.write_in_turn(num_bytes, batch_bytes)

    def write_in_turn(self, num_bytes: int, batch_bytes: int) -> float:
        """Write durably by the loop, even if the limit is fio; return bytes per second."""
        return self._loop(os.O_WRONLY, os.pwritev, num_bytes, QUEUE_DEPTH + 1, batch_bytes)

    def read(self, num_bytes: int) -> float:
        """Read about `num_bytes` at random places; return bytes per second."""
        return self.read_in_turn(num_bytes, QUEUE_DEPTH)

    def read_in_turn(self, num_bytes: int, requests: int) -> float:
        """Read by the loop, even if the limit is fio, with `requests` concurrent requests."""
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
        """Read or write about `num_bytes`; return bytes per second. With `batch_bytes`, one thread
        at a time syncs after so many written bytes."""
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
    """A limit by fio with libaio, with one request in the queue for each buffer."""

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
            "--iomem_align=0",  # fio adds the alignment to the start of the memory
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
        # fio may print warnings before the JSON.
        result = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]
        return float(result["io_bytes"] / (max(1, result["runtime"]) / 1e3 + seconds))


def _sync(path: Path) -> float:
    """Sync the file; return the seconds of the sync."""
    descriptor, began = os.open(path, os.O_RDWR), time.perf_counter()
    try:
        os.fdatasync(descriptor)
        return time.perf_counter() - began
    finally:
        os.close(descriptor)


def _lay_out(path: Path, num_bytes: int) -> None:
    """Write the file once, because the first write to a place is slower than later writes."""
    with mmap.mmap(-1, _LAY_OUT_BYTES) as memory, memoryview(memory) as view:
        view[:] = os.urandom(_LAY_OUT_BYTES)  # not zeros, with which a compressing disk is too fast
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            for offset in range(0, num_bytes, _LAY_OUT_BYTES):
                os.pwritev(descriptor, [view[: num_bytes - offset]], offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
