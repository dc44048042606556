# SPDX-License-Identifier: Apache-2.0
"""Simulated lives of the engine and its tiers: whatever happens, everybody is answered rightly,
those too whose requests share blocks or have draft tokens.

The scheduler, the connector and the hierarchy are the real ones; time, device and stores are
simulated, so a life depends on its seed alone. A seed that fails is pinned in tests/regressions.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from stratakv.connector import loads
from stratakv.connector.copy_signal import CopySignal
from stratakv.connector.device.base import Stream
from stratakv.connector.messages import ConnectorMetadata, CopyJob, EvictedBlock, LoadReport
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.offload_worker import OffloadWorker
from stratakv.connector.outgoing import Outgoing
from stratakv.engine.batch.batch_update import BatchUpdate
from stratakv.engine.cache.kv_block import BlockCopy
from stratakv.engine.cache.kv_cache_manager import KVCacheManager
from stratakv.engine.cache.shared_tails import SharedTails
from stratakv.engine.request.request import Request
from stratakv.engine.scheduler.output import SchedulerOutput
from stratakv.engine.worker.step_batch import StepBatch
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.hierarchy.promotions import LoadTicket, Promotion, Promotions
from stratakv.tiers.tag import Proof

from ..stepping import noted
from .store import MODES
from .world import World

SEEDS = {"ci": 140, "long": 100_000}
PARTS = 4
# A planted bug has to be found within so many lives.
LIVES_TO_FIND = 300
ROOT = Path(__file__).parents[2]


def live(seed: int) -> tuple[str, Counter[str]]:
    """One life, its hash and what it went through; a failure says how to see it again."""
    world = World(seed)
    with noted(f"replay: python -m tests.simulation {seed}"):
        return world.live(), world.seen


def live_all(seeds: range) -> Counter[str]:
    """What the lives of these seeds together went through."""
    return sum((live(seed)[1] for seed in seeds), Counter())


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """What all lives together went through."""
    return Counter()


@pytest.mark.parametrize("part", range(PARTS))
def test_everybody_is_answered_rightly(
    part: int, seed: int, scale: str, seen: Counter[str]
) -> None:
    seen += live_all(range(seed, seed + SEEDS[scale] // PARTS))
    seen["parts"] += 1


def test_the_lives_were_worth_living(seen: Counter[str]) -> None:
    """They load from every tier in every way, and everything breaks that can."""
    if seen["parts"] < PARTS:
        pytest.skip("not all lives were lived in this process")
    for tier in ("pool", "cpu", "ssd", "net"):
        assert seen[f"reused_tokens_{tier}"], tier
    for what in (*MODES, "ahead", "overtaken", "loads", "meetings", "preemptions", "ended_abort",
                 "ended_error", "store_copy", "load_copy", "partial", "unavailable",
                 "loads_given_up", "failed with its load", "harmed nan", "harmed copies",
                 "harmed batch", "nan", "healed", "forks", "copied_blocks", "accepted drafts",
                 "rejected drafts"):  # fmt: skip
        assert seen[what], what


def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    traces = [live(seed + number)[0] for number in range(10)]
    assert [live(seed + number)[0] for number in range(10)] == traces
    assert len(set(traces)) == len(traces)


def test_the_trace_does_not_depend_on_the_process(seed: int) -> None:
    """A pinned seed is replayed by a process that puts sets in another order."""
    shown = subprocess.run(
        [sys.executable, "-m", "tests.simulation", str(seed), "--trace"],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "1"},  # here it is a random one
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    found = re.search(rf"^seed {seed}: (\w+)$", shown, re.MULTILINE)
    assert found is not None, shown[-300:]
    assert shown.count("\n") > 10
    assert found[1] == live(seed)[0]


def wait_for_nothing(self: OffloadWorker) -> None:
    """The pass begins while evicted blocks are on their way out."""


def ignore_overtaken(self: OffloadWorker, meta: ConnectorMetadata) -> None:
    """Blocks that are being stored ahead of need are overwritten."""
    meta.overtaken = []
    start_step(self, meta)


def believe_every_read(
    self: Promotions, promotion: Promotion, proofs: list[Proof | None], fault: str
) -> None:
    """A read that found nothing, or found it damaged, counts as good."""
    end_promotion(self, promotion, [Proof(b"", b"")] * len(promotion.keys))


def publish_torn_reads(self: Promotions, promotion: Promotion, future: Future[Any]) -> None:
    """A read whose answer makes no sense counts as good."""
    if future.exception(0) is None:
        end_promotion(self, promotion, [Proof(b"", b"")] * len(promotion.keys))
    else:
        arrived(self, promotion, future)


def forget_to_unpin(self: Hierarchy, ticket: LoadTicket) -> None:
    """The slots of a load are never given back."""
    ticket.ended = True


def wake_nobody(self: CopySignal) -> None:
    """The engine sleeps on when something has happened."""


def keep_reports(self: OffloadScheduler, output: Any) -> list[LoadReport]:
    """Of several requests whose loads have ended only one hears of it."""
    return update_from_worker(self, output)[:1]


def keep_copies(self: OffloadScheduler, blocks: Sequence[EvictedBlock]) -> None:
    """A copy ahead of need of a block that lost its key goes on, over what is written next."""


def drop_what_is_there(self: Hierarchy, keys: Sequence[bytes]) -> None:
    """What is on its way from the pool when its key is dropped gets to the slab."""
    drop(self, keys)
    for key in keys:
        if (slot := self._slab._slots.get(key)) is not None:  # type: ignore[attr-defined]
            slot.is_unwanted = False


def drop_nothing(self: OffloadScheduler, keys: Sequence[bytes], cause: str) -> None:
    """A block that gave somebody NaN stays in the tiers."""


def report_nothing(self: OffloadWorker, job: CopyJob, stream: Stream) -> None:
    """Copies that could not begin are forgotten."""


def go_on_dirty(
    self: StepBatch, output: SchedulerOutput, take: Callable[[BatchUpdate], None]
) -> None:
    """Half of an update is taken for a whole one."""
    self._is_dirty = False
    follow(self, output, take)


def report_a_failure(*fields: Any, **named: Any) -> LoadReport:
    """A load that its request gave up counts as one that has failed."""
    return LoadReport(*fields, **{**named, "is_cancelled": False})


def copy_one_less(self: SharedTails) -> list[BlockCopy]:
    """A block that a fork shares and writes to is not copied first."""
    return take_copies(self)[1:]


def keep_slots(self: KVCacheManager, request: Request) -> None:
    """Blocks that drafts were given stay a request's own when the drafts are rejected."""


