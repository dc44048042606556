# SPDX-License-Identifier: Apache-2.0
"""The cases of `stratakv bench transfer`: each moves what its figure claims, or says it did not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stratakv.benchmarks.harness.comparison import WrongWork
from stratakv.benchmarks.tiers.scale import MIB
from stratakv.benchmarks.transfer.copy_case import (
    GATES,
    JOB_BLOCKS,
    MOVES,
    SIZES,
    Rig,
    Submissions,
    copy_name,
    copy_plainly,
    submit_name,
    take_submissions,
)
from stratakv.connector.device import cpu

SMALL = "64KiB"


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(SIZES[SMALL], 6 * MIB)  # 96 blocks: one job and a half
    yield rig
    rig.close()


@pytest.mark.parametrize("index", range(len(MOVES)), ids=MOVES)
def test_a_comparison_moves_every_block(
    rig: Rig, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[int, int, int]] = []
    real = cpu._copy_runs

    def noting(source: Any, target: Any, wanted: list[tuple[int, int, int]]) -> None:
        runs.extend(wanted)
        real(source, target, wanted)

    monkeypatch.setattr(cpu, "_copy_runs", noting)
    comparison = rig.comparisons(SMALL)[index]
    assert comparison.name == copy_name(MOVES[index], SMALL)
    assert comparison.ours() > 0 and comparison.limit() > 0
    assert sum(length for _, _, length in runs) == rig.num_blocks
    is_merged = "runs" in comparison.name
    assert (len(runs) <= rig.num_blocks / 4) == is_merged, "runs are copied as runs"


@pytest.mark.parametrize("index", range(len(MOVES)), ids=MOVES)
def test_a_copy_to_another_place_is_no_figure(
    rig: Rig, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cpu._copy_runs

    def wrong(source: Any, target: Any, runs: list[tuple[int, int, int]]) -> None:
        real(source, target, [*runs[:-1], (0, *runs[-1][1:]), (1, *runs[-1][1:])])

    monkeypatch.setattr(cpu, "_copy_runs", wrong)
    with pytest.raises(WrongWork, match="does not hold it"):
        rig.comparisons(SMALL)[index].ours()


def test_a_copy_that_breaks_is_no_figure(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object) -> None:
        raise MemoryError("no")

    monkeypatch.setattr(cpu, "_copy_runs", broken)
    with pytest.raises(WrongWork, match="a copy failed: no"):
        rig.comparisons(SMALL)[0].ours()
    with pytest.raises(WrongWork, match="job 0 did not end well"):
        take_submissions(rig, 1)


def test_submissions_are_timed_against_copies(rig: Rig) -> None:
    taken = take_submissions(rig, 4)
    assert len(taken.submit_seconds) == len(taken.copy_seconds) == 4
    assert min(taken.submit_seconds) > 0 and min(taken.copy_seconds) > 0
    assert taken.figures()["blocks"] == JOB_BLOCKS
    assert Submissions([1.0, 1.0, 2.0], [10.0, 50.0, 20.0]).ratio == 0.1


def test_plain_copies_go_where_they_are_told(rig: Rig) -> None:
    source, target = rig.plain
    rig.stamp(source)
    copy_plainly(source, target, [(0, 5), (8, 1)], 3)
    rig.check(source, target, [(0, 5), (1, 6), (2, 7), (8, 1), (9, 2), (10, 3)])
    with pytest.raises(WrongWork, match="block 0 was copied, but 4"):
        rig.check(source, target, [(0, 4)])


def test_gates_of_every_ratio() -> None:
    assert len(GATES) == (len(MOVES) + 1) * len(SIZES)
    assert {GATES[copy_name(move, size)].wanted for move in MOVES for size in SIZES} == {">= 0.8"}
    assert {GATES[submit_name(size)].wanted for size in SIZES} == {"<= 0.02"}
