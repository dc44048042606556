# SPDX-License-Identifier: Apache-2.0
"""The contract of an eviction policy: it orders keys from cold to hot, and nothing more.

A policy handles no bytes, slots, pins or disks. A tier owns the policy, reports keys that were
inserted, used or removed, and requests the next victims. The owner calls it under a lock.

The owner may rely on this:
- `victims` changes nothing: the owner may evict all of the listed keys, some of them or none, for
  instance if the list is too short;
- keys given together are ordered as given, the last one hottest.
The owner must insert each key only once, and must remove the keys that it evicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, KeysView, Sequence


class EvictionPolicy(ABC):
    """An order of keys from cold to hot."""

    learns = False  # whether `observe` does anything: listing a prompt's keys costs time

    @abstractmethod
    def __len__(self) -> int:
        """The number of keys held."""

    @abstractmethod
    def insert(self, keys: Iterable[bytes]) -> None:
        """Add new keys, the last one hottest."""

    @abstractmethod
    def touch(self, keys: Iterable[bytes]) -> None:
        """Record a use of these inserted keys, the last one hottest."""

    @abstractmethod
    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove keys that the owner no longer holds. Unknown keys are ignored."""

    def observe(self, chain: Sequence[bytes], now: float) -> None:  # noqa: B027 - a hint, not a duty
        """Learn from a prompt at `now` (monotonic seconds). The prompt's blocks are `chain`, head
        first, whether the owner holds them or not. Calls of `touch` and `insert` for its blocks may
        follow. Only policies that learn which blocks are used again need this call."""

    @abstractmethod
    def victims(self, count: int, may_evict: Callable[[bytes], bool]) -> list[bytes]:
        """The `count` keys to evict next, coldest first, among the keys that `may_evict` allows;
        fewer keys if it allows fewer. Changes nothing."""

    def may_be_next(self, keys: KeysView[bytes], count: int) -> bool:
        """Whether one of `keys` may be among the next `count` victims if every key may be evicted.
        For speed, it may also be True for keys just after the last victim. Changes nothing."""
        return not keys.isdisjoint(self.victims(count, lambda _key: True))

    def displaced_by(
        self, keys: Sequence[bytes], count: int, may_evict: Callable[[bytes], bool]
    ) -> list[bytes]:
        """The victims that make room for new `keys`, which the owner need not insert. Fewer than
        `count` victims if the policy prefers the held keys. Changes nothing."""
        return self.victims(count, may_evict)
