# SPDX-License-Identifier: Apache-2.0
"""IoPool: threads that read and write runs of neighbouring slots. Each thread has several requests
at the disk at the same time, so that the queue of the disk stays full.

    start ──► shares, each as large as a run ◄── taken by every thread that is awake and has room
          ──► a token for one thread that sleeps

Each thread has an `IoLane`, which starts as many runs as the thread's limit of bytes allows. While
the disk works on these runs, the thread processes finished runs and takes the next share. A batch
wakes only one thread, because one thread can keep a disk busy. More threads would take processors
from the engine, and slow its steps as much as the writes themselves do. Several batches wake
several threads. One batch also wakes several threads if its blocks take long to encode or verify
(`spread`), or if every request blocks its thread (`BlockingQueue`). A `Work` prepares, starts and
completes the runs of a batch."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

from .disk_queue import DEPTH, DiskQueue, Result
from .slot_file import RUN_BYTES, Scratch, SlotFile

log = logging.getLogger(__name__)
_T = TypeVar("_T")
GRACE_SECONDS = 1.0  # extra time for requests under way at the deadline of `close`
_MOST_LANES = 2  # lanes that may fail before waiting shares fail too
# The most runs in a lane: DEPTH with the disk, and as many that are prepared or finished.
_HELD = 2 * DEPTH

# An ended run: positions, pages and result. The pages of a failed run have no meaning.
Done = tuple[range, Scratch, Result]

# A placeholder for the pages of a run, if no pages could be allocated.
NO_PAGES = Scratch(1, 0)


class Work(Protocol):
    """The work on the runs of one batch. A run is a range of positions in the batch. Several
    threads call a `Work` at once. An exception of `prepare_run` or `start` is the run's result."""

    def prepare_run(self, run: range, scratch: Scratch) -> None:
        """Prepare the run before its disk request, for example hash and encode its blocks."""

    def start(self, run: range, scratch: Scratch, disk: DiskQueue, number: int) -> None:
        """Start the disk request for a prepared run, under request number `number`."""

    def complete_runs(self, done: Sequence[Done]) -> Iterable[range]:
        """Process the results of finished runs. Return runs to start again. Must not raise."""


class IoLane:
    """The runs that one thread works on. Each run passes through three stages:

        prepared ──► with the disk ──► finished
        headers and   at most DEPTH,    checked,
        checksums     `most_bytes`      answered

    A disk may finish all its runs at the same moment (the disk of a small virtual machine does so
    whenever its queue runs empty). So the lane first submits prepared runs to the disk, and then
    processes finished runs while the disk works. The disk has at most `most_bytes` at a time, or
    one larger run."""

    def __init__(self, slot_file: SlotFile, most_bytes: int) -> None:
        self._slot_file = slot_file
        self._record_bytes = slot_file.record_bytes
        self._most_bytes = most_bytes
        self._disk = slot_file.open_queue(_HELD)
        self._scratches: dict[int, Scratch] = {}
        self._free = list(range(_HELD))  # free request numbers; the last is used next
        self._waiting: deque[tuple[Work, range]] = deque()
        self._ready: deque[tuple[int, Work, range]] = deque()
        self._ready_bytes = 0
        self._flying: dict[int, tuple[Work, range]] = {}
        self._flying_bytes = 0
        self._failed: list[tuple[Work, Done, int]] = []  # failed before the disk
        self._done: list[tuple[Work, Done, int]] = []  # ended, not completed

    @property
    def is_blocking(self) -> bool:
        """Whether each request blocks the thread until the disk has finished the request."""
        return self._disk.is_blocking

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._ready or self._flying or self._failed)

    @property
    def has_room(self) -> bool:
        return not self._waiting and self._has_room()

    def submit_runs(self, work: Work, found: Iterable[range]) -> None:
        """Queue the runs `found`, and start as many as the lane has room for."""
        self._waiting.extend((work, run) for run in found)
        self._prepare()

    def turn(self) -> None:
        """Wait until a run ends, and move runs to their next stages. The lane must be busy."""
        ended: list[tuple[int, Result]] = []
        if self._flying and not self._failed:
            ended = self._disk.wait_completions()
        self._done += self._failed
        self._failed = []
        for number, result in ended:
            work, run = self._flying.pop(number)
            self._flying_bytes -= self._bytes_of(run)
            self._done.append((work, (run, self._scratches[number], result), number))
        self._launch()
        self._finish()
        self._prepare()

    def in_hand(self) -> list[tuple[Work, range]]:
        """Return every run that the lane has not completed, for a caller that closes the lane
        early. The disk may still read or write these runs until the lane is closed."""
        held = [(work, run) for work, (run, _, _), _ in [*self._done, *self._failed]]
        held += ((work, run) for _, work, run in self._ready)
        return [*held, *self._flying.values(), *self._waiting]

    def close(self) -> None:
        """Close the disk queue, after waiting for requests that the disk has not finished."""
        self._disk.close()

    def _prepare(self) -> None:
        """Prepare waiting runs while the lane has room, and submit them if the disk has room."""
        while self._waiting and self._has_room():
            work, run = self._waiting.popleft()
            number, scratch = self._free.pop(), NO_PAGES
            try:
                scratch = self._scratch(number)
                work.prepare_run(run, scratch)
            except Exception as error:  # noqa: BLE001 - the batch must end whatever happens
                self._failed.append((work, (run, scratch, error), number))
                continue
            self._ready.append((number, work, run))
            self._ready_bytes += self._bytes_of(run)
            if self._fits(self._ready_bytes) and self._ready_bytes >= self._slot_file.run_bytes:
                self._launch()
        self._launch()

    def _launch(self) -> None:
        """Start prepared runs while the disk has room. Submit the first request at once."""
        unsent = RUN_BYTES
        while self._ready and self._fits(self._bytes_of(self._ready[0][2])):
            number, work, run = self._ready.popleft()
            self._ready_bytes -= self._bytes_of(run)
            try:
                work.start(run, self._scratches[number], self._disk, number)
            except Exception as error:  # noqa: BLE001 - the batch must end whatever happens
                self._failed.append((work, (run, self._scratches[number], error), number))
                continue
            self._flying[number] = (work, run)
            self._flying_bytes += self._bytes_of(run)
            unsent += self._bytes_of(run)
            if unsent >= RUN_BYTES:
                self._disk.submit()
                unsent = 0
        self._disk.submit()

    def _finish(self) -> None:
        """Pass the finished runs to their `Work`, and free their request numbers."""
        by_work: defaultdict[int, list[Done]] = defaultdict(list)
        works: dict[int, Work] = {}
        for work, each, _ in self._done:
            works[id(work)] = work
            by_work[id(work)].append(each)
        for name, work in works.items():
            again = work.complete_runs(by_work[name])
            self._waiting.extendleft((work, run) for run in again)
            self._free += (number for other, _, number in self._done if other is work)
            self._done = [each for each in self._done if each[0] is not work]

    def _has_room(self) -> bool:
        has_space = not self._ready or self._ready_bytes < self._most_bytes
        return has_space and bool(self._free)

    def _fits(self, size: int) -> bool:
        if not self._flying:
            return True
        return len(self._flying) < DEPTH and self._flying_bytes + size <= self._most_bytes

    def _bytes_of(self, run: range) -> int:
        return len(run) * self._record_bytes

    def _scratch(self, number: int) -> Scratch:
        if number not in self._scratches:
            self._scratches[number] = self._slot_file.scratch()
        return self._scratches[number]


