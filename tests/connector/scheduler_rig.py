# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of offloading over real tiers, in the hands of a test. Asserts little."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from stratakv.connector.connector_context import ConnectorContext
from stratakv.connector.copy_signal import CopySignal
from stratakv.connector.messages import (
    ConnectorMetadata,
    ConnectorWorkerOutput,
    EvictedBlock,
    LoadReport,
)
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.parts import Parts
from stratakv.tiers.base import StoreTier
from stratakv.tiers.block import BlockLayout, pack_key
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.testing.memory_store import MemoryStore

LAYOUT = BlockLayout(1, 4, 1, 8, "float32")
WAIT_SECONDS = 10.0


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def evicted(block_id: int, number: int) -> EvictedBlock:
    return EvictedBlock(block_id, digest(number) + b"\x00\x00")


@dataclass
class FakeRequest:
    """What the side looks at of a request."""

    request_id: str
    block_hashes: list[bytes]
    num_tokens: int = field(default=0)
    tail_hash: bytes | None = None

    def __post_init__(self) -> None:
        self.num_tokens = self.num_tokens or 4 * len(self.block_hashes) + 1


def request(name: str, *numbers: int, num_tokens: int = 0) -> FakeRequest:
    return FakeRequest(name, [digest(number) for number in numbers], num_tokens)


class Rig:
    """The side, a real slab and a store in memory, or `store` instead; the test is worker and
    engine."""

    def __init__(self, store: StoreTier | None = None) -> None:
        self.slab = CpuSlab(LAYOUT, 16 * LAYOUT.slot_bytes, populate_threads=1)
        self.store = MemoryStore(LAYOUT, 1000 * LAYOUT.page_bytes, name="ssd")
        self.signal = CopySignal()
        self.hierarchy = Hierarchy(self.slab, [store or self.store], wakeup=self.signal.wake)
        self.side = OffloadScheduler(
            ConnectorContext(self.hierarchy, Parts(LAYOUT.block_size), self.signal)
        )
        self.woken = threading.Event()
        self.side.set_wakeup(self.woken.set)

    def work(self, meta: ConnectorMetadata, fail: bool = False) -> list[LoadReport]:
        """Play the worker, which copies nothing."""
        stores = [job.job_id for job in (*meta.stores, *meta.ahead)]
        loads = [job.job_id for job in meta.loads]
        for _ in [*stores, *loads]:
            self.signal.note_ended(self.signal.ended + 1)
        output = ConnectorWorkerOutput()
        if fail:
            output.failed_stores, output.failed_loads = stores, loads
        else:
            output.finished_stores, output.finished_loads = stores, loads
        return self.side.update_from_worker(output)

    def put(self, *numbers: int) -> None:
        """These blocks leave the pool, tail first."""
        blocks = [evicted(number, number) for number in reversed(numbers)]
        assert self.work(self.side.build_meta(blocks)) == []

    def put_below(self, *numbers: int) -> None:
        buffer = memoryview(bytearray(LAYOUT.page_bytes))
        keys = [pack_key(digest(number)) for number in numbers]
        self.store.store(keys, [buffer] * len(keys)).result(0)

    def slow_reads(self, seconds: float = 0.06) -> None:
        self.store.fault = lambda op, _keys: seconds if op == "load" else None

    @contextlib.contextmanager
    def held_reads(self) -> Iterator[None]:
        """What is read meanwhile ends after this, however long it takes."""
        held: list[Callable[[], None]] = []
        answer = self.store.load

        def load(keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Future[Any]:
            future: Future[Any] = Future()
            held.append(lambda: future.set_result(answer(keys, buffers).result(0)))
            return future

        with mock.patch.object(self.store, "load", load):
            yield
        for end in held:
            end()

    def wait_for_wakeup(self) -> None:
        assert self.woken.wait(WAIT_SECONDS), "no wake-up came"
        self.woken.clear()
        self.hierarchy.poll()

    def wait(self) -> None:
        """Sleep as an engine does: until a wake-up after which there is something to do."""
        while not self.side.has_pending_work():
            assert self.woken.wait(WAIT_SECONDS), "no wake-up came"
            self.woken.clear()
