# SPDX-License-Identifier: Apache-2.0
"""AdmissionFilter: decides which of the blocks that the slab will evict next are written to disk.

Writing every block wears a disk out and evicts blocks that would have been used again. A filter
handles no disks, slots or threads; `Hierarchy` calls a filter only from its own thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class AdmissionFilter(ABC):
    """The contract of a filter, which decides which blocks are written to the tier below."""

    learns = False  # whether `observe` has an effect; if not, it is not called

    def observe(self, chain: Sequence[bytes], now: float) -> None:  # noqa: B027 - a hint, not a duty
        """Learn from a prompt whose blocks are `chain`, head first, at `now` monotonic seconds."""

    def promoted(self, count: int) -> None:  # noqa: B027 - a hint, not a duty
        """Count `count` blocks that were copied from the tier below into the slab for requests."""

    @abstractmethod
    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        """Return, for each block that the slab will evict next, whether to write it."""


class AdmitAll(AdmissionFilter):
    """The filter that admits every block."""

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        return [True] * len(keys)
