# SPDX-License-Identifier: Apache-2.0
"""Threads that work on runs of neighbouring slots, several runs at a time: the depth of the queue
that the disk sees.

A batch is cut into shares, each a few runs long: a hop to another thread costs as much as writing
a small block, so scattered blocks go over together. Knows nothing of what is done with a run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from .slot_file import Scratch, SlotFile, runs

GRACE_SECONDS = 1.0  # for what has begun when the time to close is over

# Takes runs, as positions in the batch, and the thread's own pages. Must not raise.
Work = Callable[[list[range], Scratch], None]


class IoPool:
    """`threads` threads, all started at once, so that no call can fail for want of one."""

    def __init__(self, slot_file: SlotFile, threads: int, name: str) -> None:
        self._slot_file = slot_file
        self._tasks: SimpleQueue[tuple[Work, list[range]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, slots: Sequence[int], work: Work) -> int:
        """Have `work` called for every share of the ascending `slots`; how many shares there are.
        Never waits."""
        longest = self._slot_file.run_slots
        parts = shares(runs(slots, longest), len(self._threads), longest)
        for part in parts:
            self._tasks.put((work, part))
        return len(parts)

    def close(self, deadline: float) -> bool:
        """Let the threads end after what has been started; False if one has not by `deadline`
        (monotonic). No `start` may follow."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        scratch = self._slot_file.scratch()
        while (task := self._tasks.get()) is not None:
            work, part = task
            work(part, scratch)
            del task, work  # or the last batch's buffers would live until the next one


def shares(found: Sequence[range], threads: int, longest: int) -> list[list[range]]:
    """Runs in groups of about `longest` slots, smaller where there would be fewer than `threads`
    groups. No run is cut."""
    size = min(longest, -(-sum(len(run) for run in found) // threads))
    groups: list[list[range]] = []
    room = 0
    for run in found:
        if room < len(run):
            groups.append([])
            room = size
        groups[-1].append(run)
        room -= len(run)
    return groups
