# SPDX-License-Identifier: Apache-2.0
"""Threads that move runs of neighbouring slots, each several at a time: together, the depth of the
queue that the disk sees.

    start ──► shares, each as large as a run ◄── taken by every thread that is awake and has room
          ──► a token for one thread that sleeps

A thread begins as many runs as fit into its part of the bytes under way, looks at whichever come
back while the disk goes on with the others, and takes the next share before the last one is over.
One thread keeps a disk busy with one batch, so one is woken: the others would take processors from
whoever computes, which cost steps of an engine as much as the writing itself. Several batches wake
several, and so does one whose blocks are dear to prepare or to check, or whose threads wait
for each request. Knows nothing of what is done with a run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

from .io_lane import IoLane, Work
from .slot_file import SlotFile, runs

GRACE_SECONDS = 1.0  # for what has begun when the time to close is over


class IoPool:
    """`threads` threads, all started at once, so that no call can fail for want of one. About
    `flight_bytes` are under way at a time, in all of them."""

    def __init__(self, slot_file: SlotFile, threads: int, name: str, flight_bytes: int) -> None:
        self._slot_file = slot_file
        self._shares: deque[tuple[Work, list[range]]] = deque()
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # False ends a thread
        self._lane_bytes = flight_bytes // threads
        self._is_blocking = False  # as lanes found it, which are opened by their threads
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(
        self, slots: Sequence[int], work: Work, *, singly: bool = False, spread: bool = False
    ) -> None:
        """Have `work` done on the runs of the ascending `slots`, or on each slot by itself; spread
        over all threads, or by those that are awake and one more. Never waits."""
        longest = self._slot_file.run_slots
        found = runs(slots, 1 if singly else longest)
        parts = shares(found, longest)
        self._shares.extend((work, part) for part in parts)
        for _ in parts if spread or self._is_blocking else parts[:1]:
            self._tokens.put(True)

    def close(self, deadline: float) -> bool:
        """Let the threads end after what has been started; False if one has not by `deadline`
        (monotonic). No `start` may follow."""
        for _ in self._threads:
            self._tokens.put(False)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        lane = IoLane(self._slot_file, self._lane_bytes)
        self._is_blocking |= lane.is_blocking
        try:
            while self._tokens.get():
                self._drain(lane)
        finally:
            lane.close()

    def _drain(self, lane: IoLane) -> None:
        """Work until there is no share to take and nothing in hand."""
        while True:
            while lane.has_room and self._shares:
                try:
                    lane.take(*self._shares.popleft())
                except IndexError:  # somebody was quicker
                    break
            if not lane.is_busy:
                return
            lane.turn()


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
