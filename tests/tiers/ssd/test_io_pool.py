# SPDX-License-Identifier: Apache-2.0
"""The I/O threads: shares of a batch, and threads that end."""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stratakv.tiers.block import ALIGNMENT
from stratakv.tiers.ssd.disk.disk_queue import DEPTH, BlockingQueue, DiskQueue, Result
from stratakv.tiers.ssd.disk.io_pool import Done, IoPool, runs, shares
from stratakv.tiers.ssd.disk.slot_file import Scratch, SlotFile

from ..blocks import SMALL
from ..store_contract import SECONDS, wait_until

MIB = 1024**2


def test_shares_are_about_a_run_long_and_no_run_is_cut() -> None:
    assert shares(runs(list(range(8)), 4), 4) == [[range(4)], [range(4, 8)]]
    scattered = runs([0, 2, 4, 6, 8, 10], 4)
    assert [len(share) for share in shares(scattered, 4)] == [4, 2]
    assert [len(share) for share in shares(scattered, 1)] == [1] * 6
    assert [len(share) for share in shares(runs([0, 1, 2, 4, 5, 6], 4), 4)] == [1, 1]
    assert shares([], 4) == []


def test_shares_are_the_runs(rng: random.Random) -> None:
    for _ in range(200):
        slots = sorted(rng.sample(range(60), rng.randrange(60)))
        found = runs(slots, rng.randrange(1, 9))
        divided = shares(found, rng.randrange(1, 9))
        assert [run for share in divided for run in share] == found
        assert all(divided)


class Meeting:
    """Work that reads nothing and notes who did it; each run waits for `expected` others."""

    def __init__(self, expected: int) -> None:
        self.seen: list[tuple[str, range]] = []
        self.results: list[object] = []
        self._barrier = threading.Barrier(expected)

    def prepare_run(self, run: range, scratch: Scratch) -> None:
        """Nothing to prepare."""

    def start(self, run: range, _scratch: Scratch, _disk: DiskQueue, _number: int) -> None:
        self._barrier.wait(SECONDS)  # nobody goes on before all are here
        self.seen.append((threading.current_thread().name, run))
        raise KeyError("as asked")

    def complete_runs(self, done: Sequence[Done]) -> tuple[()]:
        self.results += (result for _, _, result in done)
        return ()


def test_work_that_is_spread_is_done_on_all_threads_and_they_end(tmp_path: Path) -> None:
    slot_file = SlotFile(tmp_path / "blocks", SMALL, 64)
    slot_file.run_slots = 1  # so that three slots are three shares
    pool, work = IoPool(slot_file, 3, "test-pool", MIB), Meeting(3)
    pool.start([1, 5, 9], work, spread=True)
    wait_until(lambda: len(work.results) == 3)
    assert {name for name, _ in work.seen} == {"test-pool-0", "test-pool-1", "test-pool-2"}
    assert sorted(run.start for _, run in work.seen) == [0, 1, 2]
    assert all(isinstance(result, KeyError) for result in work.results)
    assert pool.close(time.monotonic() + SECONDS)
    slot_file.close()


def test_a_batch_wakes_one_thread_and_the_next_one_another(tmp_path: Path) -> None:
    slot_file = SlotFile(tmp_path / "blocks", SMALL, 64)
    slot_file.run_slots = 1
    pool, alone, held = IoPool(slot_file, 3, "test-pool", MIB), Meeting(1), Meeting(2)
    pool.start([1, 5, 9], alone)
    wait_until(lambda: len(alone.results) == 3)
    assert len({name for name, _ in alone.seen}) == 1
    pool.start([1], held)  # one thread waits in it for a second one
    pool.start([2], held)
    wait_until(lambda: len(held.results) == 2)
    assert len({name for name, _ in held.seen}) == 2
    assert pool.close(time.monotonic() + SECONDS)
    slot_file.close()


def test_threads_that_wait_for_each_request_are_all_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot_file = SlotFile(tmp_path / "blocks", SMALL, 64)
    slot_file.run_slots = 1
    opened: list[BlockingQueue] = []

    def blocking(_most: int) -> BlockingQueue:
        opened.append(BlockingQueue(None, slot_file._buffered))
        return opened[-1]

    monkeypatch.setattr(slot_file, "open_queue", blocking)
    pool, work = IoPool(slot_file, 3, "test-pool", MIB), Meeting(3)
    wait_until(lambda: len(opened) == 3 and pool._is_blocking)
    pool.start([1, 5, 9], work)
    wait_until(lambda: len(work.results) == 3)
    assert len({name for name, _ in work.seen}) == 3
    assert pool.close(time.monotonic() + SECONDS)
    slot_file.close()