def cache_too_much(self: KVCacheManager, request: Request) -> None:
    """A block that the newest token fills is cached before that token was computed."""
    tables = self.tables(request.request_id)
    first = self.keys.counts.get(request.request_id, 0)
    self.keys.cache_full_blocks(request, tables, request.num_tokens, computed=True)
    end = self.keys.counts.get(request.request_id, 0)
    self.pool.note_computed([block for table in tables for block in table[first:end]])


drop = Hierarchy.forget_blocks
follow = StepBatch.apply_step
start_step = OffloadWorker.start_step
end_promotion = Promotions._finish_promotion
arrived = Promotions._arrived
update_from_worker = OffloadScheduler.update_from_worker
take_copies = SharedTails.take_copies

# How many lives of the default seed a bug leaves alone. They show nothing and are not lived.
LIVES_LEFT_ALONE = {
    keep_reports: 61, keep_copies: 26, drop_nothing: 191, report_a_failure: 117, cache_too_much: 9
}  # fmt: skip


def live_until_found(bug: Callable[..., Any], seed: int) -> None:
    first = seed + LIVES_LEFT_ALONE.get(bug, 0)
    live_all(range(first, first + LIVES_TO_FIND))


@pytest.mark.parametrize(
    ("part", "name", "bug"),
    [
        (OffloadWorker, "wait_before_forward", wait_for_nothing),
        (OffloadWorker, "start_step", ignore_overtaken),
        (Promotions, "_finish_promotion", believe_every_read),
        (Promotions, "_arrived", publish_torn_reads),
        (Hierarchy, "end_load", forget_to_unpin),
        (CopySignal, "wake", wake_nobody),
        (OffloadScheduler, "update_from_worker", keep_reports),
        (OffloadScheduler, "invalidate_blocks", drop_nothing),
        (OffloadWorker, "_report_failed_job", report_nothing),
        (StepBatch, "apply_step", go_on_dirty),
        (loads, "LoadReport", report_a_failure),
        (SharedTails, "take_copies", copy_one_less),
        (KVCacheManager, "trim", keep_slots),
        (KVCacheManager, "cache_accepted", cache_too_much),
    ],
)
def test_a_planted_bug_is_found(
    part: object, name: str, bug: Callable[..., Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, name, bug)
    with pytest.raises(AssertionError):
        live_until_found(bug, seed)


def test_a_torn_copy_ahead_is_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts keep it from a tier, each for itself: neither does here."""
    monkeypatch.setattr(Outgoing, "names_dropped", keep_copies)
    monkeypatch.setattr(Hierarchy, "forget_blocks", drop_what_is_there)
    with pytest.raises(AssertionError, match="wrong bytes"):
        live_until_found(keep_copies, seed)
