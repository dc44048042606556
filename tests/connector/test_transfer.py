# SPDX-License-Identifier: Apache-2.0
"""Merging of pairs into runs, and the signal between the two sides."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratakv.connector.copy_signal import CopySignal
from stratakv.connector.device.copy_plan import Run, merge_runs


def test_neighbours_on_both_sides_are_one_run() -> None:
    assert merge_runs([4, 5, 6, 9], [0, 1, 2, 3]) == [Run(4, 0, 3), Run(9, 3, 1)]
    assert merge_runs([4, 5, 6], [0, 2, 3]) == [Run(4, 0, 1), Run(5, 2, 2)]
    assert merge_runs([2, 1, 0], [0, 1, 2]) == [Run(2, 0, 1), Run(1, 1, 1), Run(0, 2, 1)]
    assert merge_runs([7], [3]) == [Run(7, 3, 1)]
    assert merge_runs([], []) == []


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_runs_say_the_same_as_the_pairs(pairs: list[tuple[int, int]]) -> None:
    runs = merge_runs([block for block, _ in pairs], [slot for _, slot in pairs])
    told = [(run.source + i, run.target + i) for run in runs for i in range(run.length)]
    assert told == pairs
    joints = itertools.pairwise(runs)
    assert all(
        (a.source + a.length, a.target + a.length) != (b.source, b.target) for a, b in joints
    ), "two runs could have been one"


def test_the_signal_counts_and_wakes() -> None:
    signal = CopySignal()
    signal.wake()  # nobody listens yet
    woken = threading.Event()
    signal.set_wakeup(woken.set)
    assert signal.wait_idle(0.0)
    signal.jobs_given(2)
    signal.note_ended(signal.ended + 1)
    assert woken.is_set()
    assert not signal.wait_idle(0.01)
    threading.Timer(0.01, lambda: signal.note_ended(2)).start()
    assert signal.wait_idle(10.0)
    assert signal.ended == 2


def test_a_wake_up_that_fails_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise OSError("the socket is closed")

    signal = CopySignal()
    signal.set_wakeup(broken)
    signal.jobs_given(1)
    signal.note_ended(signal.ended + 1)
    assert signal.wait_idle(0.0)
    assert "wake-up" in caplog.text
    signal.set_wakeup(None)
    caplog.clear()
    signal.wake()
    assert not caplog.text
