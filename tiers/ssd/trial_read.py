# SPDX-License-Identifier: Apache-2.0
"""A few records read to see how quick the disk is, past index, checks and counters.

What is read is looked at by nobody, so slots may be written meanwhile. Knows nothing of what the
answer is for.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Sequence

from ..base import ReadSample
from ..block import BlockLayout
from .slot_file import SlotFile, runs

TRIAL_BYTES = 16 * 1024**2


def trial_read(
    slot_file: SlotFile, layout: BlockLayout, slots: Sequence[int], threads: int, seconds: float
) -> ReadSample | None:
    """Read these slots, in runs as loads do, by so many threads; None where the disk is late or
    fails. Waits for `seconds` at most; a read that hangs keeps its thread, and nothing else."""
    slots = sorted(slots)
    work = deque(runs(slots, slot_file.run_slots))
    read: list[int] = []  # bytes of each run
    stop = threading.Event()

    def run() -> None:
        scratch = slot_file.scratch()
        memory = memoryview(mmap.mmap(-1, slot_file.run_slots * layout.slot_bytes))
        size = layout.slot_bytes
        while not stop.is_set():
            try:
                positions = work.popleft()
            except IndexError:  # all are read, or about to be
                return
            first, count = slots[positions.start], len(positions)
            buffers = [memory[i * size : (i + 1) * size][: layout.page_bytes] for i in range(count)]
            try:
                whole = slot_file.read(first, buffers, scratch)
            except OSError:
                stop.set()
                return
            read.append(whole * layout.page_bytes)

    began = time.monotonic()
    readers = [
        threading.Thread(target=run, name="stratakv-ssd-trial", daemon=True)
        for _ in range(min(threads, len(work)))
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(max(0.0, began + seconds - time.monotonic()))
    took = time.monotonic() - began
    failed = stop.is_set()
    stop.set()
    num_bytes = sum(read)
    return ReadSample(num_bytes, took) if num_bytes and not failed else None
