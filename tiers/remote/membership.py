# SPDX-License-Identifier: Apache-2.0
"""Which servers there are, and which of them a block belongs to.

Rendezvous hashing: every server gets a score for a key, the highest has the block. Where a server
is added or lost, only the blocks that it has or had move. `Membership` is the seam at which a
membership service takes the place of a fixed list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from .address import ServerAddress

_MASK = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15  # spreads a product over the upper bits


class Membership(Protocol):
    """The servers there are now. `version` changes whenever they do."""

    version: int

    def members(self) -> Sequence[ServerAddress]:
        """At least one, each once, in any order."""


class StaticMembership:
    """The servers that the operator named."""

    version = 0

    def __init__(self, addresses: Sequence[ServerAddress]) -> None:
        self._addresses = tuple(dict.fromkeys(addresses))
        if not self._addresses:
            raise ValueError("a membership has at least one server")

    def members(self) -> Sequence[ServerAddress]:
        return self._addresses


class Rendezvous:
    """The owner of each key among `members`; the same for everybody who names the same servers."""

    def __init__(self, members: Sequence[ServerAddress]) -> None:
        self._seeds = [
            int.from_bytes(hashlib.sha256(str(member).encode()).digest()[:8], "little")
            for member in members
        ]

    def owners(self, keys: Sequence[bytes]) -> list[int]:
        """For each key the index of its server. Keys are digests, and so random already."""
        seeds = self._seeds
        if len(seeds) == 1:
            return [0] * len(keys)
        owners = []
        for key in keys:
            number = int.from_bytes(key[:8], "little")
            scores = [((number ^ seed) * _ODD) & _MASK for seed in seeds]
            owners.append(scores.index(max(scores)))
        return owners
