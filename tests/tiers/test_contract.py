# SPDX-License-Identifier: Apache-2.0
"""The contract has power: tiers that break a promise are told apart from those that keep it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest

from stratakv.tiers.base import Answer, Stored, TierStats
from stratakv.tiers.contract import ContractBroken, check_slab_contract, check_store_contract
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.tag import Proof, Proofs
from stratakv.tiers.testing.memory_store import MemoryStore

from .blocks import ODD


class WrongBytes(MemoryStore):
    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        future = super().load(keys, buffers)
        buffers[0][0] ^= 1
        return future


class WrongOrder(MemoryStore):
    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        return super().lookup(keys)[::-1]


class Overwriting(MemoryStore):
    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        for buffer in buffers:
            buffer[-1] = 0
        return super().load(keys, buffers)


class Forgetful(MemoryStore):
    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        future = super().store(keys, buffers, proofs)
        self._blocks.pop(keys[-1], None) if keys else None
        return future


class Hoarding(MemoryStore):
    def drop(self, keys: Sequence[bytes]) -> int:
        return len(keys)


class Boasting(MemoryStore):
    def stats(self) -> TierStats:
        stats = super().stats()
        stats.used_bytes = stats.capacity_bytes + 1
        return stats


class Undead(MemoryStore):
    def close(self, timeout_seconds: float) -> None:
        pass


@pytest.mark.parametrize(
    "broken", [WrongBytes, WrongOrder, Overwriting, Forgetful, Hoarding, Boasting, Undead]
)
def test_a_store_that_breaks_a_promise_is_told(broken: Callable[..., MemoryStore]) -> None:
    check_store_contract(MemoryStore(ODD, 64 * ODD.page_bytes))
    with pytest.raises((ContractBroken, KeyError)):
        check_store_contract(broken(ODD, 64 * ODD.page_bytes))


class TakingPinned(CpuSlab):
    def _is_idle(self, key: bytes) -> bool:
        return self._slots[key].committed


class Leaking(CpuSlab):
    def commit(self, keys: Sequence[bytes], ok: Sequence[bool]) -> None:
        super().commit(keys, [True] * len(keys))


class Unordered(CpuSlab):
    def coldest(self, count: int) -> list[bytes]:
        return super().coldest(self.num_slots)[::-1][:count]


class Early(CpuSlab):
    def pin(self, keys: Sequence[bytes], *, touch: bool = True) -> list[int | None]:
        return [self._slots[key].index if key in self._slots else None for key in keys]


@pytest.mark.parametrize("broken", [TakingPinned, Leaking, Unordered, Early])
def test_a_slab_that_breaks_a_promise_is_told(broken: Callable[..., CpuSlab]) -> None:
    check_slab_contract(CpuSlab(ODD, 32 * ODD.slot_bytes, populate_threads=1))
    slab = broken(ODD, 32 * ODD.slot_bytes, populate_threads=1)
    with pytest.raises(ContractBroken):
        check_slab_contract(slab)
    slab.close()
