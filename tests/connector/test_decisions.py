# SPDX-License-Identifier: Apache-2.0
"""The scheduler side where computing may be quicker than loading: declined, given up, probed."""

from __future__ import annotations

import time

from stratakv.connector.costs.economics import PROBE_EVERY
from stratakv.connector.messages import ConnectorWorkerOutput, Match, MatchKind
from stratakv.connector.request_offload import RequestOffload
from stratakv.tiers.block import pack_key

from .test_offload_scheduler import WAIT_SECONDS, Rig, digest, request, rig

__all__ = ["rig"]  # a fixture

NONE = Match(0, MatchKind.NONE)


def learn(rig: Rig, *, prefill: float, cpu: float = 1e-5, ssd: float = 1e-5) -> None:
    """Seconds of a token; of any transfer from a tier, whatever its size."""
    for name, seconds in {"cpu": cpu, "ssd": ssd}.items():
        rig.side._economics.links[name].fixed_seconds = seconds
        rig.side._economics.links[name].seconds_per_byte = 1e-12
    for _ in range(200):
        rig.side._economics.prefill.record_prefill(100, 100 * 50, 100 * prefill)


def test_what_is_quicker_to_compute_is_not_offered(rig: Rig) -> None:
    rig.put(1, 2, 3)
    learn(rig, prefill=1e-3, cpu=0.1)
    assert rig.side.get_matched_tokens(request("a", 1, 2, 3), 0) == NONE
    stats = rig.side.stats()
    assert stats["declined_tokens"] == {"cpu": 12}
    assert stats["lookup_hits"] == {"cpu": 3, "ssd": 0}, "found, though not used"
    assert rig.side.get_matched_tokens(request("a", 1, 2, 3), 0) == NONE
    assert rig.side.stats()["declined_tokens"] == {"cpu": 12}, "a request counts once"
    learn(rig, prefill=1.0, cpu=0.1)
    assert rig.side.get_matched_tokens(request("b", 1, 2, 3), 0) == Match(12, MatchKind.LOAD)


def test_only_the_quick_part_is_offered_and_loaded(rig: Rig) -> None:
    rig.put(1)
    rig.put_below(2, 3)
    learn(rig, prefill=1e-3, ssd=1.0)
    asks = request("a", 1, 2, 3)
    rig.side.request_queued(asks)
    assert rig.hierarchy.traffic()["ssd"].active_promotions == 0, "nothing is read in vain"
    assert rig.side.get_matched_tokens(asks, 0) == Match(4, MatchKind.LOAD)
    rig.side.begin_load(asks, [[20]], 4, overlapped=False)
    (report,) = rig.work(rig.side.build_meta([]))
    assert report.tokens_by_tier == {"cpu": 4}


def test_who_computes_does_not_wait_for_anothers_load(rig: Rig) -> None:
    rig.put_below(1)
    rig.slow_reads()
    first = request("a", 1)
    rig.side.get_matched_tokens(first, 0)
    rig.side.begin_load(first, [[20]], 4, overlapped=False)
    learn(rig, prefill=1e-6, ssd=1.0)
    assert rig.side.get_matched_tokens(request("b", 1), 0) == NONE
    rig.wait()
    assert len(rig.work(rig.side.build_meta([]))) == 1


