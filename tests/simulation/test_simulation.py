# SPDX-License-Identifier: Apache-2.0
"""Simulated lives of the engine and its tiers: whatever happens, everybody is answered rightly.

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
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from stratakv.connector.base import ConnectorMetadata, LoadReport
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.offload_worker import OffloadWorker
from stratakv.connector.transfer import CopySignal
from stratakv.tiers.base import Answer
from stratakv.tiers.hierarchy import Hierarchy
from stratakv.tiers.read_up import LoadTicket, Read, ReadUp

from .store import MODES
from .world import World

SEEDS = {"ci": 200, "long": 100_000}
PARTS = 4
# A planted bug has to be found within so many lives.
LIVES_TO_FIND = 300
ROOT = Path(__file__).parents[2]


def live(seed: int) -> tuple[str, Counter[str]]:
    """One life, its hash and what it went through; a failure says how to see it again."""
    world = World(seed)
    try:
        return world.live(), world.seen
    except BaseException as error:
        error.add_note(f"replay: python -m tests.simulation {seed}")
        raise


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
                 "loads_given_up", "failed with its load"):  # fmt: skip
        assert seen[what], what


def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    traces = [live(seed + number)[0] for number in range(10)]
    assert [live(seed + number)[0] for number in range(10)] == traces
    assert len(set(traces)) == len(traces)


def test_the_trace_does_not_depend_on_the_process(seed: int) -> None:
    """A pinned seed is replayed by processes that put sets in another order."""
    traces = {live(seed)[0]}
    for hash_seed in ("1", "2"):
        shown = subprocess.run(
            [sys.executable, "-m", "tests.simulation", str(seed), "--trace"],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        found = re.search(rf"^seed {seed}: (\w+)$", shown, re.MULTILINE)
        assert found is not None, shown[-300:]
        assert shown.count("\n") > 10
        traces.add(found[1])
    assert len(traces) == 1


def wait_for_nothing(self: OffloadWorker) -> None:
    """The pass begins while evicted blocks are on their way out."""


def ignore_overtaken(self: OffloadWorker, meta: ConnectorMetadata) -> None:
    """Blocks that are being stored ahead of need are overwritten."""
    meta.overtaken = []
    start_step(self, meta)


def believe_every_read(self: ReadUp, read: Read, answers: list[Answer], fault: str) -> None:
    """A read that found nothing, or found it damaged, counts as good."""
    end_read(self, read, [Answer.HIT] * len(read.keys))


def publish_torn_reads(self: ReadUp, read: Read, future: Future[Any]) -> None:
    """A read whose answer makes no sense counts as good."""
    if future.exception(0) is None:
        end_read(self, read, [Answer.HIT] * len(read.keys))
    else:
        arrived(self, read, future)


def forget_to_unpin(self: Hierarchy, ticket: LoadTicket) -> None:
    """The slots of a load are never given back."""
    ticket.ended = True


def wake_nobody(self: CopySignal) -> None:
    """The engine sleeps on when something has happened."""


def keep_reports(self: OffloadScheduler, output: Any) -> list[LoadReport]:
    """Of several requests whose loads have ended only one hears of it."""
    return update_from_worker(self, output)[:1]


start_step = OffloadWorker.start_step
end_read = ReadUp._end
arrived = ReadUp._arrived
update_from_worker = OffloadScheduler.update_from_worker


@pytest.mark.parametrize(
    ("part", "name", "bug"),
    [
        (OffloadWorker, "wait_before_forward", wait_for_nothing),
        (OffloadWorker, "start_step", ignore_overtaken),
        (ReadUp, "_end", believe_every_read),
        (ReadUp, "_arrived", publish_torn_reads),
        (Hierarchy, "end_load", forget_to_unpin),
        (CopySignal, "wake", wake_nobody),
        (OffloadScheduler, "update_from_worker", keep_reports),
    ],
)
def test_a_planted_bug_is_found(
    part: type, name: str, bug: Callable[..., Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, name, bug)
    with pytest.raises(AssertionError):
        live_all(range(seed, seed + LIVES_TO_FIND))
