# SPDX-License-Identifier: Apache-2.0
"""Faults of the engine and the connector that an audit found (E1 to E6), in a few lines each."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stratakv.connector.connector_context import ConnectorContext
from stratakv.connector.copy_signal import CopySignal
from stratakv.connector.costs.economics import Choice, Plan
from stratakv.connector.messages import ConnectorMetadata, CopyJob, Match, MatchKind
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.offload_worker import OffloadWorker
from stratakv.connector.parts import Parts
from stratakv.connector.request_offload import Stage
from stratakv.engine.config.engine_config import SchedulerConfig
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.step_pipeline import MAX_FAILED_STEPS
from stratakv.engine.worker.block_table import BlockTable, MultiGroupBlockTable
from stratakv.engine.worker.input_batch import InputBatch
from stratakv.engine.worker.runtime.device_runtime import is_device_lost
from stratakv.kernels.copy.copy_engine import CudaError
from stratakv.tiers.base import Answer
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.testing.memory_store import MemoryStore

from ..engine import conftest as engine_conftest
from ..engine.core.conftest import config_of, finish, prompt_of, request, run
from ..engine.scheduler.conftest import SIZE
from ..simulation.clock import VirtualClock, virtual_time
from ..simulation.device import SimDevice
from ..simulation.small_slab import small_slab
from ..simulation.store import SimStore
from ..simulation.tiny_engine import LAYOUT, EngineParts, Slots, TinyEngine, is_busy
from ..stepping import step_outputs
from ..tiers.cache_server.rig import running_server

pytestmark = pytest.mark.regression
tiny_model, greedy_reference = engine_conftest.tiny_model, engine_conftest.greedy_reference

Reference = Callable[[Any, int], list[int]]
CONFIG = {"max_num_batched_tokens": 2 * SIZE, "max_num_seqs": 4, "admit_below": 1.0,
          "preempt_above": 1.0}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


class Tiny:
    """The simulation's engine over a slab and a shared store, where nothing goes wrong by itself.
    A copy takes longer than many steps."""

    def __init__(self, clock: VirtualClock, num_blocks: int, num_slots: int = 40) -> None:
        rng = random.Random(1)
        self.clock, self.wrong = clock, list[str]()
        self.slots = Slots(num_blocks)
        signal = CopySignal()
        self.store = SimStore(
            "net", LAYOUT, 500, clock, rng, self._may_hold, self.wrong, is_shared=True

        )  # fmt: skip
        slab = small_slab(LAYOUT, num_slots)
        self.hierarchy = Hierarchy(slab, [self.store], wakeup=signal.wake)
        self.device = SimDevice(clock, rng, 0.0, copy_seconds=10.0)
        self.device.register_slab(slab)
        self.side = OffloadScheduler(
            ConnectorContext(self.hierarchy, Parts(SIZE), signal, choice=Choice.LOAD)
        )
        worker = OffloadWorker(self.device, signal.note_ended)
        worker.register_pool(self.slots.pool)  # type: ignore[arg-type]
        self.engine = TinyEngine(
            EngineParts(self.side, worker),
            self.slots,
            SchedulerConfig(**CONFIG),  # type: ignore[arg-type]
            max_model_len=48,
            targets=lambda: self.device.targets,
            pass_time=lambda: clock.advance(0.001),
        )

    def _may_hold(self, key: bytes, page: bytes) -> bool:
        return self.engine.may_hold(key, page)

    def step_until(self, reached: Callable[[], bool]) -> None:
        """Step, with a moment between, until something is so."""
        for _ in range(200):
            if reached():
                return
            self.engine.step()
            if not reached():
                self.clock.advance(0.01)
        raise AssertionError("it did not come to that")

    def settle(self) -> None:
        """Until everybody is answered and nothing is under way."""
        scheduler = self.engine.scheduler
        end = self.clock.now + 100.0
        while scheduler.requests or scheduler.has_runnable_work() or is_busy(self.engine):
            assert self.clock.now < end, f"stuck with {sorted(scheduler.requests)}"
            if scheduler.has_runnable_work():
                self.engine.step()
            else:
                self.clock.advance(0.01)


@pytest.fixture
def tiny() -> Iterator[Callable[..., Tiny]]:
    clock = VirtualClock()
    with virtual_time(clock, random.Random(1)):
        yield lambda *args: Tiny(clock, *args)


def test_e01_nan_while_a_copy_ahead_is_under_way(tiny: Callable[..., Tiny]) -> None:
    """The names were dropped and nobody told the connector: the blocks were overwritten under the
    copy, and what arrived in the slab and the shared store was half of each."""
    rig = tiny(7)
    engine = rig.engine
    engine.add("bad", list(range(1, 4 * SIZE)), max_tokens=5)
    rig.step_until(lambda: bool(engine.parts.worker._ahead))
    engine.spoil("bad")
    engine.step()
    assert engine.finish_reason("bad") == "error"
    engine.add("next", [7] * (5 * SIZE), max_tokens=5)  # takes the blocks that were bad's
    rig.settle()
    assert engine.finish_reason("next") in ("stop", "length")
    assert not rig.wrong
    slab = rig.hierarchy._slab
    for key, slot in slab._slots.items():  # type: ignore[attr-defined]
        assert engine.may_hold(key, bytes(slab.buffer(slot.index)[: LAYOUT.page_bytes]))


def test_e01_whatever_drops_names_tells_of_them(tiny: Callable[..., Tiny]) -> None:
    """A failed step, a request that ends with NaN, a reset: all go the one way."""
    rig = tiny(12)
    pool, told = rig.engine.manager.pool, list[int]()
    pool.tell_dropped(lambda blocks: told.extend(block.block_id for block in blocks))
    rig.engine.add("a", [3] * (2 * SIZE), max_tokens=1)
    scheduler = rig.engine.scheduler
    while not (output := scheduler.schedule()).num_scheduled_tokens:
        rig.clock.advance(0.01)
        rig.side.has_pending_work()
    blocks = rig.engine.table("a")
    scheduler.fail_step(output, "it was to fail")
    assert told == blocks != []
    told.clear()
    rig.engine.add("b", [4] * (2 * SIZE), max_tokens=1)
    rig.settle()
    named = [block.block_id for block in pool.blocks if block.block_hash is not None]
    assert pool.reset_prefix_cache()
    assert told == named != []


@contextmanager
def core_of(model: Path, **options: Any) -> Iterator[EngineCore]:
    core = EngineCore(config_of(model, **{"kv_offload_load": "always", **options}))
    try:
        yield core
    finally:
        core.shutdown(5.0)


def wait_for(core: EngineCore, what: Callable[[], bool]) -> None:
    """Step while there is work, until something is so."""
    steps = step_outputs(core, 30.0)
    while not what():
        if core.has_work():
            next(steps)
        else:
            core._connector.has_pending_work()  # type: ignore[union-attr]


def tier(core: EngineCore, name: str) -> dict[str, Any]:
    found = core.call("stats", "")["connector"]["tiers"][name]
    assert isinstance(found, dict)
    return found


def test_e02_a_poisoned_prefix_heals_on_every_engine(
    tiny_model: Path, greedy_reference: Reference
) -> None:
    """One NaN block that had reached the tiers failed every later request with that prefix."""
    prompt, wanted = prompt_of(40), greedy_reference(prompt_of(40), 6)
    with running_server() as server:
        tiers = {"kv_offload": f"cpu,grpc://127.0.0.1:{server.port}",
                 "kv_offload_cpu_bytes": "1MiB"}  # fmt: skip
        with core_of(tiny_model, **tiers) as one, core_of(tiny_model, **tiers) as two:
            for core in (one, two):
                wait_for(core, lambda core=core: tier(core, "remote")["capacity_bytes"] > 0)  # type: ignore[misc]
            one.add(request("first", prompt, max_tokens=2))
            outputs = one.step()
            while not outputs:  # the whole prompt has been computed
                outputs = one.step()
            (table,) = one.scheduler.manager.get_block_ids("first")
            one._executor.runner.pool.tensor[table[0]] = torch.nan
            finish(one, [], 1)
            # One more engine loads what got to the tiers, and so does the first.
            results = []
            for number in range(2):
                for core in (one, two):
                    name = f"{number}"
                    results.append(run(core, request(name, prompt))[name])
            assert [each.error for each in results[2:]] == [None, None], "it never heals"
            assert all(each.new_token_ids == wanted for each in results[2:])
            dropped = one.call("stats", "")["connector"]["blocks_dropped"]
            assert dropped["not_finite"] >= 5


def test_e02_a_block_in_use_is_forgotten_when_it_is_given_back() -> None:
    """`forget_blocks` down to every store: what is pinned, what is being filled, what is being
    written."""
    slab = small_slab(LAYOUT, 8)
    store = MemoryStore(LAYOUT, 100 * LAYOUT.page_bytes, name="ssd")
    store.is_shared = True  # written at once
    hierarchy = Hierarchy(slab, [store], wakeup=lambda: None)
    keys = [bytes([number]) * 40 for number in range(3)]
    pinned, filling, below = keys
    hierarchy.end_store(hierarchy.begin_store([pinned, below]), ok=True)
    hierarchy.poll()
    slab.forget([below])
    load = hierarchy.begin_load([pinned])
    store_ticket = hierarchy.begin_store([filling])
    hierarchy.forget_blocks(keys)
    assert hierarchy.lookup(keys) == [Answer.MISS] * 3
    assert store.lookup(keys) == [Answer.MISS] * 3
    hierarchy.end_store(store_ticket, ok=True)
    hierarchy.end_load(load)
    hierarchy.poll()
    assert slab.lookup(keys) == [Answer.MISS] * 3
    # It may come back, computed anew.
    hierarchy.end_store(hierarchy.begin_store(keys), ok=True)
    assert hierarchy.lookup(keys) == [Answer.HIT] * 3
    assert hierarchy.close(5.0)


def test_e02_a_request_that_bans_every_token_costs_nobody_a_block(
    tiny_model: Path, greedy_reference: Reference
) -> None:
    """It fails too, but its blocks are as good as any."""
    with core_of(tiny_model) as core:
        prompt = prompt_of(40)
        run(core, request("good", prompt))
        letters = tuple((token,) for token in range(256))
        # And the only other token, the model's end, may not come yet.
        wishes = {"bad_words_token_ids": letters, "min_tokens": 6, "ignore_eos": False}
        banned = run(core, request("bad", prompt, **wishes))["bad"]
        assert "ban every token" in (banned.error or "")
        again = run(core, request("again", prompt))["again"]
        assert again.new_token_ids == greedy_reference(prompt, 6)
        assert (again.cached_tokens_by_tier or {})["pool"] > 0


class RaisingDevice(SimDevice):
    """Cannot say when the passes before have ended."""

    def writer_event(self) -> Any:
        raise OSError("the device does not answer")


def test_e03_a_device_that_fails_where_a_step_begins(tiny: Callable[..., Tiny]) -> None:
    """A parked request waited for ever, and nobody gave its blocks back."""
    rig = tiny(20)
    rig.engine.add("first", list(range(1, 20)), max_tokens=1)
    rig.settle()
    assert rig.engine.scheduler.reset_prefix_cache(reset_tiers=False)
    rig.device.__class__ = RaisingDevice
    rig.engine.add("parked", list(range(1, 20)), max_tokens=1)
    rig.settle()
    assert rig.engine.finish_reason("parked") in ("stop", "length")
    assert rig.engine.manager.pool.is_idle
    assert rig.side.stats()["failures"]["load_copy"] >= 1  # type: ignore[index]


def test_e03_every_job_of_the_step_is_reported() -> None:
    signal = CopySignal()
    worker = OffloadWorker(RaisingDevice(VirtualClock(), random.Random(1), 0.0), signal.note_ended)
    jobs = [CopyJob(number, [number], [number]) for number in range(3)]
    meta = ConnectorMetadata(jobs[:1], jobs[1:2], jobs[2:])
    worker.start_step(meta)
    reported = worker.poll()
    assert sorted(reported.failed_stores) == [0, 2]
    assert reported.failed_loads == [1]
    assert signal.ended == 3


def test_e04_a_batch_update_that_breaks_off(
    tiny_model: Path, greedy_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that had been handed out were handed out again: two requests shared one, or every step
    from then on failed."""
    prompts = {name: prompt_of(20 + i) for i, name in enumerate("abc")}
    with core_of(tiny_model, max_num_batched_tokens=8, max_num_seqs=8) as core:
        outputs = core.add(request("a", prompts["a"], max_tokens=12))
        while not outputs:
            outputs = core.step()
        core.add(request("gone", prompt_of(3), max_tokens=30))
        core.step()
        core.abort_requests(["gone"])
        assert core.add(request("bad", prompt_of(3))) == []

        def fail(self: MultiGroupBlockTable, block_ids: Any, row: int) -> None:
            raise MemoryError("no more memory")

        with monkeypatch.context() as patched:
            patched.setattr(MultiGroupBlockTable, "add_row", fail)
            ended = {output.request_id: output for output in core.step()}
        assert "no more memory" in (ended["bad"].error or "")
        batch = core._executor.runner.batch
        for name in "bc":
            core.add(request(name, prompts[name]))
        results = finish(core, [], 2)
        for name in "bc":
            assert results[name].error is None
            assert results[name].new_token_ids == greedy_reference(prompts[name], 6)
        assert not batch.row_of or len(set(batch.row_of.values())) == len(batch.row_of)