def test_a_load_slower_than_computing_is_given_up_and_not_offered_again(rig: Rig) -> None:
    rig.put(1)
    rig.put_below(2, 3)
    learn(rig, prefill=5e-3)
    rig.slow_reads(0.5)
    asks = request("a", 1, 2, 3)
    assert rig.side.get_matched_tokens(asks, 0).tokens == 12
    began = time.monotonic()
    rig.side.begin_load(asks, [[20, 21, 22]], 12, overlapped=False)
    before = rig.side._economics.links["ssd"].estimate_transfer(1)
    rig.wait()  # woken by the alarm, since the disk is silent
    waited = time.monotonic() - began
    assert 8 * 5e-3 <= waited < 0.4
    meta = rig.side.build_meta([])
    assert [job.block_ids for job in meta.loads] == [[20]], "what had come is used"
    (report,) = rig.work(meta)
    assert (report.num_loaded_tokens, report.is_whole) == (4, False)
    assert rig.side.stats()["failures"] == {"slow": 1}
    assert rig.side._economics.links["ssd"].estimate_transfer(1) > before, (
        "it is not known how slow, but that it is"
    )
    assert rig.side.get_matched_tokens(asks, 0) == NONE
    # What comes late is there for the next.
    while rig.side._read_times.watched:
        assert time.monotonic() < began + WAIT_SECONDS
        rig.side.has_pending_work()
    assert rig.slab.stats().pinned_blocks == 0
    assert rig.side._economics.links["ssd"].estimate_transfer(1) > 2 * before
    assert rig.side.get_matched_tokens(request("b", 1, 2, 3), 0).tokens == 12


def test_a_load_given_up_with_nothing_there_is_reported_without_a_copy(rig: Rig) -> None:
    rig.put_below(1)
    learn(rig, prefill=1e-3)
    rig.slow_reads(0.2)
    asks = request("a", 1)
    rig.side.request_queued(asks)  # what is given up is a read that began here
    before = rig.side._economics.links["ssd"].estimate_transfer(1)
    assert rig.side.get_matched_tokens(asks, 0).tokens == 4
    rig.side.begin_load(asks, [[20]], 4, overlapped=False)
    rig.wait()
    assert not rig.side.build_meta([])
    assert rig.side._economics.links["ssd"].estimate_transfer(1) > 2 * before
    (report,) = rig.side.update_from_worker(ConnectorWorkerOutput())
    assert report.num_loaded_tokens == 0
    assert rig.side.stats()["failures"] == {"slow": 1}


def test_probes_find_out_that_a_slow_tier_is_quick_again(rig: Rig) -> None:
    """Every few requests load what is held to be too slow, and so learn that it is not."""
    learn(rig, prefill=1e-3, ssd=0.5)
    loads, seen = [], 0
    while len(loads) < 10 and seen < 20 * PROBE_EVERY:
        number = 100 + seen
        rig.put_below(number)
        asks = request(f"r{seen}", number)
        match = rig.side.get_matched_tokens(asks, 0)
        if match.kind is MatchKind.LOAD:
            loads.append(seen)
            rig.side.begin_load(asks, [[20]], 4, overlapped=False)
            rig.wait()
            rig.work(rig.side.build_meta([]))
            rig.side.has_pending_work()
        rig.hierarchy.poll()
        seen += 1
    assert loads[0] == PROBE_EVERY - 1
    assert loads[-1] == loads[-2] + 1, "it is loaded from again"
    assert rig.side.stats()["probes"] < 20


def test_reads_ahead_teach_how_slow_a_store_is(rig: Rig) -> None:
    rig.put_below(1, 2)
    rig.slow_reads(0.05)
    asks = request("a", 1, 2)
    rig.side.request_queued(asks)
    began = time.monotonic()
    before = rig.side._economics.links["ssd"].estimate_transfer(1)
    while rig.side._read_times.watched:
        assert time.monotonic() < began + WAIT_SECONDS
        rig.side.has_pending_work()
        time.sleep(0.001)
    assert rig.side._economics.links["ssd"].estimate_transfer(1) > before
    rig.side.request_finished("a")
    assert rig.slab.stats().pinned_blocks == 0


