# SPDX-License-Identifier: Apache-2.0
"""The runs that one thread has in hand, on their way through three stations:

    prepared ──► with the disk ──► finished
    headers and   at most DEPTH,    checked,
    checksums     `most_bytes`      answered

A disk may give back everything it had at once (the one of a small virtual machine does, whenever it
has run dry). So what is prepared goes to it before what came back is looked at, and it works while
the thread does.

Knows nothing of what is done with a run, or of where the next ones come from.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from .disk_queue import DEPTH, DiskQueue, Result
from .slot_file import RUN_BYTES, Scratch, SlotFile

# Runs in hand: with the disk, and as many before or behind it.
_HELD = 2 * DEPTH

# One run that has ended: its positions, its pages, and what it brought. The pages of a run that
# failed say nothing.
Done = tuple[range, Scratch, Result]

# Stands for the pages of a run that could get none.
NO_PAGES = Scratch(1, 0)


class Work(Protocol):
    """What is done with the runs of one batch, which are positions in it, by several threads at
    once. What `prepare` and `start` raise is the result of the run."""

    def prepare(self, run: range, scratch: Scratch) -> None:
        """Do what has to be done before the disk is."""

    def start(self, run: range, scratch: Scratch, disk: DiskQueue, number: int) -> None:
        """Start the request of this number for a run that is prepared."""

    def finish(self, done: Sequence[Done]) -> Iterable[range]:
        """Take what some runs brought; runs to begin anew. Must not raise."""


class IoLane:
    """Belongs to one thread. The disk has no more than `most_bytes` of it at a time, or one run."""

    def __init__(self, slot_file: SlotFile, most_bytes: int) -> None:
        self._slot_file = slot_file
        self._most_bytes = most_bytes
        self._disk = slot_file.open_queue(_HELD)
        self._scratches: dict[int, Scratch] = {}
        self._free = list(range(_HELD))  # numbers; the last one is the next to be used
        self._waiting: deque[tuple[Work, range]] = deque()
        self._ready: deque[tuple[int, Work, range]] = deque()
        self._ready_bytes = 0
        self._flying: dict[int, tuple[Work, range]] = {}
        self._flying_bytes = 0
        self._failed: list[tuple[Work, Done, int]] = []  # that did not get to the disk
        self._done: list[tuple[Work, Done, int]] = []  # that have ended and are not handed back yet

    @property
    def is_blocking(self) -> bool:
        """Whether the disk has one run of it at a time."""
        return self._disk.is_blocking

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._ready or self._flying or self._failed)

    @property
    def has_room(self) -> bool:
        """True where another run would be prepared at once."""
        return not self._waiting and self._has_room()

    def take(self, work: Work, found: Iterable[range]) -> None:
        """Have these runs worked on, and begin those that fit."""
        self._waiting.extend((work, run) for run in found)
        self._prepare()

    def turn(self) -> None:
        """Wait for whatever ends first, and take it on. Must be busy."""
        ended: list[tuple[int, Result]] = []
        if self._flying and not self._failed:
            ended = self._disk.finished()
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
        """Every run that it was given and has not handed back, for whoever closes it early. Until
        then their bytes may still move."""
        held = [(work, run) for work, (run, _, _), _ in [*self._done, *self._failed]]
        held += ((work, run) for _, work, run in self._ready)
        return [*held, *self._flying.values(), *self._waiting]

    def close(self) -> None:
        """Waits for what is with the disk."""
        self._disk.close()

    def _prepare(self) -> None:
        """Prepare what there is room for; each goes to the disk at once where that has room."""
        while self._waiting and self._has_room():
            work, run = self._waiting.popleft()
            number, scratch = self._free.pop(), NO_PAGES
            try:
                scratch = self._scratch(number)
                work.prepare(run, scratch)
            except Exception as error:  # noqa: BLE001 - the batch must end whatever happens
                self._failed.append((work, (run, scratch, error), number))
                continue
            self._ready.append((number, work, run))
            self._ready_bytes += self._bytes_of(run)
            if self._fits(self._ready_bytes) and self._ready_bytes >= self._slot_file.run_bytes:
                self._launch()
        self._launch()

    def _launch(self) -> None:
        """Hand the disk what it has room for, the first run at once: it may have run dry."""
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
        """Hand what has ended to those whose it is, and give its room back."""
        by_work: defaultdict[int, list[Done]] = defaultdict(list)
        works: dict[int, Work] = {}
        for work, each, _ in self._done:
            works[id(work)] = work
            by_work[id(work)].append(each)
        for name, work in works.items():
            again = work.finish(by_work[name])
            self._waiting.extendleft((work, run) for run in again)
            self._free += (number for other, _, number in self._done if other is work)
            self._done = [each for each in self._done if each[0] is not work]

    def _has_room(self) -> bool:
        has_space = not self._ready or self._ready_bytes < self._most_bytes
        return has_space and bool(self._free)

    def _fits(self, size: int) -> bool:
        """Whether the disk has room."""
        if not self._flying:
            return True
        return len(self._flying) < DEPTH and self._flying_bytes + size <= self._most_bytes

    def _bytes_of(self, run: range) -> int:
        return len(run) * self._slot_file.record_bytes

    def _scratch(self, number: int) -> Scratch:
        if number not in self._scratches:
            self._scratches[number] = self._slot_file.scratch()
        return self._scratches[number]
