# SPDX-License-Identifier: Apache-2.0
"""Power cuts: a store is used on a disk that `loop_disk.py` can cut off at any moment.

After each cut the copy is mounted, which replays its journal, and the store on it is opened: every
block that was acknowledged before the cut began is there, and every block it serves is right. That
the test would see a missing sync is tested too. Needs root and loop devices. The long form (3,000
cuts, 30 minutes) is `pytest tests/tiers/ssd/test_power_cut.py --scale long`.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratakv.tiers.ssd.index.row_writer import SYNC_SECONDS

from .ledger import Ledger, Verdict, check_sound, wait_for_word
from .loop_disk import LoopDisk, mounted, why_not
from .nursery import Nursery

CAPACITY = 4 * 1024**2
CUTS = {"ci": 8, "long": 3000}
CUTS_PER_CHILD = 10
PLANTED_CUTS = 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.fixture
def disk(memory_path: Path) -> Iterator[LoopDisk]:
    try:
        made = LoopDisk(memory_path)
    except Exception as error:  # what a container forbids shows only when it is tried
        pytest.skip(f"a loop device cannot be mounted here: {error}")
    yield made
    made.close()


class Cuts:
    """Children that use a store on the disk, and the cuts that they meet."""

    def __init__(
        self,
        disk: LoopDisk,
        nursery: Nursery,
        folder: Path,
        *plants: str,
        durability: str = "sync",
    ) -> None:
        self._durability = durability
        self._disk, self._nursery, self._folder, self._plants = disk, nursery, folder, plants
        self._pid: int | None = None
        self._number = 0

    def start(self, seed: int) -> None:
        """A new child, on one of two stores, so that a used one is opened as well."""
        self._number += 1
        self._log = self._folder / f"log-{self._number}"
        self._pid = self._nursery.start(
            kind="churn",
            path=str(self._disk.path / f"ssd-{self._number % 2}"),
            log=str(self._log),
            capacity=CAPACITY,
            seed=seed,
            plants=self._plants,
            durability=self._durability,
        )
        wait_for_word(self._log, "kept", self._nursery)

    def stop(self) -> None:
        assert self._pid is not None
        self._nursery.kill(self._pid)

    def cut(self, *, loses_cache: bool) -> tuple[Ledger, Verdict]:
        """What must be there after a cut now, and what is."""
        assert self._pid is not None
        image = self._folder / "image"
        if loses_cache:
            os.kill(self._pid, signal.SIGSTOP)
            wait_until_stopped(self._pid)
        before = self._log.read_bytes()
        if loses_cache:
            self._disk.cut_with_cache(image)
            os.kill(self._pid, signal.SIGCONT)
        else:
            self._disk.cut(image)
        after = self._log.read_bytes()
        ledger = Ledger()
        ledger.read(before)
        ledger.read(after[before.rfind(b"\n") + 1 :], acknowledging=False)
        with mounted(image, self._folder / "after") as folder:
            path = folder / f"ssd-{self._number % 2}"
            if not self._plants:
                check_sound(path)
            verdict = Verdict(path, CAPACITY)
        image.unlink()
        return ledger, verdict


def wait_until_stopped(pid: int, seconds: float = 30.0) -> None:
    """Until every thread has stopped, and so has ended the call it was in."""
    deadline = time.monotonic() + seconds
    while True:
        tasks = Path(f"/proc/{pid}/task").glob("*/stat")
        if all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks):
            return
        assert time.monotonic() < deadline, "the child does not stop"
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("loses_cache", "durability"),
    [(False, "sync"), (True, "sync"), (True, "async")],
    ids=["keeps-cache", "loses-cache", "async"],
)
def test_after_a_power_cut_all_is_right(
    disk: LoopDisk,
    nursery: Nursery,
    memory_path: Path,
    scale: str,
    seed: int,
    loses_cache: bool,
    durability: str,
) -> None:
    """A durable store has everything that it had acknowledged. One that is not has whole records
    only, and has most of them."""
    cuts, served = Cuts(disk, nursery, memory_path, durability=durability), 0
    usual = CUTS[scale] // (2 if durability == "sync" else 4)
    for number in itertools.count():
        # Lest nothing is looked at. How often an asynchronous store has been turned over, and has
        # lost all, since its last commit depends on the machine.
        if number >= usual and (served > 10 * CUTS[scale] or number >= 4 * usual):
            break
        rng = random.Random(f"{seed}/{number}")
        if number % CUTS_PER_CHILD == 0:
            if number:
                cuts.stop()
            cuts.start(rng.randrange(2**32))
            if durability == "async":
                time.sleep(SYNC_SECONDS)  # before which it need not have anything
        time.sleep(0.15 * rng.random())
        ledger, verdict = cuts.cut(loses_cache=loses_cache)
        told = f"cut {number}, seed {seed}"
        if durability == "sync":
            assert ledger.must_have <= verdict.served, told
        assert len(verdict.served) == verdict.stats.blocks, told
        assert verdict.stats.rejected == verdict.stats.errors == {}, told
        served += len(verdict.served)
    cuts.stop()
    assert served > 10 * CUTS[scale]


@pytest.mark.parametrize(
    ("loses_cache", "plants"),
    [
        # Records in the page cache of the host, rows on the disk.
        (False, ["no_sync", "no_direct_writes"]),
        # Nothing of the index is sent to the disk before the kernel feels like it.
        (False, ["no_index_sync"]),
        # All is sent to the disk, and nothing flushed there.
        (True, ["no_sync", "no_index_sync"]),
    ],
    ids=["records", "index", "flushes"],
)
def test_a_missing_sync_is_noticed(
    disk: LoopDisk,
    nursery: Nursery,
    memory_path: Path,
    seed: int,
    loses_cache: bool,
    plants: list[str],
) -> None:
    """The test above has power. Nothing wrong is served even so: `Verdict` compares the bytes. Now
    and then the kernel writes by itself what nobody has flushed, and a cut takes nothing."""
    cuts = Cuts(disk, nursery, memory_path, *plants)
    cuts.start(seed)
    lossy = 0
    for _ in range(3 * PLANTED_CUTS):
        time.sleep(0.1)
        ledger, verdict = cuts.cut(loses_cache=loses_cache)
        lossy += not ledger.must_have <= verdict.served
        if lossy == PLANTED_CUTS:
            break
    cuts.stop()
    assert lossy == PLANTED_CUTS
