# SPDX-License-Identifier: Apache-2.0
"""The contract of an eviction policy: it orders keys from cold to hot, and nothing more.

It knows no bytes, slots, pins or disks. Its owner reports keys that came, were used and went, and
asks for the next victims. Not thread-safe: the owner calls it under its own lock.

The owner may rely on this:
- `victims` changes nothing, so a list that is too short costs nothing: the owner can take all of
  it, part of it, or none (all or nothing is then one comparison of lengths);
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
        """Remove keys that went; unknown ones are ignored."""

    def observe(self, chain: Sequence[bytes], now: float) -> None:  # noqa: B027 - a hint, not a duty
        """Learn from a prompt whose blocks are `chain`, head first, whether the owner holds them or
        not, at `now` seconds of a monotonic clock. Calls of `touch` and `insert` for its blocks
        follow, if any. Only policies that learn which blocks are used again need it."""

    @abstractmethod
    def victims(self, count: int, may_evict: Callable[[bytes], bool]) -> list[bytes]:
        """The `count` keys to evict next, coldest first, of those that `may_evict` allows; fewer
        where there are fewer. Changes nothing."""

    def may_be_next(self, keys: KeysView[bytes], count: int) -> bool:
        """Whether one of `keys` may be among the next `count` victims, if every key may be evicted;
        also True for keys just behind the last victim, where that is quicker. Changes nothing."""
        return not keys.isdisjoint(self.victims(count, lambda _key: True))

    def displaced_by(
        self, keys: Sequence[bytes], count: int, may_evict: Callable[[bytes], bool]
    ) -> list[bytes]:
        """The `victims` that make room for `keys`, which are about to come in and are optional for
        the owner: fewer where the policy values the held keys more. Changes nothing."""
        return self.victims(count, may_evict)
