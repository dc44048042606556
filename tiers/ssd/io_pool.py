# SPDX-License-Identifier: Apache-2.0
"""Threads that move runs of neighbouring slots, each several at a time: together, the depth of the
queue that the disk sees.

A batch is cut into shares as large as a run: waking another thread costs as much as writing a small
block, so scattered blocks go over together, and a small batch to few threads. A thread begins as
many runs as fit into its part of the bytes under way, looks at whichever come back while the disk
goes on with the others, and takes the next share before the last one is over. Knows nothing of what
is done with a run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from .io_lane import IoLane, Work
from .slot_file import SlotFile, runs

GRACE_SECONDS = 1.0  # for what has begun when the time to close is over


class IoPool:
    """`threads` threads, all started at once, so that no call can fail for want of one. About
    `flight_bytes` are under way at a time, in all of them."""

    def __init__(self, slot_file: SlotFile, threads: int, name: str, flight_bytes: int) -> None:
        self._slot_file = slot_file
        self._tasks: SimpleQueue[tuple[Work, list[range]] | None] = SimpleQueue()
        self._lane_bytes = flight_bytes // threads
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, slots: Sequence[int], work: Work, *, singly: bool = False) -> None:
        """Have `work` done on the runs of the ascending `slots`, or on each slot by itself. Never
        waits."""
        longest = self._slot_file.run_slots
        found = runs(slots, 1 if singly else longest)
        for part in shares(found, longest):
            self._tasks.put((work, part))

    def close(self, deadline: float) -> bool:
        """Let the threads end after what has been started; False if one has not by `deadline`
        (monotonic). No `start` may follow."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        lane = IoLane(self._slot_file, self._lane_bytes)
        try:
            while (task := self._tasks.get()) is not None:
                lane.take(*task)
                del task  # or the last batch's buffers would live until the next one
                if self._is_over(lane):
                    break
        finally:
            lane.close()

    def _is_over(self, lane: IoLane) -> bool:
        """Work until there is nothing in hand; whether the end was met on the way."""
        is_over = False
        while lane.is_busy:
            while not is_over and lane.has_room:
                try:
                    task = self._tasks.get_nowait()
                except Empty:
                    break
                if task is None:
                    is_over = True
                else:
                    lane.take(*task)
                del task
            lane.turn()
        return is_over


def shares(found: Sequence[range], longest: int) -> list[list[range]]:
    """Runs in groups of about `longest` slots. No run is cut."""
    groups: list[list[range]] = []
    room = 0
    for run in found:
        if room < len(run):
            groups.append([])
            room = longest
        groups[-1].append(run)
        room -= len(run)
    return groups
