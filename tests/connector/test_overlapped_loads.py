# SPDX-License-Identifier: Apache-2.0
"""Loads from the back, with a real hierarchy below and a front and a worker played by the test."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from stratakv.connector.costs.economics import Choice
from stratakv.connector.messages import ConnectorMetadata, CopyJob, LoadReport, Match, MatchKind

from .scheduler_rig import WAIT_SECONDS, FakeRequest, Rig, digest, request

BLOCK = 4


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    rig.side._economics.choice = Choice.OVERLAP
    yield rig
    assert len(rig.side._loads.under_way) == 0
    assert len(rig.side._read_times.watched) == 0
    assert rig.slab.stats().pinned_blocks == 0
    rig.side.shutdown(WAIT_SECONDS)


def begin(rig: Rig, count: int, name: str = "a") -> FakeRequest:
    asks = request(name, *range(1, count + 1))
    assert rig.side.get_matched_tokens(asks, 0) == Match(BLOCK * count, MatchKind.OVERLAP)
    rig.side.begin_load(asks, [list(range(20, 20 + count))], BLOCK * count, overlapped=True)
    return asks


def blocks(jobs: list[CopyJob]) -> list[list[int]]:
    return [job.block_ids for job in jobs]


def test_pieces_come_from_the_back_and_the_front_stops_before_them(rig: Rig) -> None:
    rig.put(*range(1, 9))
    begin(rig, 8)
    # Four of eight blocks are expected from each side: pieces and chunks of one.
    assert rig.side.overlapped_loads.load_state("a", 0)[:3] == (4, 32, False)
    meta = rig.side.build_meta([])
    assert blocks(meta.loads) == [[27], [26]]
    assert rig.side.overlapped_loads.load_state("a", 4)[:3] == (8, 32, True)
    rig.work(meta)
    assert rig.side.has_pending_work(), "the scheduler should hear of it"
    assert rig.side.overlapped_loads.load_state("a", 8)[:3] == (12, 24, False)
    meta = rig.side.build_meta([])
    assert blocks(meta.loads) == [[25], [24]]
    assert rig.side.overlapped_loads.load_state("a", 12)[:3] == (16, 24, True)
    assert rig.side.overlapped_loads.load_state("a", 16)[:3] == (16, 24, True), (
        "it has to wait for the copies"
    )
    assert rig.side.overlapped_loads.end_load("a") is None
    (report,) = rig.work(meta)
    assert report == LoadReport("a", 0)
    assert not report.is_whole


def test_they_meet(rig: Rig) -> None:
    rig.put(*range(1, 9))
    begin(rig, 8)
    assert rig.side.overlapped_loads.load_state("a", 0).limit == 4
    rig.work(rig.side.build_meta([]))
    rig.work(rig.side.build_meta([]))
    assert rig.side.overlapped_loads.load_state("a", 4)[:3] == (8, 16, False)
    rig.work(rig.side.build_meta([]))
    # The front had claimed the second block.
    assert rig.side.overlapped_loads.load_state("a", 8)[:3] == (8, 8, False)
    assert not rig.side.build_meta([])
    assert rig.side.overlapped_loads.end_load("a") == LoadReport("a", 24, {"cpu": 24})
    assert rig.side.stats()["tokens_loaded"] == {"cpu": 24}
    assert rig.side.stats()["loads_in_flight"] == 0


def test_what_the_front_has_passed_is_never_copied(rig: Rig) -> None:
    rig.put_below(*range(1, 9))
    with rig.held_reads():
        begin(rig, 8)
        computed = 0
        while computed < 28:
            computed = rig.side.overlapped_loads.load_state("a", computed).limit
            assert not rig.side.build_meta([]).loads
    rig.wait()
    assert rig.side.overlapped_loads.load_state("a", 28).limit == 32
    assert not rig.side.build_meta([]).loads, "the front has claimed all of it"
    assert rig.side.overlapped_loads.load_state("a", 32)[:3] == (32, 32, False)
    assert rig.side.overlapped_loads.end_load("a") == LoadReport("a", 0)
    while rig.side._read_times.watched:
        rig.side.has_pending_work()


def test_a_broken_read_ends_it_and_the_front_goes_on_to_what_was_loaded(rig: Rig) -> None:
    rig.put(*range(1, 7))
    rig.put(8)
    rig.put_below(7)
    asks = request("a", *range(1, 9))
    rig.side.get_matched_tokens(asks, 0)
    rig.store.clear()
    rig.side.begin_load(asks, [list(range(20, 28))], 32, overlapped=True)
    meta = rig.side.build_meta([])
    assert blocks(meta.loads) == [[27]]
    rig.work(meta)
    for computed in range(0, 28, BLOCK):
        assert rig.side.overlapped_loads.load_state("a", computed)[:3] == (
            computed + BLOCK,
            28,
            False,
        )
        assert not rig.side.build_meta([]).loads
    assert rig.side.overlapped_loads.load_state("a", 28)[:3] == (28, 28, False)
    report = rig.side.overlapped_loads.end_load("a")
    assert report == LoadReport("a", 4, {"cpu": 4}) and not report.is_whole
    assert rig.side.stats()["failures"] == {"partial": 1}
    assert rig.side.get_matched_tokens(asks, 0).tokens == 0, "offered again after a failure"


def test_blocks_that_are_forgotten_meanwhile_leave_all_to_the_front(rig: Rig) -> None:
    """They were found to be wrong; what was copied, and what is being copied, is not used."""
    rig.put(*range(1, 9))
    begin(rig, 8)
    rig.work(rig.side.build_meta([]))
    assert rig.side.overlapped_loads.load_state("a", 4)[1] < 32, "a piece has landed"
    meta = rig.side.build_meta([])
    assert meta.loads, "others are on their way"
    rig.side.invalidate_blocks([digest(3) + b"\x00\x00"], "nan")
    rig.work(meta)
    assert rig.side.overlapped_loads.load_state("a", 4)[1] == 32
    assert not rig.side.build_meta([]).loads
    report = rig.side.overlapped_loads.end_load("a")
    assert report is not None and report.num_loaded_tokens == 0 and not report.is_whole


def test_spoilt_pieces_do_not_land(rig: Rig) -> None:
    """The last block's piece would meet the end of the prompt, where nothing is loaded yet."""
    rig.put(*range(1, 9))
    begin(rig, 8)
    meta = rig.side.build_meta([])
    assert blocks(meta.loads)[0] == [27]
    rig.side.invalidate_blocks([digest(3) + b"\x00\x00"], "nan")
    rig.work(meta)
    assert rig.side.overlapped_loads.load_state("a", 4)[1] == 32
    report = rig.side.overlapped_loads.end_load("a")
    assert report is not None and report.num_loaded_tokens == 0


