# SPDX-License-Identifier: Apache-2.0
"""What the hierarchy answers: where blocks are, and slots to fill.

The ticket of a load lies in `promotions.py`, beside the reads that fill it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Prefix(NamedTuple):
    """The tier of each leading block that some tier has; whether the next one is coming; whether a
    store was asked for the next one and has not answered yet, which it soon will."""

    tiers: list[str]
    pending: bool
    asked: bool = False


@dataclass(slots=True, eq=False)
class StoreTicket:
    """Slots reserved for blocks the slab did not have."""

    keys: list[bytes]
    slots: list[int]
    epoch: int
    num_refused: int = 0  # blocks that the slab had no slot for