def test_a_thread_that_is_awake_helps_with_the_next_batch(tmp_path: Path) -> None:
    slot_file = SlotFile(tmp_path / "blocks", SMALL, 64)
    slot_file.run_slots = 1
    pool, held, more = IoPool(slot_file, 1, "test-pool", MIB), Meeting(2), Meeting(1)
    pool.start([1], held)
    wait_until(lambda: held._barrier.n_waiting == 1)
    pool.start([2, 3], more)
    held._barrier.wait(SECONDS)
    wait_until(lambda: len(more.results) == 2 and len(held.results) == 1)
    assert pool.close(time.monotonic() + SECONDS)
    slot_file.close()


def test_a_thread_that_does_not_end_is_told(tmp_path: Path) -> None:
    slot_file = SlotFile(tmp_path / "blocks", SMALL, 64)
    pool, work = IoPool(slot_file, 1, "test-pool", MIB), Meeting(2)
    pool.start([0], work)
    assert not pool.close(time.monotonic() + 0.05)
    work._barrier.wait(SECONDS)
    assert pool.close(time.monotonic() + SECONDS)
    slot_file.close()


class CountingQueue:
    """The product's queue; how many requests it had at most."""

    def __init__(self, real: DiskQueue) -> None:
        self.deepest = 0
        self.is_blocking = real.is_blocking
        self._real = real
        self._flying = 0

    def start(self, *arguments: Any) -> None:
        self._flying += 1
        self.deepest = max(self.deepest, self._flying)
        self._real.start(*arguments)

    def submit(self) -> None:
        self._real.submit()

    def wait_completions(self) -> list[tuple[int, Result]]:
        found = self._real.wait_completions()
        self._flying -= len(found)
        return found

    def close(self) -> None:
        self._real.close()


class Reading:
    """Work that reads records of a page and header and notes them."""

    def __init__(self, slot_file: SlotFile, slots: Sequence[int], again: int = 0) -> None:
        self.found: dict[int, bytes] = {}
        self._slot_file = slot_file
        self._slots = slots
        self._pages = [memoryview(mmap.mmap(-1, ALIGNMENT)) for _ in slots]
        self._again = again

    def prepare_run(self, run: range, scratch: Scratch) -> None:
        """A read takes none."""

    def start(self, run: range, scratch: Scratch, disk: DiskQueue, number: int) -> None:
        pages = self._pages[run.start : run.stop]
        self._slot_file.start_read(disk, number, self._slots[run.start], pages, scratch)

    def complete_runs(self, done: Sequence[Done]) -> list[range]:
        if self._again:
            self._again -= 1
            return [run for run, _, _ in done]
        for run, scratch, result in done:
            assert isinstance(result, int)
            pages = self._pages[run.start : run.stop]
            assert self._slot_file.take_read(result, pages, scratch) == len(run)
            self.found |= {self._slots[i]: bytes(self._pages[i]) for i in run}
        return []


@pytest.mark.parametrize("flight_bytes", [0, 5 * 2 * ALIGNMENT, MIB])
def test_no_more_is_under_way_than_allowed(
    tmp_path: Path, flight_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at least, DEPTH at most; runs that are to be read again are."""
    slot_file = SlotFile(tmp_path / "blocks", SMALL, 128)
    raw = b"".join(bytes([slot]) * 2 * ALIGNMENT for slot in range(128))
    (tmp_path / "blocks").write_bytes(raw)
    queue = CountingQueue(slot_file.open_queue(2 * DEPTH))
    monkeypatch.setattr(slot_file, "open_queue", lambda _most: queue)
    pool = IoPool(slot_file, 1, "test-pool", flight_bytes)
    slots = list(range(0, 128, 2))
    work = Reading(slot_file, slots, again=2)
    pool.start(slots, work, singly=True)
    wait_until(lambda: len(work.found) == len(slots))
    assert work.found == {slot: bytes([slot]) * ALIGNMENT for slot in slots}
    assert queue.deepest == {0: 1, MIB: DEPTH}.get(flight_bytes, 5)
    assert pool.close(time.monotonic() + SECONDS)
    slot_file.close()
