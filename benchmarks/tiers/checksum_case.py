# SPDX-License-Identifier: Apache-2.0
"""What checksums cost: the same reads and writes of the real store, with and without hashing.

Without is for this comparison only; no option of the product leaves a checksum out. So the switch
is here, and exchanges two functions for as long as one round takes.
"""

from __future__ import annotations

from collections.abc import Callable

from ...tiers import record
from ...tiers.ssd import reader, record_writer
from ...tiers.tag import NO_TAG, Proof
from ..harness.comparison import Comparison
from .store_case import StoreCase
from .swap import swapped

NAMES = ("checksum_cost_read_2MiB", "checksum_cost_write_2MiB")


def comparisons(case: StoreCase) -> list[Comparison]:
    """Reads, then writes. Rates with hashing against rates without."""
    return [
        Comparison(name, "bytes/s", "no hashing", work, _plainly(work))
        for name, work in zip(NAMES, (case.read, case.write), strict=True)
    ]


def cost(ratio: float) -> float:
    """The part of the time that hashing adds, of a ratio of rates; below zero by chance only."""
    return 1 / ratio - 1


def _plainly(work: Callable[[], float]) -> Callable[[], float]:
    def plain() -> float:
        with (
            swapped(record, payload_digest=lambda _payload: NO_TAG),
            swapped(record_writer, payload_digest=lambda _payload: NO_TAG),
            swapped(reader, verify_record=lambda *_record: Proof(NO_TAG, NO_TAG)),
        ):
            return work()

    return plain
