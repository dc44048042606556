# SPDX-License-Identifier: Apache-2.0
"""Looks into an engine core for what must not be there: references, pins, requests, wrong bytes.

Reads private fields of every part, so that the parts need no methods for tests.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from stratakv.connector.base import NullConnectorWorker
from stratakv.connector.page_keys import pages_of
from stratakv.engine.config.speculative_config import DRAFT_MODEL, EAGLE
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.executor import InProcessExecutor
from stratakv.engine.scheduler.scheduler import Scheduler
from stratakv.engine.worker.model_runner import ModelRunner
from stratakv.tiers.base import Answer, SlabTier

from .stepping import PAUSE_SECONDS, WAIT_SECONDS

# What follows the pool's key of a block in a tier's key: shard 0 of 1.
SHARD = bytes([0, 0, 1, 0, 0, 0])


def is_busy(core: EngineCore) -> bool:
    """Whether something is under way that will end by itself."""
    connector: Any = core._connector
    if not connector.has_tiers:
        return False
    hierarchy = connector._hierarchy
    return bool(
        core.scheduler._states.loads.blocking
        or len(connector._outgoing)
        or connector._loads.under_way
        or hierarchy._promotions.under_way
        or hierarchy._write_backs.in_flight
    )


def settle(core: EngineCore, seconds: float = WAIT_SECONDS) -> None:
    """Step until every request has ended and every block that a tier took has reached the next one.

    A slow disk would otherwise meet a full slab, which evicts blocks that are not written yet.
    """
    deadline = time.monotonic() + seconds
    core.step()
    while core.has_work() or is_busy(core):  # in this order: the first takes in what ended
        assert time.monotonic() < deadline, f"requests or transfers did not end in {seconds:g} s"
        time.sleep(PAUSE_SECONDS)
        core.step()


def check_references(core: EngineCore) -> None:
    """The references to blocks are tables, and what nobody holds is in the queue."""
    manager = core.scheduler.manager
    references: Counter[int] = Counter()
    for tables in manager._tables.values():
        for table in tables:
            references.update(block.block_id for block in table)
    if manager.states is not None:
        references.update(block.block_id for block in manager.states.held)
    del references[0]  # the null block
    blocks = manager.pool.blocks
    assert [block.ref_cnt for block in blocks] == [references[b.block_id] for b in blocks]
    free = sorted(block.block_id for block in manager.pool.free_queue)
    assert free == [b.block_id for b in blocks[1:] if b.block_id not in references]


@dataclass
class RunnerLook:
    """What a model runner holds: names of requests and of unfinished copies, the pool's bytes."""

    held: list[str]
    pool: np.ndarray[Any, Any]


def look_at_runner(runner: ModelRunner) -> RunnerLook:
    """Where it lives."""
    held = [*runner._steps.requests, *runner.batch.row_of]
    if (slots := runner._states) is not None:
        held += slots._requests
    side: Any = runner._connector
    if not isinstance(side, NullConnectorWorker):
        kinds = {"stores": side._stores, "loads": side._loads, "ahead": side._ahead}
        held += [name for name, jobs in kinds.items() if jobs]
    return RunnerLook(held, runner.pool.tensor.numpy())


def check_nothing_left(core: EngineCore, look: RunnerLook | None = None) -> None:
    """All requests have ended, the worker has been told, and nothing is busy. `look`: at a runner
    that lives elsewhere."""
    check_references(core)
    check_ended(core.scheduler, core._connector)
    if look is None:
        executor = core.executor
        assert isinstance(executor, InProcessExecutor)
        look = look_at_runner(executor.runner)
    assert not look.held
    if core._connector.has_tiers:
        check_bytes(core, core._connector._hierarchy._slab, look.pool)


def check_ended(scheduler: Scheduler, side: Any) -> None:
    """No request is left in the scheduler or in the connector's scheduler side (None: none), no
    block is held, and the slab's slots are free, or whole and not pinned."""
    states, manager = scheduler._states, scheduler.manager
    assert manager.pool.is_idle
    assert manager._tables == {}
    if (kept := manager.states) is not None:
        assert not (kept._hits or kept._loads or kept._uncached or kept._newest)
    cached = {block for block in manager.pool.blocks if block.block_hash is not None}
    for key, found in manager.pool._cached.items():
        blocks = set(found.values()) if isinstance(found, dict) else {found}
        assert all(block.block_hash == key for block in blocks), "a key is left of a block"
        cached -= blocks
    assert not cached, "a block has a key that nothing finds"
    assert not (manager.pool._pins or manager.pool.num_reclaimable)
    assert not (manager.shared_tails.families or manager.shared_tails.sources)
    assert not (len(states.kept) or states.num_forking)
    assert not (states.requests or states.num_unfinished or states.running or states.loaded)
    assert not (len(states.waiting) or len(states.skipped) or len(states.deferred))
    assert not (states.loads.blocking or states.loads.num_overlapped)
    if side is None or not side.has_tiers:
        return
    loads, outgoing = side._loads, side._outgoing
    assert not (loads.under_way or loads._copies or loads.ready or loads._reports or loads.coming)
    assert not (outgoing._tickets or outgoing._ahead or outgoing._ahead_job_of)
    assert not (side.requests or side.awaiting_prefill or side._read_times.watched)
    assert not (len(side._lookups) or side._lookups.unanswered or side._lookups._blocks_ahead)
    slab = side._hierarchy._slab
    assert all(slot.committed and not slot.pins for slot in slab._slots.values())
    assert len(slab._free) + len(slab._slots) == slab.num_slots
    for write_back in side._hierarchy._write_backs._all:
        assert set(write_back._dirty) <= set(slab.keys())


def check_bytes(core: EngineCore, slab: SlabTier, pool: np.ndarray[Any, Any]) -> None:
    """A block is the same wherever it lies, but for the rounding of another batch. Layers of a
    draft model may have zeros in one place, where an answer was left for a while. An EAGLE head's
    part is not compared where a fault of the model has made it no number."""
    num_layers = slab.layout.num_layers
    for block_id, page_key, _ in pages_of(core.scheduler.manager.pool.resident()):
        key = page_key + SHARD
        if slab.lookup([key]) != [Answer.HIT]:
            continue
        [slot] = slab.pin([key], touch=False)
        assert slot is not None
        kept = np.frombuffer(bytes(slab.buffer(slot)[: slab.layout.page_bytes]), np.float64)
        slab.unpin([key])
        layers = kept.reshape(num_layers, -1), pool[block_id].reshape(num_layers, -1)
        there = np.ones(num_layers, bool)
        if core.config.speculative.method == DRAFT_MODEL:
            there = layers[0].any(1) & layers[1].any(1)
        if core.config.speculative.method == EAGLE:
            is_number = ~np.isnan(layers[0] + layers[1])
            layers = np.where(is_number, layers[0], 0.0), np.where(is_number, layers[1], 0.0)
        np.testing.assert_allclose(layers[0][there], layers[1][there], atol=1e-6)
