# SPDX-License-Identifier: Apache-2.0
"""The contract of an eviction policy: it orders keys from cold to hot, and nothing more.

It knows no bytes, slots, pins or disks. Its owner reports keys that came, were used or left, and
asks for the next victims. Not thread-safe: the owner calls it under its own lock.

The owner may rely on this:
- `victims` changes nothing: the owner may take the whole list, a part of it, or none of it, for
  instance if the list is too short;
- keys given together are ordered as given, the last one hottest.
The owner must do this: insert each key once, and remove the keys that it evicts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, KeysView, Sequence


class EvictionPolicy(ABC):
    """An order of keys."""

    learns = False  # whether `observe` does anything: listing a prompt's keys costs time

    @abstractmethod
    def __len__(self) -> int:
        """The number of keys held."""

    @abstractmethod
    def insert(self, keys: Iterable[bytes]) -> None:
        """Add keys that came in, the last one hottest."""

    @abstractmethod
    def touch(self, keys: Iterable[bytes]) -> None:
        """Note the use of keys, the last one hottest; each must be known."""

    @abstractmethod
    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove keys that left; unknown keys are ignored."""

    def observe(self, chain: Sequence[bytes], now: float) -> None:  # noqa: B027 - a hint, not a duty
        """Learn from a prompt at `now` seconds of a monotonic clock. Its blocks are `chain`, head
        first, whether the owner holds them or not. Calls of `touch` and `insert` for its blocks may
        follow. Only policies that learn which blocks are used again need this call."""

    @abstractmethod
    def victims(self, count: int, may_evict: Callable[[bytes], bool]) -> list[bytes]:
        """The `count` keys to evict next, coldest first, among the keys that `may_evict` allows;
        fewer if it allows fewer. Changes nothing."""

    def may_be_next(self, keys: KeysView[bytes], count: int) -> bool:
        """Whether one of `keys` may be among the next `count` victims if every key may be evicted.
        Also True for keys just behind the last victim, where that is quicker. Changes nothing."""
        return not keys.isdisjoint(self.victims(count, lambda _key: True))

    def displaced_by(
        self, keys: Sequence[bytes], count: int, may_evict: Callable[[bytes], bool]
    ) -> list[bytes]:
        """The victims that make room for `keys`, which are about to come in and are optional for
        the owner. Fewer victims if the policy values the held keys more. Changes nothing."""
        return self.victims(count, may_evict)
