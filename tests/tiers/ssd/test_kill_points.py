# SPDX-License-Identifier: Apache-2.0
"""A kill at every single call that changes the disk, in put, evict, drop, open, reopen, shrink.

A first run counts the calls; then one child after the other is killed before the nth, or right
after a commit or a rename. Nothing acknowledged may be lost, whatever step it was. The long form
(every point 50 times) is `pytest tests/tiers/ssd/test_kill_points.py --scale long`.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from .ledger import Ledger, Verdict, check_sound
from .nursery import Nursery

CAPACITY = 1_200_000
SMALLER = 800_000  # so much that the index has to be made anew
NEVER = 0
ROUNDS = {"ci": 1, "long": 50}


@pytest.mark.slow
@pytest.mark.timeout(600)  # some hundred processes one after the other
def test_a_kill_at_every_step_loses_nothing(
    memory_path: Path, nursery: Nursery, scale: str, seed: int
) -> None:
    steps = count_steps(memory_path, nursery)
    assert steps > 60
    killed = 0
    for number in range(ROUNDS[scale]):
        order = list(range(1, steps + 1))
        random.Random(f"{seed}/{number}").shuffle(order)
        for step in order:
            folder = memory_path / f"{number}-{step}"
            folder.mkdir()
            status, ledger = run_script(folder, nursery, step)
            killed += status == -signal.SIGKILL
            shrinks = "shrink" in ledger.words
            check_sound(folder / "ssd")
            verdict = Verdict(folder / "ssd", SMALLER if shrinks else CAPACITY)
            where = (folder / "log").read_text().splitlines()[-1]
            told = f"step {step} of {steps}, {where}, seed {seed}"
            # What a smaller store has room for is not lost, unless a hotter block took its slot.
            fits = ledger.within(verdict.stats.capacity_blocks)
            assert shrinks or fits <= verdict.served, told
            assert len(fits - verdict.served) <= len(verdict.served - fits), told
            assert len(verdict.served) == verdict.stats.blocks, told
            assert verdict.stats.rejected == verdict.stats.errors == {}, told
    # Threads may take a call less in one run than in another.
    assert killed >= ROUNDS[scale] * (steps - 5)


def count_steps(folder: Path, nursery: Nursery) -> int:
    whole = folder / "whole"
    whole.mkdir()
    status, ledger = run_script(whole, nursery, NEVER)
    assert status == 0, nursery.errors()
    assert ledger.words.count("closed") == 3
    return int((whole / "log").read_text().split()[-1])


def run_script(folder: Path, nursery: Nursery, kill_at: int) -> tuple[int, Ledger]:
    """The child's end, and what its store must have."""
    log = folder / "log"
    pid = nursery.start(
        kind="script",
        path=str(folder / "ssd"),
        log=str(log),
        capacity=CAPACITY,
        smaller=SMALLER,
        kill_at=kill_at,
    )
    status = nursery.wait(pid)
    assert status in (0, -signal.SIGKILL), nursery.errors()
    ledger = Ledger()
    ledger.read(log.read_bytes())
    return status, ledger
