# SPDX-License-Identifier: Apache-2.0
"""The trial before the first request: what it teaches, what it leaves behind, what it says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stratakv.connector.costs.calibration import COPIES, LEAST_READ_BYTES, in_words
from stratakv.connector.costs.economics import Economics
from stratakv.connector.device.cpu import CpuCopyDevice
from stratakv.connector.messages import ConnectorWorkerOutput, MatchKind
from stratakv.connector.offload_worker import OffloadWorker
from stratakv.connector.parts import Parts
from stratakv.tiers.base import ReadSample
from stratakv.tiers.errors import TierClosed

from .test_offload_scheduler import LAYOUT, WAIT_SECONDS, Rig, request

NUM_BLOCKS = 12
SECONDS = 0.1


class CalibrationRig(Rig):
    """A rig whose worker side is real. `block_ids` are those of its pool."""

    def __init__(self) -> None:
        super().__init__()
        device = CpuCopyDevice()
        device.register_slab(self.slab)
        # The rig's own worker ends jobs too.
        self.worker = OffloadWorker(device, lambda _: self.signal.note_ended(self.signal.ended + 1))
        self.pool = torch.ones((NUM_BLOCKS, 1, 2, 4, 1, 8))
        self.worker.register_pool(self.pool)
        self.block_ids = range(1, NUM_BLOCKS)

    def begin(self) -> bool:
        """Whether the connector wanted another copy."""
        meta = self.side.estimates.build_calibration_meta(self.block_ids, SECONDS)
        self.worker.start_step(meta)
        return bool(meta)

    def end(self) -> None:
        assert self.signal.wait_idle(WAIT_SECONDS)
        assert self.side.update_from_worker(self.worker.poll()) == []


@pytest.fixture
def rig() -> Iterator[CalibrationRig]:
    rig = CalibrationRig()
    yield rig
    rig.worker.shutdown()
    rig.side.shutdown(WAIT_SECONDS)


def test_a_few_copies_teach_what_the_slab_gives(rig: CalibrationRig) -> None:
    link = rig.side._economics.links["cpu"]
    before = link.seconds_per_byte
    copies = 0
    while rig.begin():
        copies += 1
        rig.end()
    assert copies == COPIES
    assert link.is_measured and link.seconds_per_byte != before
    assert link.fixed_seconds == 1e-3, "no step of an engine was waited for"
    assert torch.equal(rig.pool[0], torch.ones_like(rig.pool[0])), "only what was given is written"


def test_nothing_stays_behind(rig: CalibrationRig) -> None:
    while rig.begin():
        rig.end()
    assert not rig.side.has_pending_work()
    stats = rig.side.stats()
    assert stats["load_copy_seconds"] == stats["load_bytes"] == stats["loads_in_flight"] == 0
    assert rig.slab.free_slots() == rig.slab.num_slots
    assert rig.slab.stats().hits == rig.store.stats().hits == 0


def test_a_copy_that_ends_among_others_teaches_nothing_and_is_counted_once(
    rig: CalibrationRig,
) -> None:
    rig.put(1)
    assert rig.begin()
    asks = request("a", 1)
    rig.side.get_matched_tokens(asks, 0)
    rig.side.begin_load(asks, [[3]], 4, overlapped=False)
    rig.worker.start_step(rig.side.build_meta([]))
    assert rig.signal.wait_idle(WAIT_SECONDS)
    (report,) = rig.side.update_from_worker(rig.worker.poll())
    assert report.num_loaded_tokens == 4
    assert rig.side._calibration._quickest == math.inf
    assert not rig.side.has_pending_work()


def test_a_copy_that_fails_teaches_nothing(rig: CalibrationRig) -> None:
    (job,) = rig.side.estimates.build_calibration_meta(rig.block_ids, SECONDS).loads
    rig.signal.note_ended(rig.signal.ended + 1)
    output = ConnectorWorkerOutput(failed_loads=[job.job_id], load_copy_seconds=1.0)
    assert rig.side.update_from_worker(output) == []
    assert not rig.side._economics.links["cpu"].is_measured
    assert not rig.side.has_pending_work()


def test_one_copy_at_a_time_and_none_without_a_pool(rig: CalibrationRig) -> None:
    assert not rig.side.estimates.build_calibration_meta([], SECONDS)
    assert rig.begin()
    assert not rig.begin()
    rig.end()


def test_what_a_store_read_is_believed_if_it_read_enough(
    rig: CalibrationRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = rig.side._economics.links["ssd"]
    for num_bytes, measured in ((LEAST_READ_BYTES - 1, False), (LEAST_READ_BYTES, True)):
        monkeypatch.setattr(rig.store, "trial_read", lambda s, n=num_bytes: ReadSample(n, 0.5))
        rig.side._calibration._num_copies = 0
        rig.begin()
        rig.end()
        assert link.is_measured is measured
    assert link.seconds_per_byte == pytest.approx(0.5 / LEAST_READ_BYTES)


@pytest.mark.parametrize("error", [TierClosed("gone"), KeyError("a mistake of the tier's")])
def test_a_store_that_is_down_hinders_nobody(
    rig: CalibrationRig,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def down(seconds: float) -> None:
        raise error

    monkeypatch.setattr(rig.store, "trial_read", down)
    assert rig.begin()
    rig.end()
    assert not rig.side._economics.links["ssd"].is_measured
    assert "the ssd tier could not be tried" in caplog.text


@pytest.mark.parametrize("sample", [[], "much", (LEAST_READ_BYTES,)])
def test_a_store_that_reads_nonsense_hinders_nobody(
    rig: CalibrationRig,
    sample: object,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rig.store, "trial_read", lambda seconds: sample)
    assert rig.begin()
    rig.end()
    assert not rig.side._economics.links["ssd"].is_measured
    assert "the ssd tier could not be tried" in caplog.text


@pytest.mark.parametrize(
    ("seconds_a_token", "expected"), [(1e-3, MatchKind.LOAD), (1e-8, MatchKind.NONE)]
)
def test_the_first_request_is_decided_on_as_later_ones_are(
    rig: CalibrationRig, seconds_a_token: float, expected: MatchKind
) -> None:
    """Without the trial it would be loaded, whatever computing takes."""
    rig.side._economics.prefill.record_prefill(512, 512 * 511 // 2, 512 * seconds_a_token)
    while rig.begin():
        rig.end()
    rig.put(*range(1, 11))
    rig.side.request_queued(request("another", 99))
    assert rig.side.get_matched_tokens(request("a", *range(1, 11)), 0).kind is expected


def test_the_line_says_what_is_estimated_and_where_loading_pays() -> None:
    hierarchy: Any = SimpleNamespace(tiers=["cpu", "ssd"], block_bytes=1000)
    economics = Economics(hierarchy, Parts(LAYOUT.block_size))
    assert in_words(economics) == (
        "prefill not measured, cpu loads 4 GB/s (not measured), ssd loads 1 GB/s (not measured)"
    )
    economics.prefill.record_prefill(1000, 0, 0.1)
    economics.links["cpu"].believe(10**9, 0.5)
    economics.links["ssd"].believe(10**9, 1000.0)
    assert in_words(economics) == (
        "prefill 10,000 tokens/s, cpu loads 2 GB/s, ssd loads 0.001 GB/s: "
        "loading pays from 12 tokens (cpu), never from ssd"
    )
