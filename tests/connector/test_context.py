# SPDX-License-Identifier: Apache-2.0
"""A request's context on its way to a third party's store, past a wrapper for faults."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from stratakv.connector.connector_context import ConnectorContext
from stratakv.connector.copy_signal import CopySignal
from stratakv.connector.costs.economics import Choice
from stratakv.connector.messages import ConnectorWorkerOutput
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.parts import Parts
from stratakv.tiers.base import NO_CONTEXT, RequestContext, StoreTier
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.tag import Proof
from stratakv.tiers.testing.fault_plan import FaultPlan
from stratakv.tiers.testing.faulty_store import FaultyStore
from stratakv.tiers.testing.memory_store import MemoryStore

from .scheduler_rig import LAYOUT, WAIT_SECONDS, FakeRequest, digest, pack_key, request

CONTEXT = RequestContext(
    tenant="acme", session="s1", priority=-1, pin=True, adapter="a", transfer={"to": "decode-3"}
)


class CuriousStore(MemoryStore):
    """A store that asks for whom it is asked."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, 1000 * LAYOUT.page_bytes, name="ssd")
        self.looked_up: list[RequestContext | None] = []
        self.loaded: list[RequestContext | None] = []

    def prefetch_lookup(
        self, keys: Sequence[bytes], context: RequestContext | None = None
    ) -> Future[None] | None:
        self.looked_up.append(context)
        return super().prefetch_lookup(keys)

    def load(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        *,
        context: RequestContext | None = None,
    ) -> Future[list[Proof | None]]:
        self.loaded.append(context)
        return super().load(keys, buffers)


class IncuriousStore(MemoryStore):
    """One that would break if it were told."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, 1000 * LAYOUT.page_bytes, name="ssd")


class Engine:
    def __init__(self, store: MemoryStore, *, wrapped: bool, choice: Choice) -> None:
        buffer = memoryview(bytearray(LAYOUT.page_bytes))
        keys = [pack_key(digest(number)) for number in (1, 2, 3)]
        store.store(keys, [buffer] * len(keys)).result(0)
        below: StoreTier = FaultyStore(store, FaultPlan()) if wrapped else store
        slab = CpuSlab(LAYOUT, 16 * LAYOUT.slot_bytes, populate_threads=1)
        signal = CopySignal()
        hierarchy = Hierarchy(slab, [below], wakeup=signal.wake)
        self.side = OffloadScheduler(
            ConnectorContext(hierarchy, Parts(LAYOUT.block_size), signal, choice=choice)
        )

    def load(self, asks: FakeRequest, *, overlapped: bool) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not (match := self.side.get_matched_tokens(asks, 0)).tokens:
            assert time.monotonic() < deadline
            self.side.has_pending_work()
        blocks = list(range(20, 20 + match.tokens // 4))
        self.side.begin_load(asks, [blocks], match.tokens, overlapped=overlapped)

    def end_load(self, request_id: str, *, overlapped: bool) -> None:
        if overlapped:
            assert self.side.overlapped_loads.end_load(request_id) is not None
            return
        deadline = time.monotonic() + WAIT_SECONDS
        while not (jobs := self.side.build_meta([]).loads):
            assert time.monotonic() < deadline
        ended = [job.job_id for job in jobs]
        output = ConnectorWorkerOutput(finished_loads=ended, num_ended=len(ended))
        assert self.side.update_from_worker(output)

    def close(self) -> None:
        self.side.shutdown(WAIT_SECONDS)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_context_reaches_a_store_that_asks_for_it(wrapped: bool, overlapped: bool) -> None:
    store = CuriousStore()
    choice = Choice.OVERLAP if overlapped else Choice.LOAD
    engine = Engine(store, wrapped=wrapped, choice=choice)
    asks = request("a", 1, 2, 3, 4)
    engine.side.request_queued(asks, CONTEXT)
    engine.load(asks, overlapped=overlapped)
    engine.side.request_finished("a")
    assert store.looked_up and set(map(id, store.looked_up)) == {id(CONTEXT)}
    assert store.loaded and set(map(id, store.loaded)) == {id(CONTEXT)}
    engine.end_load("a", overlapped=overlapped)
    assert not engine.side.requests
    engine.side.request_queued(request("b", 7, 8))
    assert store.looked_up[-1] == NO_CONTEXT
    engine.close()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_store_that_does_not_know_contexts_never_gets_one(wrapped: bool) -> None:
    engine = Engine(IncuriousStore(), wrapped=wrapped, choice=Choice.LOAD)
    asks = request("a", 1, 2, 3)
    engine.side.request_queued(asks, CONTEXT)
    engine.load(asks, overlapped=False)
    traffic = engine.side.stats()["traffic"]
    assert isinstance(traffic, dict) and traffic["ssd"]["promotion_failures"] == 0
    engine.close()