def test_e04_requests_that_the_failed_step_had_not_keep_what_is_theirs() -> None:
    table = BlockTable(4, 8, SIZE)
    batch = InputBatch(4, 32, MultiGroupBlockTable([table]))
    make = _worker_request
    for number, name in enumerate("abc"):
        batch.add(make(name, number), ([2 * number + 1, 2 * number + 2],), number)
    batch.condense_rows()
    batch.remove_request("a")
    batch.add(make("late", 9), ([7],), 0)  # breaks off here
    held = [row for row in batch.held_rows() if row.request.request_id != "late"]
    batch.refill(held)
    update = batch.condense_rows()
    assert update is not None
    assert (update.batch_size, sorted(batch.row_of.values())) == (2, [0, 1])
    assert {*update.removed, *(added.row for added in update.added)} == {0, 1, 2, 3}
    for name, number in (("b", 1), ("c", 2)):
        row = batch.row_of[name]
        assert table.block_ids(row) == [2 * number + 1, 2 * number + 2]
        assert batch.num_computed[row] == number
        assert batch.token_ids[row, :3].tolist() == [number] * 3


def _worker_request(name: str, token: int) -> Any:
    from stratakv.engine.request.sampling_params import SamplingParams
    from stratakv.engine.worker.input_batch import WorkerRequest

    return WorkerRequest(name, np.full(3, token, np.int32), SamplingParams())


