# SPDX-License-Identifier: Apache-2.0
"""What a request needs of its cache groups behind a given length: all blocks of those whose layers
see everything, the last ones of those with windows.

    positions of a load        0  1  2  3  4
    full attention             x  x  x  x  x
    window                              x  x      low = 3
    keys, position by position a  b  c  dD eE

A load of a model with windows is of one length: what it brings is of no use for a shorter one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Reach(Protocol):
    """How the layers of one cache group attend."""

    @property
    def is_full(self) -> bool:
        """Whether a token sees all before it."""

    def first_seen(self, position: int) -> int:
        """The first position that the token at `position`, or any after it, attends to."""


class EverySeen:
    """A group of full attention."""

    is_full = True

    def first_seen(self, position: int) -> int:
        return 0


EVERYTHING = EverySeen()


class Needs(NamedTuple):
    """Of a load of `num_positions`: the first position at which each group has a block that is
    needed."""

    num_positions: int
    lows: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether all groups need all positions, so that a part of the load is of use."""
        return not any(self.lows)

    @property
    def width(self) -> int:
        return len(self.lows)

    def groups_at(self, position: int) -> list[int]:
        """The groups whose blocks are needed at a position, in the order of its keys."""
        return [group for group, low in enumerate(self.lows) if position >= low]

    def keys(self, digests: Sequence[bytes], suffixes: Sequence[bytes]) -> list[bytes]:
        """The keys, position by position; `digests` are those of the positions."""
        if self.is_whole:
            return [digest + suffix for digest in digests for suffix in suffixes]
        return [
            digest + suffixes[group]
            for position, digest in enumerate(digests)
            for group in self.groups_at(position)
        ]

    def of_group(self, values: Sequence[int], group: int) -> list[int]:
        """Those of `values`, one for each key, that belong to a group."""
        if self.is_whole:
            return list(values[group :: self.width])
        owners = (g for position in range(self.num_positions) for g in self.groups_at(position))
        return [value for owner, value in zip(owners, values, strict=True) if owner == group]

    def by_position(self, tiers: Sequence[str], order: Sequence[str]) -> list[str]:
        """The tier of each position, from those of the keys: the one furthest down in `order`.
        One at which nothing is needed counts as the first."""
        found, start = [], 0
        for position in range(self.num_positions):
            end = start + len(self.groups_at(position))
            found.append(max(tiers[start:end], key=order.index, default=order[0]))
            start = end
        return found


def needs_of(
    reaches: Sequence[Reach], first: int, num_positions: int, num_tokens: int, block_size: int
) -> Needs:
    """What a load of so many positions behind `first` needs, after which the token behind
    `num_tokens` of the request is computed. What lies before `first` is in the pool."""
    return Needs(
        num_positions,
        tuple(
            min(num_positions, max(0, reach.first_seen(num_tokens) // block_size - first))
            for reach in reaches
        ),
    )
