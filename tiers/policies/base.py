# SPDX-License-Identifier: Apache-2.0
"""The contract of an eviction policy, which only orders keys from cold (next to be evicted) to hot.

A policy handles no bytes, slots, pins or disks. A tier owns the policy, reports keys that were
inserted, used or removed, and requests the next victims. The owner holds a lock during each call.

The owner may rely on these properties:
- `victims` changes nothing: the owner may evict all, some or none of the listed keys, for instance
  none if the list is too short;
- keys given together are ordered as given, the last one hottest.
The owner must insert each key only once, and must remove the keys that it evicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, KeysView, Sequence


class EvictionPolicy(ABC):
    """An order of keys from cold to hot."""

    learns = False  # whether `observe` has an effect; if not, it is not called

    @abstractmethod
    def __len__(self) -> int:
        """The number of keys held."""

    @abstractmethod
    def insert(self, keys: Iterable[bytes]) -> None:
        """Add new keys, the last one hottest."""

    @abstractmethod
    def touch(self, keys: Iterable[bytes]) -> None:
        """Record a use of inserted keys, the last one hottest."""

    @abstractmethod
    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove keys that the owner no longer holds. Unknown keys are ignored."""

    def observe(self, chain: Sequence[bytes], now: float) -> None:  # noqa: B027 - a hint, not a duty
        """Learn from a prompt at `now` (monotonic seconds). The prompt's blocks are `chain`, head
        first, whether the owner holds them or not. Calls of `touch` and `insert` for the same
        blocks may follow. Only policies that learn which blocks are used again need this call."""

    @abstractmethod
    def victims(self, count: int, may_evict: Callable[[bytes], bool]) -> list[bytes]:
        """Return the `count` keys to evict next, coldest first, among the keys that `may_evict`
        allows, or all of these if they are fewer. Changes nothing."""

    def may_be_next(self, keys: KeysView[bytes], count: int) -> bool:
        """Whether one of `keys` may be among the next `count` victims if every key may be evicted.
        True also, for speed, for some keys just after the last victim. Changes nothing."""
        return not keys.isdisjoint(self.victims(count, lambda _key: True))

    def displaced_by(
        self, keys: Sequence[bytes], count: int, may_evict: Callable[[bytes], bool]
    ) -> list[bytes]:
        """Return the victims that make room for new `keys`, which the owner need not insert; fewer
        than `count` victims if the policy prefers held keys. Changes nothing."""
        return self.victims(count, may_evict)
