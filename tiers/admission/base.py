# SPDX-License-Identifier: Apache-2.0
"""Admission: which of the blocks that the slab is about to lose are worth writing to the disk.

Writing everything wears a disk out and displaces what would have been used again. Knows nothing of
disks, slots or threads; `Hierarchy` asks it from its own thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class AdmissionFilter(ABC):
    """Says which blocks may go down a tier."""

    learns = False  # whether `observe` does anything; to list a prompt's keys has its price

    def observe(self, chain: Sequence[bytes], now: float) -> None:  # noqa: B027 - a hint, not a duty
        """A prompt arrived whose blocks are `chain`, head first, at `now` monotonic seconds."""

    def promoted(self, count: int) -> None:  # noqa: B027 - a hint, not a duty
        """`count` blocks were asked for, found in the tier below and promoted."""

    @abstractmethod
    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        """For each block that is about to be lost from the tier above: whether to write it."""


class AdmitAll(AdmissionFilter):
    """Everything is written: write-back without a filter."""

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        return [True] * len(keys)
