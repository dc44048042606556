# SPDX-License-Identifier: Apache-2.0
"""The I/O threads: shares of a batch, and threads that end."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

from stratakv.tiers.ssd.io_pool import IoPool, shares
from stratakv.tiers.ssd.slot_file import Scratch, SlotFile, runs

from ..blocks import SMALL
from ..store_contract import SECONDS, wait_until


def test_every_thread_gets_a_share_and_no_run_is_cut() -> None:
    assert shares(runs(list(range(8)), 4), 2, 4) == [[range(4)], [range(4, 8)]]
    scattered = runs([0, 2, 4, 6, 8, 10], 4)
    assert [len(share) for share in shares(scattered, 2, 4)] == [3, 3]
    assert [len(share) for share in shares(scattered, 8, 4)] == [1] * 6
    assert [len(share) for share in shares(scattered, 1, 4)] == [4, 2]
    assert shares([], 4, 4) == []


def test_shares_are_the_runs(rng: random.Random) -> None:
    for _ in range(200):
        slots = sorted(rng.sample(range(60), rng.randrange(60)))
        found = runs(slots, rng.randrange(1, 9))
        divided = shares(found, rng.randrange(1, 9), rng.randrange(1, 9))
        assert [run for share in divided for run in share] == found
        assert all(divided)


def test_work_is_done_on_all_threads_and_they_end(tmp_path: Path) -> None:
    slot_file = SlotFile(tmp_path / "blocks", SMALL, 64)
    pool = IoPool(slot_file, 3, "test-pool")
    meeting, seen = threading.Barrier(3), []

    def work(part: list[range], scratch: Scratch) -> None:
        meeting.wait(SECONDS)  # nobody goes on before all three are here
        seen.append((threading.current_thread().name, part, id(scratch)))

    assert pool.start([1, 5, 9], work) == 3
    wait_until(lambda: len(seen) == 3)
    assert {name for name, _, _ in seen} == {"test-pool-0", "test-pool-1", "test-pool-2"}
    assert sorted(part[0].start for _, part, _ in seen) == [0, 1, 2]
    assert len({scratch for _, _, scratch in seen}) == 3
    assert pool.close(time.monotonic() + SECONDS)
    slot_file.close()


def test_a_thread_that_does_not_end_is_told(tmp_path: Path) -> None:
    slot_file = SlotFile(tmp_path / "blocks", SMALL, 64)
    pool = IoPool(slot_file, 1, "test-pool")
    gate = threading.Event()
    pool.start([0], lambda _runs, _scratch: gate.wait(SECONDS) and None)
    assert not pool.close(time.monotonic() + 0.05)
    gate.set()
    assert pool.close(time.monotonic() + SECONDS)
    slot_file.close()
