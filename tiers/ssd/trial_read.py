# SPDX-License-Identifier: Apache-2.0
"""Measures the read speed of an SSD store's disk by reading some of the store's blocks."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence

from ..base import ReadSample
from ..block import BlockLayout
from .disk.disk_queue import DiskQueue
from .disk.io_pool import GRACE_SECONDS, Done, IoPool
from .disk.slot_file import Scratch, SlotFile

TRIAL_BYTES = 16 * 1024**2


def trial_read(
    slot_file: SlotFile, layout: BlockLayout, slots: Sequence[int], threads: int, seconds: float
) -> ReadSample | None:
    """Read `slots` and return the bytes and seconds of the read. No index, checksum or counter is
    used. `threads` threads read runs of neighbouring slots, as loads do. The bytes are discarded,
    so the store may write to the slots meanwhile. Waits at most `seconds` for the reads; a read
    that hangs blocks only its own thread. None if a read fails or no read ends in time."""
    if not slots:
        return None
    trial = _Trial(slot_file, layout, sorted(slots))
    pool = IoPool(slot_file, threads, "stratakv-ssd-trial", TRIAL_BYTES)
    began = time.monotonic()
    pool.start(trial.slots, trial)
    trial.over.wait(seconds)
    took = time.monotonic() - began
    failed = trial.stop()
    pool.close(time.monotonic() + (0.0 if failed or not trial.over.is_set() else GRACE_SECONDS))
    return ReadSample(trial.num_bytes, took) if trial.num_bytes and not failed else None


class _Trial:
    """The state of one trial. `over` is set when all slots are read or a read has failed."""

    def __init__(self, slot_file: SlotFile, layout: BlockLayout, slots: Sequence[int]) -> None:
        self.slots = slots
        self.over = threading.Event()
        self.num_bytes = 0
        self._slot_file = slot_file
        self._layout = layout
        self._memory = memoryview(mmap.mmap(-1, len(slots) * layout.slot_bytes))
        self._lock = threading.Lock()
        self._ended = 0
        self._stopped = False
        self._failed = False

    def stop(self) -> bool:
        """Start no more reads, and ignore later results. Return whether a read has failed."""
        with self._lock:
            self._stopped = True
            return self._failed

    def prepare_run(self, run: range, scratch: Scratch) -> None:
        """Do nothing: a read needs no preparation."""

    def start(self, run: range, scratch: Scratch, disk: DiskQueue, number: int) -> None:
        if self._stopped:
            raise TimeoutError("the trial is over")
        payloads = self._payloads(run)
        self._slot_file.start_read(disk, number, self.slots[run.start], payloads, scratch)

    def complete_runs(self, done: Sequence[Done]) -> tuple[()]:
        with self._lock:
            for run, scratch, result in done:
                self._ended += len(run)
                if self._stopped:
                    continue
                if isinstance(result, Exception):
                    self._failed = True
                    continue
                whole = self._slot_file.take_read(result, self._payloads(run), scratch)
                self.num_bytes += whole * self._layout.page_bytes
            if self._failed or self._ended == len(self.slots):
                self.over.set()
        return ()

    def _payloads(self, run: range) -> list[memoryview]:
        size = self._layout.slot_bytes
        places = (self._memory[i * size : (i + 1) * size] for i in run)
        return [place[: self._layout.page_bytes] for place in places]
