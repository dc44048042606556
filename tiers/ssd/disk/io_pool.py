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

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from .io_lane import NO_PAGES, IoLane, Work
from .slot_file import SlotFile, runs

log = logging.getLogger(__name__)

_T = TypeVar("_T")

GRACE_SECONDS = 1.0  # for what has begun when the time to close is over
_MOST_LANES = 2  # that may fail before what waits for one fails too


class IoPool:
    """`threads` threads, all started at once, so that no call can fail for want of one. About
    `flight_bytes` are under way at a time, in all of them."""

    def __init__(self, slot_file: SlotFile, threads: int, name: str, flight_bytes: int) -> None:
        self._slot_file = slot_file
        self._shares: deque[tuple[Work, list[range]]] = deque()
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # False ends a thread
        self._lane_bytes = flight_bytes // threads
        self._is_blocking = False  # as lanes found it, which are opened by their threads
        self._error = Exception("no I/O thread of the SSD tier has failed")  # the last one
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

    def end(self) -> None:
        """Let the threads end after what has been started. No `start` may follow."""
        for _ in self._threads:
            self._tokens.put(False)

    def close(self, deadline: float) -> bool:
        """Let the threads end and wait for them; False if one has not ended by `deadline`
        (monotonic)."""
        self.end()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        lane = self._try(self._open_lane)
        while self._tokens.get():
            lane = self._serve(lane)
        if lane is not None:
            lane.close()

    def _serve(self, lane: IoLane | None) -> IoLane | None:
        """Work until there is nothing to do, whatever happens; the lane to go on with."""
        for _ in range(_MOST_LANES):
            lane = lane or self._try(self._open_lane)
            if lane is None:
                break
            if self._try(partial(self._drain, lane)):
                return lane
            held = lane.in_hand()
            self._try(lane.close)
            self._give_up(held)
            lane = None
        while (share := self._next_share()) is not None:  # for the other threads may sleep
            self._give_up([(share[0], run) for run in share[1]])
        return None

    def _open_lane(self) -> IoLane:
        lane = IoLane(self._slot_file, self._lane_bytes)
        self._is_blocking |= lane.is_blocking
        return lane

    def _drain(self, lane: IoLane) -> bool:
        """Work until there is no share to take and nothing in hand."""
        while True:
            while lane.has_room and (share := self._next_share()) is not None:
                lane.take(*share)
            if not lane.is_busy:
                return True
            lane.turn()

    def _next_share(self) -> tuple[Work, list[range]] | None:
        try:
            return self._shares.popleft()
        except IndexError:  # there is none, or somebody was quicker
            return None

    def _try(self, call: Callable[[], _T]) -> _T | None:
        """The last resort of a thread: what it returns, None for whatever it raises."""
        try:
            return call()
        except Exception as error:
            self._error = error
            log.exception("an I/O thread of the SSD tier failed; what it had in hand fails with it")
            return None

    def _give_up(self, held: list[tuple[Work, range]]) -> None:
        """End these with the last error. A run that its work wants to try anew fails again."""
        while held:
            work, run = held.pop()
            done = [(run, NO_PAGES, self._error)]
            again = self._try(partial(work.finish, done)) or ()
            held += ((work, each) for each in again)


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