def test_a_failed_copy_ends_it_too(rig: Rig) -> None:
    rig.put(*range(1, 9))
    begin(rig, 8)
    rig.work(rig.side.build_meta([]), fail=True)
    assert rig.side.overlapped_loads.load_state("a", 0)[:3] == (4, 32, False)
    assert not rig.side.build_meta([])
    assert rig.side.overlapped_loads.end_load("a") == LoadReport("a", 0)
    assert rig.side.stats()["failures"] == {"load_copy": 2}


@pytest.mark.parametrize("trial", range(20))
def test_no_copy_ever_touches_what_the_front_has_claimed(rig: Rig, trial: int) -> None:
    """Random fronts, faults, and ends of copies in any order: copies stay behind every limit that
    was told, and what is said to be loaded was."""
    rng = random.Random(trial)
    count = rng.randint(2, 12)
    rig.put(*range(1, count + 1))
    for number in range(1, count + 1):  # some only below, and slow
        rig.put_below(number)
    rig.side._economics.choice = Choice.OVERLAP
    rig.slow_reads(0.001)
    begin(rig, count)
    computed, claimed, flying = 0, 0, ConnectorMetadata()
    loaded: set[int] = set()
    while True:
        state = rig.side.overlapped_loads.load_state("a", computed)
        claimed = max(claimed, state.limit)
        if computed == state.load_frontier and not state.is_copying:
            break
        assert computed <= state.limit <= state.load_frontier
        assert all(b in loaded for b in range(20 + state.load_frontier // BLOCK, 20 + count))
        if rng.random() < 0.6:
            computed = rng.randint(computed, state.limit)
        meta = rig.side.build_meta([])
        for job in meta.loads:
            assert min(job.block_ids) * BLOCK >= 20 * BLOCK + claimed
        flying.loads += meta.loads
        if flying.loads and rng.random() < 0.5:
            rng.shuffle(flying.loads)
            ended = ConnectorMetadata(loads=[flying.loads.pop()])
            fails = rng.random() < 0.1
            rig.work(ended, fail=fails)
            loaded.update(ended.loads[0].block_ids if not fails else ())
    rig.work(flying)
    report = rig.side.overlapped_loads.end_load("a")
    assert report is not None
    assert report.num_loaded_tokens == BLOCK * count - computed


def test_reads_of_one_that_is_over_are_let_go(rig: Rig) -> None:
    rig.put_below(*range(1, 9))
    rig.slow_reads(0.02)
    begin(rig, 8)
    assert rig.side.overlapped_loads.end_load("a") == LoadReport("a", 0)
    while rig.side._read_times.watched:
        rig.side.has_pending_work()
