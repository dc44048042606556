# SPDX-License-Identifier: Apache-2.0
"""What the tiers promise of each ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .checksum_case import NAMES as CHECKSUM_NAMES
from .scale import SIZES

LOOK_UPS = "index_lookups_per_second"
LOOK_UPS_WHILE_CHURNING = "index_lookups_per_second_while_churning"
BYTES_PER_ENTRY = "index_bytes_per_entry"
REOPEN = "reopen_over_sequential_read"


@dataclass(frozen=True, slots=True)
class Gate:
    """At least, or at most, so much."""

    least: float | None = None
    most: float | None = None

    @property
    def wanted(self) -> str:
        """In words of the table."""
        return f">= {self.least:,g}" if self.least is not None else f"<= {self.most:,g}"

    def is_met(self, value: float) -> bool:
        """Whether the value keeps it."""
        if self.least is not None:
            return value >= self.least
        return self.most is not None and value <= self.most


def _gates() -> dict[str, Gate]:
    gates = {}
    for size in SIZES:
        small = size == "256KiB"
        gates[f"slab_put_{size}"] = gates[f"slab_get_{size}"] = Gate(least=0.8)
        gates[f"ssd_write_{size}"] = Gate(least=0.7 if small else 0.85)
        gates[f"ssd_read_cold_{size}"] = Gate(least=0.9)
        gates[f"ssd_churn_{size}"] = Gate(least=0.5 if small else 0.85)
    gates |= dict(zip(CHECKSUM_NAMES, (Gate(most=0.08), Gate(most=0.15)), strict=True))
    gates[LOOK_UPS] = gates[LOOK_UPS_WHILE_CHURNING] = Gate(least=500_000)
    gates[BYTES_PER_ENTRY] = Gate(most=256)
    gates[REOPEN] = Gate(most=1.5)
    return gates


GATES: Mapping[str, Gate] = _gates()