def test_copies_teach_how_slow_the_slab_is(rig: Rig) -> None:
    rig.put(1)
    asks = request("a", 1)
    rig.side.get_matched_tokens(asks, 0)
    rig.side.begin_load(asks, [[20]], 4, overlapped=False)
    (job,) = rig.side.build_meta([]).loads
    before = rig.side._economics.links["cpu"].estimate_transfer(1)
    rig.signal.note_ended(rig.signal.ended + 1)
    output = ConnectorWorkerOutput(finished_loads=[job.job_id], load_copy_seconds=1.0)
    assert len(rig.side.update_from_worker(output)) == 1
    assert rig.side._economics.links["cpu"].estimate_transfer(1) > 2 * before


def test_estimates_are_shown(rig: Rig) -> None:
    learn(rig, prefill=1e-3)
    estimates = rig.side.stats()["estimates"]
    assert isinstance(estimates, dict)
    assert estimates["break_even_tokens"] == {"cpu": 4, "ssd": 4}
    assert set(estimates["bytes_per_second"]) == {"cpu", "ssd"}


def test_one_alone_is_loaded_from_the_back_where_that_wins(rig: Rig) -> None:
    rig.put_below(*range(1, 11))
    learn(rig, prefill=1e-3)
    block = rig.hierarchy.block_bytes
    rig.side._economics.links["ssd"].seconds_per_byte = 4e-3 / block
    asks = request("a", *range(1, 11))
    rig.side.request_queued(asks)
    assert rig.hierarchy.traffic()["ssd"].active_promotions == 0, "not read from the front"
    assert rig.side.get_matched_tokens(asks, 0) == Match(40, MatchKind.OVERLAP)
    rig.side.request_queued(request("b", 99))
    assert rig.side.get_matched_tokens(asks, 0).kind is MatchKind.OVERLAP, "decided once"
    rig.side.request_finished("a")
    other = request("c", *range(1, 11))
    rig.side.request_queued(other)
    assert rig.side.get_matched_tokens(other, 0).kind is not MatchKind.OVERLAP
    assert rig.slab.pin([pack_key(digest(1))]) == [None]


def test_loads_are_overlapped_where_all_others_have_one_too(rig: Rig) -> None:
    """Nobody else computes, so computing costs nobody anything; those with overlapped loads share
    it. Where one is that has no load under way, nothing is overlapped."""
    rig.put_below(*range(1, 11))
    rig.put_below(*range(21, 31))
    rig.put_below(*range(41, 51))
    learn(rig, prefill=1e-3)
    rig.side._economics.links["ssd"].seconds_per_byte = 4e-3 / rig.hierarchy.block_bytes
    waits, first, second = (
        request(n, *range(i, i + 10)) for n, i in zip("abc", (1, 21, 41), strict=True)
    )

    def num_sharing(request_id: str) -> int:
        return rig.side._loads.num_sharing(rig.side.requests[request_id])

    for one in (waits, first):
        rig.side.requests[one.request_id] = RequestOffload(one.request_id)
    assert num_sharing("a") == num_sharing("b") == 0
    assert rig.side.get_matched_tokens(waits, 0).kind is MatchKind.LOAD
    rig.side.begin_load(waits, [list(range(20, 30))], 40, overlapped=False)
    rig.side._economics.queued = {}  # what is on its way is looked at elsewhere
    assert num_sharing("b") == 1
    assert rig.side.get_matched_tokens(first, 0) == Match(40, MatchKind.OVERLAP)
    rig.side.begin_load(first, [list(range(30, 40))], 40, overlapped=True)
    rig.side.requests["c"] = RequestOffload("c")
    assert num_sharing("c") == 2
    rig.side.requests["d"] = RequestOffload("d")
    assert num_sharing("c") == 0
    assert rig.side.get_matched_tokens(second, 0).kind is not MatchKind.OVERLAP
    assert rig.side.overlapped_loads.end_load("b") is not None
    rig.side.request_finished("d")
    assert num_sharing("c") == 0, "b computes"
    rig.side.request_finished("b")
    assert num_sharing("c") == 1
    while rig.side._loads.under_way:
        rig.work(rig.side.build_meta([]))
    while rig.side._read_times.watched:
        rig.side.has_pending_work()
