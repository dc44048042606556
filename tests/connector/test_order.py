# SPDX-License-Identifier: Apache-2.0
"""Copies and passes in every order a device may choose: nothing begins before what it waits for.

A store begins after its block's last writer; a block is overwritten, by a pass or a load, after its
store has ended; a load's target is read after the load. The exhaustive tests try every sequence of
roles that a small pool can go through, under every order in which the three streams can end their
work. What they would miss is shown by bugs put in on purpose.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from stratakv.connector.device.base import Event, Stream
from stratakv.connector.messages import ConnectorMetadata, CopyJob
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.offload_worker import OffloadWorker

from .order_checker import Choose, OutOfOrder, RecordingDevice
from .order_walk import Role, Step, Walk, digest, explore

SCHEDULES = {"ci": 1_000, "long": 500_000}
# Of a walk of the exhaustive tests: four blocks in two steps.
MOST_LOADS = 8
# What a block goes through in two steps where an order can matter.
CRITICAL = [
    (Role.COLD, Role.WRITE),
    (Role.COLD, Role.LOAD),
    (Role.COLD, Role.DROP),
    (Role.COLD, Role.READ),
    (Role.WRITE, Role.WRITE),
    (Role.WRITE, Role.COLD),
    (Role.LOAD, Role.READ),
    (Role.READ, Role.LOAD),
]


class IgnoresTheWriter(OffloadWorker):
    """Stores and loads without waiting for the pass before them."""

    def _submit_copy(
        self, stream: Stream, job: CopyJob, after: list[Event], *, is_held: bool = False
    ) -> None:
        super()._submit_copy(stream, job, after[1:], is_held=is_held)


class LoadsBesideStores(OffloadWorker):
    """Loads into a block while it is still being stored."""

    def _submit_copy(
        self, stream: Stream, job: CopyJob, after: list[Event], *, is_held: bool = False
    ) -> None:
        super()._submit_copy(stream, job, after[:1], is_held=is_held)


class WaitsForNothing(OffloadWorker):
    """Begins the pass while evicted blocks are on their way out."""

    def wait_before_forward(self) -> None:
        pass


class IgnoresOvertaken(OffloadWorker):
    """Overwrites blocks that are being stored ahead of need."""

    def start_step(self, meta: ConnectorMetadata) -> None:
        super().start_step(dataclasses.replace(meta, overtaken=[]))


class ForgetsUncachedBlocks(OffloadScheduler):
    """Takes blocks without a key for blocks that nobody copies."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stores_ahead.names_dropped = lambda blocks: None  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def explore_walks(
    histories: Iterable[Sequence[Sequence[Role]]],
    *,
    worker: type[OffloadWorker] = OffloadWorker,
    scheduler: type[OffloadScheduler] = OffloadScheduler,
) -> int:
    """Every order of every walk; `histories` has, for each walk, the roles of each block. How many
    runs that took."""
    runs = 0
    for history in histories:
        steps: list[Step] = list(zip(*history, strict=True))
        make = functools.partial(make_walk, len(history), worker=worker, scheduler=scheduler)
        try:
            runs += explore(make, functools.partial(go, steps))
        except AssertionError as error:
            error.add_note(f"the steps were {[[role.value for role in step] for step in steps]}")
            raise
    return runs


def make_walk(num_blocks: int, choose: Choose, **parts: Any) -> Walk:
    return Walk(num_blocks, RecordingDevice(choose), num_loadable=MOST_LOADS, **parts)


def go(steps: Sequence[Step], walk: Walk) -> None:
    for step in steps:
        walk.step(step)
    walk.end()


def one_block(steps: int) -> list[list[tuple[Role, ...]]]:
    return [[roles] for roles in itertools.product(Role, repeat=steps)]


def test_one_block_in_every_order(scale: str) -> None:
    assert explore_walks(one_block(3 if scale == "ci" else 5)) > 1_000


def test_two_blocks_in_every_order(scale: str) -> None:
    paths = list(itertools.product(Role, repeat=2 if scale == "ci" else 3))
    # Blocks that go through the same are in the same jobs, so each pair stands once.
    assert explore_walks(itertools.combinations_with_replacement(paths, 2)) > 1_000


def test_four_blocks_in_every_order(scale: str) -> None:
    paths = CRITICAL if scale == "ci" else list(itertools.product(Role, repeat=2))[::2]
    assert explore_walks(itertools.combinations(paths, 4)) > 1_000


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        (IgnoresTheWriter, "the store .* began before the end of the pass"),
        (LoadsBesideStores, "the load .* began before the end of the store"),
        (WaitsForNothing, "the pass .* began before the end of the store"),
        (IgnoresOvertaken, "the pass .* began before the end of the store"),
    ],
)
def test_a_worker_with_a_bug_is_caught(bug: type[OffloadWorker], says: str) -> None:
    with pytest.raises(OutOfOrder, match=says):
        explore_walks(one_block(3), worker=bug)


def test_a_scheduler_side_with_a_bug_is_caught() -> None:
    with pytest.raises(OutOfOrder, match=r"the pass .* began before the end of the store"):
        explore_walks(one_block(3), scheduler=ForgetsUncachedBlocks)


def test_random_orders_with_faults(scale: str, seed: int) -> None:
    """Longer walks on larger pools, whose copies are refused, break, and do not end in time."""
    seen = {"torn": 0, "refused": 0, "loads": 0, "ahead": 0}
    for number in range(SCHEDULES[scale]):
        try:
            walk_at_random(random.Random(seed + number), seen)
        except AssertionError as error:
            error.add_note(f"this was walk_at_random of seed {seed + number}")
            raise
    assert min(seen.values()) > SCHEDULES[scale] // 100, seen


def walk_at_random(rng: random.Random, seen: dict[str, int]) -> None:
    faulty = rng.random() < 0.5

    def fails() -> str:
        return rng.choice(["refuse", "break"]) if faulty and rng.random() < 0.2 else ""

    haste = rng.random()  # of the host: how rarely anything ends while it goes on
    device = RecordingDevice(
        lambda count: 0 if rng.random() < haste else rng.randrange(count),
        fails,
        lambda: faulty and rng.random() < 0.1,
    )
    num_blocks = rng.randint(1, 6)
    walk = Walk(num_blocks, device)
    stores: dict[int, Event] = {}
    texts = [digest("text", i) for i in range(2 * num_blocks)]
    try:
        for _ in range(rng.randint(2, 10)):
            roles = rng.choices(list(Role), weights=[2, 2, 3, 2, 4, 0.3], k=num_blocks)
            if rng.random() < 0.1:
                walk.fail(roles)
            else:
                # Two blocks of the pool may have the same text, and so the same key.
                walk.step(roles, content=lambda _block: rng.choice(texts))
            stores |= walk.worker._stores
            seen["ahead"] += len(walk.worker._ahead)
        walk.end()
    finally:
        walk.close()
    torn = {job_id for job_id, event in stores.items() if event in device.torn}
    assert torn <= walk.failed, "a block was kept that was overwritten while it was copied"
    seen["torn"] += len(torn)
    seen["refused"] += len(walk.failed - stores.keys())
    seen["loads"] += walk.loads
