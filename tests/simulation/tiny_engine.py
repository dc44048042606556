# SPDX-License-Identifier: Apache-2.0
"""The engine core without a model: the real scheduler and the real connector over a pool of bytes.

The worker is the one of the scheduler's tests: it writes a fingerprint of all tokens up to a
position into that position's slot, and checks every slot that it reads. Here the slots are bytes of
a pool that a copy device moves to a slab and back, so a block that was torn, lost or mixed up on
its way is noticed at its first use. Knows nothing of time, threads or what goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from stratakv.connector.base import ConnectorMetadata
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.offload_worker import OffloadWorker
from stratakv.engine.cache.kv_cache_manager import KVCacheManager
from stratakv.engine.config import SchedulerConfig
from stratakv.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from stratakv.engine.scheduler.scheduler import Scheduler
from stratakv.tiers.block import BlockLayout

from ..engine.scheduler.conftest import EOS, SIZE, Engine, next_token

LAYOUT = BlockLayout(1, SIZE, 1, 1, "float32")  # 32 bytes: one number of eight for each token


class Slots:
    """A pool of bytes, seen as the numbers in its slots."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = np.zeros((num_blocks, SIZE), np.int64)

    def get(self, place: tuple[int, int]) -> int:
        return int(self.pool[place])

    def __setitem__(self, place: tuple[int, int], number: int) -> None:
        self.pool[place] = number


@dataclass
class Parts:
    """The two sides of a connector."""

    side: OffloadScheduler
    worker: OffloadWorker


class TinyEngine(Engine):
    """See above. `targets` are pool blocks that loads may be writing to; `pass_time` is called
    before and after what a pass writes."""

    def __init__(
        self,
        parts: Parts,
        slots: Slots,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        watermark: float = 0.0,
        fails_with_load: bool = False,
        targets: Callable[[], set[int]] = set,
        pass_time: Callable[[], None] = lambda: None,
    ) -> None:
        manager = KVCacheManager(len(slots.pool), SIZE, max_model_len, watermark=watermark)
        scheduler = Scheduler(
            config,
            manager,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}),
            connector=parts.side,
            fails_with_load=fails_with_load,
        )
        super().__init__(scheduler, slots=slots)  # type: ignore[arg-type]
        self.parts = parts
        self._targets = targets
        self._pass_time = pass_time

    def content(self, key: bytes) -> bytes:
        """What a block of this name holds, wherever it lies."""
        return np.array(self.names[key[:32]], np.int64).tobytes()

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step, as the model runner does it."""
        self.begin(output)
        result = self.compute(output)
        result.connector_output = self.parts.worker.poll()
        return result

    def compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The pass."""
        positions: dict[str, tuple[int, int]] = {}
        if output.num_scheduled_tokens:
            self.parts.worker.wait_before_forward()
            self._pass_time()
            for request_id, count in output.num_scheduled_tokens.items():
                computed = self._computed[request_id]
                positions[request_id] = (computed, computed + count)
                self._write(request_id, computed, computed + count)
            self._pass_time()
        sampled: dict[str, list[int]] = {}
        for request_id, (_, end) in positions.items():
            state = self._check(request_id, end)
            done = end == len(self.states[request_id].tokens)
            sampled[request_id] = [next_token(state)] if done else []
            self.states[request_id].tokens += sampled[request_id]
        return ModelRunnerOutput(sampled)

    def begin(self, output: SchedulerOutput) -> None:
        """The part of a step that comes before anything can fail."""
        self.parts.worker.start_step(output.connector_meta or ConnectorMetadata())
        self.follow(output)

    def _write(self, request_id: str, start: int, end: int) -> None:
        table = self.states[request_id].table
        written = {table[position // SIZE] for position in range(start, end)}
        assert written.isdisjoint(self._targets()), "written while a load is writing to it"
        super()._write(request_id, start, end)


def is_busy(engine: TinyEngine) -> bool:
    """Whether something is under way that will end by itself."""
    side: Any = engine.parts.side
    return bool(
        engine.scheduler._places.parked
        or len(side._outgoing)
        or len(side._incoming)
        or len(side._back_loads)
        or side._hierarchy._is_used()
    )


def shut_down(engine: TinyEngine, timeout_seconds: float) -> None:
    """As the engine core does it."""
    parts = engine.parts
    parts.worker.start_step(parts.side.build_final_meta(engine.manager.pool.resident()))
    parts.worker.shutdown()
    parts.side.update_from_worker(parts.worker.poll())
    parts.side.shutdown(timeout_seconds)
    assert not parts.side._hierarchy._is_used()


def check_nothing_left(engine: TinyEngine) -> None:
    """All requests have ended, and nothing is under way."""
    side: Any = engine.parts.side
    worker: Any = engine.parts.worker
    places = engine.scheduler._places
    assert engine.manager.pool.is_idle
    assert not (places.requests or places.progress or places.running or places.loaded)
    assert not (len(places.waiting) or len(places.skipped) or len(places.parked))
    incoming, outgoing = side._incoming, side._outgoing
    assert not (incoming._parked or incoming._reading or incoming._ready or incoming._copying)
    assert not (incoming._reports or incoming._coming)
    assert not (outgoing._tickets or outgoing._ahead or outgoing._ahead_job_of)
    assert not (len(places.meetings) or len(side._back_loads) or len(side._read_times))
    assert not (side._lookups._read_ahead or side._lookups._blocks_ahead)
    assert not (worker._stores or worker._loads or worker._ahead or worker._torn)
    hierarchy = side._hierarchy
    slab = hierarchy._slab
    assert all(slot.committed and not slot.pins for slot in slab._slots.values())
    assert len(slab._free) + len(slab._slots) == slab.num_slots
    for write_back in hierarchy._write_backs._all:
        assert set(write_back._dirty) <= set(slab.keys())
    for key, slot in slab._slots.items():
        page = bytes(slab.buffer(slot.index)[: slab.layout.page_bytes])
        assert page == engine.content(key), "the slab holds wrong bytes"
