# SPDX-License-Identifier: Apache-2.0
"""The promise of an eviction policy: it orders keys from cold to hot, and nothing more.

Knows nothing of bytes, slots, pins or disks; its owner tells it what came, was used and went, and
asks who should go next. Not thread-safe: the owner calls it under its own lock.

The owner may rely on this:
- `victims` changes nothing, so a list that is too short costs nothing: the owner can take all of
  it, part of it, or none (all or nothing is then one comparison of lengths);
- keys given together are ordered as given, the last one hottest.
The owner must do this: insert each key once, and remove what it evicts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, KeysView, Sequence


class EvictionPolicy(ABC):
    """An order of keys."""

    learns = False  # whether `observe` does anything; to list a prompt's keys has its price

    @abstractmethod
    def __len__(self) -> int:
        """How many keys it holds."""

    @abstractmethod
    def insert(self, keys: Iterable[bytes]) -> None:
        """Keys that came in."""

    @abstractmethod
    def touch(self, keys: Iterable[bytes]) -> None:
        """Keys that were used; each must be known."""

    @abstractmethod
    def remove(self, keys: Iterable[bytes]) -> None:
        """Keys that went; unknown ones are ignored."""

    def observe(self, chain: Sequence[bytes], now: float) -> None:  # noqa: B027 - a hint, not a duty
        """A prompt arrived whose blocks are `chain`, head first, whether the owner holds them or
        not, at `now` seconds of a monotonic clock. Its `touch` and `insert` follow, if any do. For
        policies that learn what is used again; others need not know."""

    @abstractmethod
    def victims(self, count: int, may_evict: Callable[[bytes], bool]) -> list[bytes]:
        """The `count` keys to evict next, coldest first, of those that `may_evict` allows; fewer
        where there are fewer. Changes nothing."""

    def may_be_next(self, keys: KeysView[bytes], count: int) -> bool:
        """Whether one of `keys` may be among the next `count` victims, whatever they are; may be
        told of those around the last ones too, where that is quicker. Changes nothing."""
        return not keys.isdisjoint(self.victims(count, lambda _key: True))

    def displaced_by(
        self, keys: Sequence[bytes], count: int, may_evict: Callable[[bytes], bool]
    ) -> list[bytes]:
        """The `victims` that make room for `keys`, which are about to come in and which the owner
        can do without: fewer where a policy would rather keep what there is. Changes nothing."""
        return self.victims(count, may_evict)