class IoPool:
    """A pool of `threads` threads. The constructor starts all threads, so that no later call fails
    because a thread cannot be started. All threads together read or write about `flight_bytes` at a
    time. Raises RuntimeError if a thread cannot be started, and ends the started threads."""

    def __init__(self, slot_file: SlotFile, threads: int, name: str, flight_bytes: int) -> None:
        self._slot_file = slot_file
        self._shares: deque[tuple[Work, list[range]]] = deque()
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # False ends a thread
        self._lane_bytes = flight_bytes // threads
        self._is_blocking = False  # set by threads, when they open lanes
        self._error = Exception("no I/O thread of the SSD tier has failed")  # the last error
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # no more threads can be started
            self.stop_workers()
            raise

    def start(
        self, slots: Sequence[int], work: Work, *, singly: bool = False, spread: bool = False
    ) -> None:
        """Start `work` on the runs of the ascending `slots`, or with `singly` on each slot by
        itself. Wake one thread, or with `spread` one thread for each share. Never waits."""
        longest = self._slot_file.run_slots
        found = runs(slots, 1 if singly else longest)
        parts = shares(found, longest)
        self._shares.extend((work, part) for part in parts)
        for _ in parts if spread or self._is_blocking else parts[:1]:
            self._tokens.put(True)

    def stop_workers(self) -> None:
        """End the threads when all started work is done. `start` must not be called afterwards."""
        for _ in self._threads:
            self._tokens.put(False)

    def close(self, deadline: float) -> bool:
        """End the threads and wait. Return False if a thread runs at `deadline` (monotonic)."""
        self.stop_workers()
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
        """Process shares until no share is left, also after errors. Return the lane to use next."""
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
        while (share := self._next_share()) is not None:  # other threads may sleep
            self._give_up([(share[0], run) for run in share[1]])
        return None

    def _open_lane(self) -> IoLane:
        lane = IoLane(self._slot_file, self._lane_bytes)
        self._is_blocking |= lane.is_blocking
        return lane

    def _drain(self, lane: IoLane) -> bool:
        """Process shares until no share is left and all runs of the lane have ended."""
        while True:
            while lane.has_room and (share := self._next_share()) is not None:
                lane.submit_runs(*share)
            if not lane.is_busy:
                return True
            lane.turn()

    def _next_share(self) -> tuple[Work, list[range]] | None:
        try:
            return self._shares.popleft()
        except IndexError:  # no share is left for this thread
            return None

    def _try(self, call: Callable[[], _T]) -> _T | None:
        """Return the result of `call`. If `call` raises, log the exception and return None."""
        try:
            return call()
        except Exception as error:
            self._error = error
            log.exception("an I/O thread of the SSD tier failed; what it had in hand fails with it")
            return None

    def _give_up(self, held: list[tuple[Work, range]]) -> None:
        """Fail the runs `held` with the last error, and also runs that `complete_runs` returns."""
        while held:
            work, run = held.pop()
            done = [(run, NO_PAGES, self._error)]
            again = self._try(partial(work.complete_runs, done)) or ()
            held += ((work, each) for each in again)


def shares(found: Sequence[range], longest: int) -> list[list[range]]:
    """Group runs into shares of about `longest` slots each. No run is cut."""
    groups: list[list[range]] = []
    room = 0
    for run in found:
        if room < len(run):
            groups.append([])
            room = longest
        groups[-1].append(run)
        room -= len(run)
    return groups


def runs(slots: Sequence[int], longest: int) -> list[range]:
    """Return the runs of neighbours in the ascending `slots`, at most `longest` slots in a run."""
    found: list[range] = []
    start = 0
    for position in range(1, len(slots) + 1):
        ends = position == len(slots) or slots[position] != slots[position - 1] + 1
        if ends or position - start == longest:
            found.append(range(start, position))
            start = position
    return found
