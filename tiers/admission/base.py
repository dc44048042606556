# SPDX-License-Identifier: Apache-2.0
"""Admission filters decide which blocks that the slab is about to evict are written to the disk.

Writing every block wears a disk out and evicts blocks that would have been used again. A filter
handles no disks, slots or threads; `Hierarchy` calls a filter only from its own thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class AdmissionFilter(ABC):
    """Decides which blocks are written to the tier below."""

    learns = False  # whether `observe` does anything: listing a prompt's keys costs time

    def observe(self, chain: Sequence[bytes], now: float) -> None:  # noqa: B027 - a hint, not a duty
        """Learn from a prompt whose blocks are `chain`, head first, at `now` monotonic seconds."""

    def promoted(self, count: int) -> None:  # noqa: B027 - a hint, not a duty
        """Count `count` blocks that requests found in the tier below and copied into the slab."""

    @abstractmethod
    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        """Decide for each block that the tier above is about to evict whether to write it."""


class AdmitAll(AdmissionFilter):
    """Admits every block: write-back without a filter."""

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        return [True] * len(keys)