def _raise(*_: object, **__: object) -> None:
    raise MemoryError("no more memory")


def test_e05_a_worker_that_fails_for_ever(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests that its failures ended counted as progress: it never came to an end."""
    with core_of(tiny_model) as core:
        monkeypatch.setattr(core._executor.runner.model, "forward", _raise)
        for number in range(MAX_FAILED_STEPS - 1):
            core.add(request(str(number), prompt_of(20)))
            (output,) = core.step()
            assert output.finish_reason == "error"
            core.step()  # tells the worker who is gone; no sign of life
        core.add(request("last", prompt_of(20)))
        with pytest.raises(RuntimeError, match="5 steps in a row, the last with: no more memory"):
            core.step()


def test_e05_one_good_step_is_a_new_beginning(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with core_of(tiny_model) as core:
        for number in range(2 * MAX_FAILED_STEPS):
            core.add(request(str(number), prompt_of(20)))
            with monkeypatch.context() as patched:
                patched.setattr(core._executor.runner.model, "forward", _raise)
                core.step()
            assert core.num_failed_steps == 1
            run(core, request(f"good {number}", prompt_of(20)))
            assert core.num_failed_steps == 0


def test_e05_a_lost_device_is_the_end(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with core_of(tiny_model) as core:
        monkeypatch.setattr(core._executor.runner.model, "forward", fail)
        core.add(request("r", prompt_of(20)))
        with pytest.raises(RuntimeError, match="the device is lost"):
            core.step()


def test_e05_what_a_lost_device_says() -> None:
    lost = CudaError("a copy failed", 700)
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = lost
    for error in (lost, wrapped, RuntimeError("CUDA error: device-side assert triggered")):
        assert is_device_lost(error)
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        CudaError("a copy failed", 1),
        RuntimeError("CUDA error: invalid argument"),
        MemoryError("misaligned address"),
    ):
        assert not is_device_lost(error)


def test_e06_a_preempted_request_may_load_again(
    tiny: Callable[..., Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted while blocks were copied to it from the back, it counted as one whose load had
    failed, and computed everything ever after."""
    rig = tiny(40)
    engine, text = rig.engine, list(range(1, 40))
    engine.add("first", text, max_tokens=1)
    rig.settle()
    assert engine.scheduler.reset_prefix_cache(reset_tiers=False)
    matches, stages = [], []

    def both(
        self: OffloadScheduler, request: Any, num_computed_tokens: int, **queued: int
    ) -> Match:
        match = ask(self, request, num_computed_tokens, **queued)
        stages.append(self.requests[request.request_id].stage)
        if match.kind is MatchKind.LOAD:
            lookup = self.requests[request.request_id].lookup
            assert lookup is not None
            blocks = match.tokens // SIZE
            lookup.plan = Plan(blocks, blocks // 2)
            match = Match(match.tokens, MatchKind.OVERLAP)
        matches.append(match)
        return match

    ask = OffloadScheduler.get_matched_tokens
    monkeypatch.setattr(OffloadScheduler, "get_matched_tokens", both)
    engine.add("again", text, max_tokens=4)
    rig.step_until(lambda: bool(rig.device.targets))
    request_ = engine.scheduler.requests["again"]
    states = engine.scheduler._states
    assert states.running == [request_]
    states.preempt(request_)
    rig.settle()
    assert not request_.external_load_failed
    assert Stage.FAILED not in stages
    assert [match.kind for match in matches].count(MatchKind.OVERLAP) == 2, "it loads again"
