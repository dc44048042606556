# SPDX-License-Identifier: Apache-2.0
"""The scheduler side, with a real hierarchy below it and a worker played by the test."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest

from stratakv.connector.connector_context import ConnectorContext
from stratakv.connector.loads import Loads
from stratakv.connector.lookups import REMEMBERED_LOOKUPS
from stratakv.connector.messages import (
    NOTHING_FINISHED,
    NOTHING_TO_MOVE,
    ConnectorWorkerOutput,
    EvictedBlock,
    LoadReport,
    Match,
    MatchKind,
)
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.parts import Parts
from stratakv.tiers.base import Answer
from stratakv.tiers.block import pack_key
from stratakv.tiers.errors import TierError

from .scheduler_rig import LAYOUT, WAIT_SECONDS, Rig, digest, evicted, request


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.side.shutdown(WAIT_SECONDS)
    assert rig.side.stats()["loads_in_flight"] == 0
    assert rig.side.stats()["stores_in_flight"] == 0


def test_an_empty_step_moves_nothing(rig: Rig) -> None:
    assert not rig.side.has_pending_work()
    assert not rig.side.build_meta([])
    assert rig.side.update_from_worker(ConnectorWorkerOutput()) == []


def test_a_match_counts_whole_blocks_and_leaves_a_token(rig: Rig) -> None:
    rig.put(1, 2, 3)
    side = rig.side
    assert side.get_matched_tokens(request("a", 1, 2, 3), 0) == Match(12, MatchKind.LOAD)
    assert side.get_matched_tokens(request("b", 1, 2, 3, num_tokens=12), 0).tokens == 8
    assert side.get_matched_tokens(request("c", 1, 2, 9, 3), 0).tokens == 8
    assert side.get_matched_tokens(request("d", 9, 1), 0) == Match(0, MatchKind.NONE)
    assert side.get_matched_tokens(request("e", num_tokens=3), 0) == Match(0, MatchKind.NONE)
    # Beyond what the pool has.
    assert side.get_matched_tokens(request("a", 1, 2, 3), 8) == Match(4, MatchKind.LOAD)
    assert side.get_matched_tokens(request("a", 1, 2, 3), 12) == Match(0, MatchKind.NONE)


def test_a_block_of_another_group_or_shard_is_not_ours(rig: Rig) -> None:
    other = OffloadScheduler(
        ConnectorContext(
            rig.hierarchy, Parts(LAYOUT.block_size, ranks=[1], num_ranks=2), rig.signal
        )
    )
    rig.put(1)
    assert other.get_matched_tokens(request("a", 1), 0).tokens == 0
    meta = rig.side.build_meta([EvictedBlock(2, digest(2) + b"\x01\x00")])
    assert rig.work(meta) == []
    assert rig.side.get_matched_tokens(request("b", 2), 0).tokens == 0
    assert rig.slab.lookup([pack_key(digest(2), group=1)]) == [Answer.HIT]


def test_evicted_blocks_become_one_job_head_first(rig: Rig) -> None:
    meta = rig.side.build_meta([evicted(7, 3), evicted(6, 2), evicted(5, 1)])
    (job,) = meta.stores
    assert job.block_ids == [5, 6, 7]
    assert len(set(job.slots)) == 3
    rig.work(meta)
    assert not rig.side.build_meta([evicted(9, 2)]), "it is in the slab already"


def test_two_blocks_of_one_key_are_stored_once(rig: Rig) -> None:
    meta = rig.side.build_meta([evicted(7, 3), evicted(6, 3)])
    assert [len(job.slots) for job in meta.stores] == [1]
    rig.work(meta)


def test_a_failed_store_is_as_if_it_had_never_been(rig: Rig) -> None:
    rig.work(rig.side.build_meta([evicted(1, 1)]), fail=True)
    assert rig.side.get_matched_tokens(request("a", 1), 0).tokens == 0
    assert rig.side.stats()["failures"] == {"store_copy": 1}


def test_blocks_in_the_slab_are_copied_in_the_same_step(rig: Rig) -> None:
    rig.put(1, 2, 3)
    asks = request("a", 1, 2, 3)
    rig.side.get_matched_tokens(asks, 0)
    rig.side.begin_load(asks, [[20, 21, 22]], 12, overlapped=False)
    meta = rig.side.build_meta([])
    (job,) = meta.loads
    assert job.block_ids == [20, 21, 22]
    assert job.slots == rig.slab.pin([pack_key(digest(n)) for n in (1, 2, 3)], touch=False)
    rig.slab.unpin([pack_key(digest(n)) for n in (1, 2, 3)])
    (report,) = rig.work(meta)
    assert (report.request_id, report.num_loaded_tokens) == ("a", 12)
    assert report.tokens_by_tier == {"cpu": 12}
    assert report.seconds > 0
    assert rig.side.update_from_worker(ConnectorWorkerOutput()) == [], "reported twice"


def test_fewer_tokens_than_matched_may_be_taken(rig: Rig) -> None:
    rig.put(1, 2, 3)
    asks = request("a", 1, 2, 3)
    rig.side.get_matched_tokens(asks, 0)
    rig.side.begin_load(asks, [[20]], 4, overlapped=False)
    (report,) = rig.work(rig.side.build_meta([]))
    assert report.num_loaded_tokens == 4


def test_no_external_tokens_park_nobody(rig: Rig) -> None:
    asks = request("a", 1)
    rig.side.get_matched_tokens(asks, 0)
    rig.side.begin_load(asks, [[]], 0, overlapped=False)
    assert not rig.side.build_meta([])
    assert not rig.side.has_pending_work()


def test_blocks_on_the_disk_are_copied_after_the_wake_up(rig: Rig) -> None:
    rig.put(1)
    rig.put_below(2, 3)
    rig.slow_reads()
    asks = request("a", 1, 2, 3)
    assert rig.side.get_matched_tokens(asks, 0).tokens == 12
    rig.side.begin_load(asks, [[20, 21, 22]], 12, overlapped=False)
    assert not rig.side.build_meta([])
    assert not rig.side.has_pending_work()
    assert rig.side.get_matched_tokens(asks, 0) == Match(0, MatchKind.NONE), "it is parked"
    rig.wait()
    (report,) = rig.work(rig.side.build_meta([]))
    assert report.num_loaded_tokens == 12
    assert report.tokens_by_tier == {"cpu": 4, "ssd": 8}
    stats = rig.side.stats()
    assert stats["tokens_loaded"] == {"cpu": 4, "ssd": 8}
    assert stats["load_bytes"] == stats["load_sizes"]["total"] == 3 * LAYOUT.page_bytes
    assert stats["store_bytes"] == stats["store_sizes"]["total"] == LAYOUT.page_bytes
    assert sum(stats["load_sizes"]["counts"]) == sum(stats["store_sizes"]["counts"]) == 1
    assert stats["lookup_queries"] == {"cpu": 3, "ssd": 2}
    assert stats["lookup_hits"] == {"cpu": 1, "ssd": 2}
    assert sum(stats["traffic"]["ssd"]["promotion_seconds"]["counts"]) == 1


def test_a_copy_that_ended_is_pending_work_until_it_is_collected(rig: Rig) -> None:
    rig.put(1)
    asks = request("a", 1)
    rig.side.get_matched_tokens(asks, 0)
    rig.side.begin_load(asks, [[20]], 4, overlapped=False)
    meta = rig.side.build_meta([])
    assert not rig.side.has_pending_work(), "a copy under way is no reason to run steps"
    rig.woken.clear()
    rig.signal.note_ended(rig.signal.ended + 1)
    assert rig.woken.is_set()
    assert rig.side.has_pending_work()
    output = ConnectorWorkerOutput(finished_loads=[meta.loads[0].job_id])
    assert len(rig.side.update_from_worker(output)) == 1
    assert not rig.side.has_pending_work()


def test_who_needs_what_another_one_loads_waits_for_it(rig: Rig) -> None:
    """It will find the blocks in the pool; without them it is told to load, and counted once."""
    rig.put_below(1, 2)
    rig.slow_reads()
    first, second = request("a", 1, 2), request("b", 1, 2)
    rig.side.get_matched_tokens(first, 0)
    rig.side.begin_load(first, [[20, 21]], 8, overlapped=False)
    assert rig.side.get_matched_tokens(second, 0) == Match(0, MatchKind.RETRY)
    assert rig.side.stats()["lookup_queries"] == {"cpu": 2, "ssd": 2}  # the first one's alone
    assert not rig.side.build_meta([])
    rig.wait()
    assert rig.side.get_matched_tokens(second, 0) == Match(0, MatchKind.RETRY), "it is being copied"
    assert len(rig.work(rig.side.build_meta([]))) == 1
    assert rig.side.has_pending_work(), "who was told to retry is to be asked again"
    assert rig.side.get_matched_tokens(second, 0) == Match(8, MatchKind.LOAD)
    assert rig.side.stats()["lookup_hits"] == {"cpu": 2, "ssd": 2}
    rig.put(9)
    assert rig.side.get_matched_tokens(second, 0) == Match(8, MatchKind.LOAD)
    assert rig.side.stats()["lookup_hits"] == {"cpu": 2, "ssd": 2}, "a prompt was counted twice"
    rig.side.begin_load(second, [[30, 31]], 8, overlapped=False)
    (report,) = rig.work(rig.side.build_meta([]))
    assert report.tokens_by_tier == {"cpu": 8}


def test_who_needs_other_blocks_first_does_not_wait(rig: Rig) -> None:
    rig.put_below(1, 2, 3)
    rig.slow_reads()
    first, second = request("a", 1, 2), request("b", 3, 2)
    rig.side.get_matched_tokens(first, 0)
    rig.side.begin_load(first, [[20, 21]], 8, overlapped=False)
    assert rig.side.get_matched_tokens(second, 0) == Match(8, MatchKind.LOAD)
    rig.side.begin_load(second, [[30, 31]], 8, overlapped=False)
    reports = []
    while len(reports) < 2:
        rig.wait()
        reports += rig.work(rig.side.build_meta([]))
    assert [report.num_loaded_tokens for report in reports] == [8, 8]


def test_a_read_under_way_is_joined(rig: Rig) -> None:
    rig.put_below(1)
    rig.slow_reads()
    ticket = rig.hierarchy.begin_load([pack_key(digest(1))])
    rig.hierarchy.end_load(ticket)
    asks = request("a", 1)
    assert rig.side.get_matched_tokens(asks, 0) == Match(4, MatchKind.LOAD)
    rig.side.begin_load(asks, [[20]], 4, overlapped=False)
    assert rig.hierarchy.traffic()["ssd"].active_promotions == 1
    rig.wait()
    assert [report.num_loaded_tokens for report in rig.work(rig.side.build_meta([]))] == [4]


@pytest.mark.parametrize("at", ["reading", "copying"])
def test_blocks_that_are_forgotten_while_they_are_loaded_bring_nothing(rig: Rig, at: str) -> None:
    """They were found to be wrong: the request computes all that it asked for."""
    rig.put(1, 2)
    asks = request("a", 1, 2, 3)
    assert rig.side.get_matched_tokens(asks, 0).tokens == 8
    rig.side.begin_load(asks, [[20, 21, 22]], 8, overlapped=False)
    meta = rig.side.build_meta([]) if at == "copying" else None
    rig.side.invalidate_blocks([digest(2) + b"\x00\x00"], "nan")
    reports = rig.work(meta) if meta is not None else []
    (report,) = reports + rig.work(rig.side.build_meta([]))
    assert report.num_loaded_tokens == 0 and not report.is_whole, report
    assert rig.slab.stats().pinned_blocks == 0


def test_what_is_being_stored_is_asked_about_again(rig: Rig) -> None:
    meta = rig.side.build_meta([evicted(5, 1)])
    asks = request("a", 1)
    assert rig.side.get_matched_tokens(asks, 0).kind is MatchKind.RETRY
    rig.work(meta)
    assert rig.side.has_pending_work()
    assert rig.side.get_matched_tokens(asks, 0) == Match(4, MatchKind.LOAD)
    rig.side.build_meta([])
    assert not rig.side.has_pending_work()


def test_what_only_a_disk_has_is_read_while_its_request_waits(rig: Rig) -> None:
    rig.put_below(1, 2)
    rig.slow_reads()
    asks = request("a", 1, 2, 3)
    rig.side.request_queued(asks)
    assert rig.hierarchy.traffic()["ssd"].active_promotions == 1
    ticket = rig.side.requests["a"].read_ahead
    assert ticket is not None
    while ticket.waiting:
        rig.wait_for_wakeup()
    assert rig.side.get_matched_tokens(asks, 0) == Match(8, MatchKind.LOAD)
    rig.side.begin_load(asks, [[20, 21]], 8, overlapped=False)
    (report,) = rig.work(rig.side.build_meta([]))
    assert report.tokens_by_tier == {"ssd": 8}, "where it came from, although it is in the slab"
    assert rig.side.stats()["lookup_hits"] == {"cpu": 0, "ssd": 2}
    assert rig.store.stats().loaded_blocks == 2
    assert rig.slab.stats().pinned_blocks == 0


def test_reading_ahead_is_bounded_and_ends_with_its_request(rig: Rig) -> None:
    rig.put_below(*range(40))
    requests = [request(f"r{i}", *range(4 * i, 4 * i + 4)) for i in range(8)]
    for asks in requests:
        rig.side.request_queued(asks)
        rig.side.request_queued(asks)
        rig.hierarchy.poll()
    assert rig.slab.stats().pinned_blocks <= rig.slab.num_slots // 4
    assert rig.slab.stats().pinned_blocks > 0
    for asks in requests:
        rig.side.request_finished(asks.request_id)
    assert rig.slab.stats().pinned_blocks == 0


def test_cold_blocks_are_stored_ahead_and_not_again_when_they_go(rig: Rig) -> None:
    assert rig.side.stores_ahead.num_wanted_ahead() > 0
    meta = rig.side.build_meta([], [evicted(6, 2), evicted(5, 1)])
    assert not meta.stores
    (job,) = meta.ahead
    assert job.block_ids == [5, 6]
    rig.signal.note_ended(rig.signal.ended + 1)
    rig.side.update_from_worker(ConnectorWorkerOutput(finished_stores=[job.job_id]))
    assert not rig.side.build_meta([evicted(6, 2), evicted(5, 1)])
    assert rig.side.get_matched_tokens(request("a", 1, 2), 0).tokens == 8


def test_a_block_that_goes_while_it_is_stored_is_waited_for(rig: Rig) -> None:
    meta = rig.side.build_meta([], [evicted(6, 2), evicted(5, 1)])
    job_id = meta.ahead[0].job_id
    meta = rig.side.build_meta([evicted(6, 2)])
    assert meta.overtaken == [job_id] and not meta.stores
    assert not rig.side.build_meta([evicted(7, 9)]).overtaken
    rig.side.stores_ahead.names_dropped([evicted(4, 4)])
    assert not rig.side.build_meta([]).overtaken, "it was not being copied"
    rig.side.stores_ahead.names_dropped([evicted(5, 1)])
    assert rig.side.build_meta([]).overtaken == [job_id], "it may be overwritten now"
    assert not rig.side.build_meta([]).overtaken
    for _ in range(2):
        rig.signal.note_ended(rig.signal.ended + 1)
    output = ConnectorWorkerOutput(finished_stores=[job_id, job_id + 1])
    rig.side.update_from_worker(output)
    found = rig.slab.lookup([pack_key(digest(number)) for number in (1, 2)])
    assert found == [Answer.MISS, Answer.HIT], "what lost its key is not kept"


def test_few_cold_blocks_go_with_what_is_evicted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = [evicted(6, 2), evicted(5, 1)]
    meta = rig.side.build_meta([evicted(8, 4), evicted(7, 3)], cold)
    assert not meta.ahead
    (job,) = meta.stores
    assert job.block_ids == [5, 6, 7, 8], "heads first"
    rig.work(meta)
    assert not rig.side.build_meta(cold)
    monkeypatch.setattr(rig.side._outgoing, "_along", 1)
    meta = rig.side.build_meta([evicted(7, 5)], [evicted(6, 7), evicted(5, 6)])
    assert [job.block_ids for job in (*meta.stores, *meta.ahead)] == [[7], [5, 6]]
    rig.work(meta)


def test_where_nothing_is_copied_beside_computing_all_cold_blocks_go_with_the_step(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.side._outgoing, "_copies_beside", False)
    monkeypatch.setattr(rig.side._outgoing, "_along", 1)
    for gone, cold, sources in (([evicted(7, 5)], (6, 7), [5, 6, 7]), ([], (8, 9), [5, 6])):
        meta = rig.side.build_meta(gone, [evicted(6, cold[1]), evicted(5, cold[0])])
        assert [job.block_ids for job in meta.stores] == [sources] and not meta.ahead
        rig.work(meta)


def test_a_step_with_nothing_to_do_leaves_what_all_of_them_share_as_it_was(rig: Rig) -> None:
    meta = rig.side.build_meta([])
    assert meta is NOTHING_TO_MOVE and not meta
    rig.work(rig.side.build_meta([evicted(1, 1)]))
    assert rig.side.update_from_worker(NOTHING_FINISHED) == []
    assert not rig.side.build_meta([])
    assert dataclasses.astuple(NOTHING_FINISHED) == ([], [], [], [], {}, 0, 0.0, 0.0, 0.0)


def test_only_a_step_for_which_something_may_wait_looks_at_loads(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Loads] = []
    collect = Loads.poll_reads

    def note(loads: Loads) -> None:
        looked.append(loads)
        collect(loads)

    monkeypatch.setattr(Loads, "poll_reads", note)
    rig.side.request_queued(request("a", 1, 2))
    for block in range(3):
        rig.work(rig.side.build_meta([evicted(block, block)]))
    assert not looked
    rig.side.get_matched_tokens(request("b", 0, 1), 0)
    rig.side.begin_load(request("b", 0, 1), [[5, 6]], 8, overlapped=False)
    meta = rig.side.build_meta([])
    assert [len(job.slots) for job in meta.loads] == [2]
    rig.side.build_meta([])
    assert len(looked) == 2  # it has not landed yet
    assert [report.num_loaded_tokens for report in rig.work(meta)] == [8]
    rig.side.build_meta([])
    rig.side.build_meta([])
    assert len(looked) == 2


def test_storing_ahead_is_bounded(rig: Rig) -> None:
    metas = []
    while rig.side.stores_ahead.num_wanted_ahead():
        number = len(metas)
        metas.append(rig.side.build_meta([], [evicted(number, number)]))
        assert len(metas) < 10
    for meta in metas:
        rig.signal.note_ended(rig.signal.ended + 1)
        ids = [job.job_id for job in meta.ahead]
        rig.side.update_from_worker(ConnectorWorkerOutput(failed_stores=ids))
    assert rig.side.stores_ahead.num_wanted_ahead() > 0
    assert rig.side.get_matched_tokens(request("a", 0), 0).tokens == 0, "a failed store is none"


def test_a_load_that_breaks_in_the_middle_keeps_its_leading_part(rig: Rig) -> None:
    rig.put(1, 2)
    rig.put_below(3)
    asks = request("a", 1, 2, 3)
    assert rig.side.get_matched_tokens(asks, 0).tokens == 12
    rig.store.drop([pack_key(digest(3))])
    rig.side.begin_load(asks, [[20, 21, 22]], 12, overlapped=False)
    meta = rig.side.build_meta([])
    assert [job.block_ids for job in meta.loads] == [[20, 21]]
    (report,) = rig.work(meta)
    assert report.num_loaded_tokens == 8
    assert rig.side.get_matched_tokens(asks, 0) == Match(0, MatchKind.NONE), "offered again"
    assert rig.side.stats()["failures"] == {"partial": 1}


def test_a_load_of_which_nothing_is_left_is_reported_without_a_copy(rig: Rig) -> None:
    rig.put_below(1)

    def broken(op: str, _keys: Sequence[bytes]) -> None:
        if op == "load":
            raise TierError("unreadable")

    rig.store.fault = broken
    asks = request("a", 1)
    rig.side.get_matched_tokens(asks, 0)
    rig.side.begin_load(asks, [[20]], 4, overlapped=False)
    assert not rig.side.build_meta([])
    assert rig.side.has_pending_work(), "there is something to report"
    assert rig.side.update_from_worker(ConnectorWorkerOutput()) == [
        LoadReport("a", 0, {}, pytest.approx(0, abs=WAIT_SECONDS))
    ]
    assert not rig.side.has_pending_work()
    rig.store.fault = None
    assert rig.side.get_matched_tokens(asks, 0) == Match(0, MatchKind.NONE)
    assert rig.side.get_matched_tokens(request("b", 1), 0).tokens == 4


def test_a_failed_copy_is_a_failed_load(rig: Rig) -> None:
    rig.put(1)
    asks = request("a", 1)
    rig.side.get_matched_tokens(asks, 0)
    rig.side.begin_load(asks, [[20]], 4, overlapped=False)
    (report,) = rig.work(rig.side.build_meta([]), fail=True)
    assert (report.num_loaded_tokens, report.tokens_by_tier) == (0, {})
    assert rig.side.get_matched_tokens(asks, 0) == Match(0, MatchKind.NONE)
    stats = rig.side.stats()
    assert stats["failures"] == {"load_copy": 1}
    assert (stats["loads"], stats["load_bytes"]) == (0, 0)
    assert stats["seconds_loaded"] == report.seconds > 0, "it was waited for all the same"


def test_an_id_used_again_for_other_tokens_gets_its_own_answer(rig: Rig) -> None:
    rig.put(1, 2)
    assert rig.side.get_matched_tokens(request("a", 1, 2), 0).tokens == 8
    assert rig.side.get_matched_tokens(request("a", 3, 4), 0).tokens == 0
    assert rig.side.get_matched_tokens(request("a", 1, 9), 0).tokens == 4


def test_an_answer_is_kept_until_something_changes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = []
    find = rig.hierarchy.find_prefix
    monkeypatch.setattr(
        rig.hierarchy, "find_prefix", lambda keys: looked_up.append(1) or find(keys)
    )
    asks = request("a", 1, 2)
    for _ in range(5):
        assert rig.side.get_matched_tokens(asks, 0).tokens == 0
    assert len(looked_up) == 1
    rig.put(1)
    assert rig.side.get_matched_tokens(asks, 0).tokens == 4
    assert len(looked_up) == 2


def test_what_is_remembered_of_requests_is_bounded(rig: Rig) -> None:
    for number in range(REMEMBERED_LOOKUPS + 10):
        rig.side.get_matched_tokens(request(f"r{number}", 1), 0)
    assert len(rig.side._lookups) == REMEMBERED_LOOKUPS


def test_reset_forgets_every_tier(rig: Rig) -> None:
    rig.put(1)
    rig.put_below(2)
    rig.side.get_matched_tokens(request("a", 1, 2), 0)
    rig.side.reset()
    assert rig.side.get_matched_tokens(request("a", 1, 2), 0).tokens == 0
    assert rig.side.get_matched_tokens(request("b", 2), 0).tokens == 0


def test_what_is_left_in_the_pool_survives_a_shutdown(rig: Rig) -> None:
    meta = rig.side.build_meta([evicted(2, 2), evicted(1, 1)])
    rig.work(meta)
    kept: list[list[Answer]] = []
    close = rig.store.close

    def closing(timeout_seconds: float) -> None:
        kept.append(rig.store.lookup([pack_key(digest(n)) for n in (1, 2)]))
        close(timeout_seconds)

    rig.store.close = closing
    rig.side.shutdown(WAIT_SECONDS)
    rig.side.shutdown(WAIT_SECONDS)
    assert kept == [[Answer.HIT] * 2]


def test_what_ended_requests_had_read_ahead_leaves_room_for_later_ones(rig: Rig) -> None:
    """A quarter of the slab is four blocks; more are read ahead in the course of time."""
    for number in range(0, 12, 2):
        rig.put_below(number, number + 1)
        asks = request(f"of {number}", number, number + 1)
        rig.side.request_queued(asks)
        ticket = rig.side.requests[asks.request_id].read_ahead
        assert ticket is not None and len(ticket.keys) == 2, number
        while ticket.waiting:
            rig.wait_for_wakeup()
        rig.side.request_finished(asks.request_id)
    assert rig.side._lookups._blocks_ahead == 0
