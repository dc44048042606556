# SPDX-License-Identifier: Apache-2.0
"""A hierarchy over a real slab, with a store in memory that hangs and refuses as a test says.

Every test with a rig ends with `check_idle`: no slot reserved, none pinned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from stratakv.tiers.base import Stored
from stratakv.tiers.block import BlockLayout, pack_key
from stratakv.tiers.hierarchy.guarded_store import Traffic
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.hierarchy.hierarchy_options import HierarchyOptions
from stratakv.tiers.hierarchy.promotions import LoadTicket
from stratakv.tiers.policies.base import EvictionPolicy
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.tag import Proof, Proofs
from stratakv.tiers.testing.memory_store import MemoryStore

LAYOUT = BlockLayout(1, 4, 1, 8, "float32")
WAIT_SECONDS = 10.0


def key(number: int) -> bytes:
    return pack_key(number.to_bytes(32, "big"))


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def content(of: bytes) -> bytes:
    return (of * 7)[: LAYOUT.page_bytes]


class HeldStore(MemoryStore):
    """A store whose loads and stores end when the test says so."""

    def __init__(self, num_blocks: int = 1000) -> None:
        super().__init__(LAYOUT, num_blocks * LAYOUT.page_bytes, name="ssd")
        self.hold_loads = False
        self.hold_stores = False
        self.batches: list[tuple[str, int]] = []
        self.written: list[bytes] = []
        self.held: list[Callable[[], None]] = []

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        self.batches.append(("load", len(keys)))
        if not self.hold_loads:
            return super().load(keys, buffers)
        return self._hold(lambda: super(HeldStore, self).load(keys, buffers))

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        self.written += keys
        self.batches.append(("store", len(keys)))
        if not self.hold_stores:
            return super().store(keys, buffers, proofs)
        return self._hold(lambda: super(HeldStore, self).store(keys, buffers, proofs))

    def release(self) -> None:
        held, self.held = self.held, []
        threads = [threading.Thread(target=end) for end in held]  # as a real store would
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)

    def _hold(self, work: Callable[[], Future]) -> Future:
        future: Future = Future()

        def end() -> None:
            try:
                future.set_result(work().result(0))
            except Exception as error:
                future.set_exception(error)

        self.held.append(end)
        return future


class Rig:
    """A hierarchy, its parts, and the wake-ups it gave."""

    def __init__(
        self, num_slots: int, policy: EvictionPolicy | None = None, **options: Any
    ) -> None:
        size = num_slots * LAYOUT.slot_bytes
        self.slab = CpuSlab(LAYOUT, size, populate_threads=1, policy=policy)
        self.store = HeldStore()
        self.woken = threading.Event()
        self.hierarchy = Hierarchy(
            self.slab, [self.store], wakeup=self.woken.set, options=HierarchyOptions(**options)
        )

    def put(self, *numbers: int) -> None:
        """Blocks leave a pool."""
        ticket = self.hierarchy.begin_store(keys(*numbers))
        for name, slot in zip(ticket.keys, ticket.slots, strict=True):
            self.slab.buffer(slot)[: LAYOUT.page_bytes] = content(name)
        self.hierarchy.end_store(ticket, ok=True)
        self.hierarchy.poll()

    def put_below(self, *numbers: int) -> None:
        """Blocks that only the store has."""
        names = keys(*numbers)
        buffers = [memoryview(bytearray(content(name))) for name in names]
        assert MemoryStore.store(self.store, names, buffers).result(0) == [Stored.KEPT] * len(names)

    def finish(self, ticket: LoadTicket) -> list[int]:
        """Wait for a load, check what it brought, end it; the indices that are there."""
        deadline = time.monotonic() + WAIT_SECONDS
        while ticket.waiting:
            assert self.woken.wait(deadline - time.monotonic()), "no wake-up came"
            self.woken.clear()
            self.hierarchy.poll()
        there = [i for i, slot in enumerate(ticket.slots) if slot is not None]
        for i in there:
            buffer = self.slab.buffer(ticket.slots[i])
            assert bytes(buffer[: LAYOUT.page_bytes]) == content(ticket.keys[i])
        self.hierarchy.end_load(ticket)
        return there

    def get(self, *numbers: int) -> list[int]:
        ticket = self.hierarchy.begin_load(keys(*numbers))
        self.hierarchy.poll()
        return self.finish(ticket)

    def tiers(self, *numbers: int) -> list[str]:
        return self.hierarchy.find_prefix(keys(*numbers)).tiers

    def errors(self) -> dict[str, int]:
        return self.hierarchy.stats()["ssd"].errors

    def traffic(self) -> Traffic:
        return self.hierarchy.traffic()["ssd"]

    def check_idle(self) -> None:
        self.hierarchy.poll()
        known = self.slab.keys()
        assert self.slab.num_slots - self.slab.free_slots() == len(known), "a slot is reserved"
        assert self.slab.coldest(self.slab.num_slots) == known, "a slot is pinned"


def with_rig(**options: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("rig", [options], indirect=True)
