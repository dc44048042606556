# SPDX-License-Identifier: Apache-2.0
"""The gate of a figure: a lower or upper limit of its value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A limit for a value: the least or the most allowed value."""

    least: float | None = None
    most: float | None = None
    unit: str = ""

    @property
    def wanted(self) -> str:
        """The limit with its unit, in the form of the tables: `>= 0.8`."""
        sign, value = (">=", self.least) if self.least is not None else ("<=", self.most)
        return f"{sign} {value:,g}{self.unit}"

    def is_met(self, value: float) -> bool:
        if self.least is not None:
            return value >= self.least
        return self.most is not None and value <= self.most

    def verdict(self, value: float) -> str:
        """Return the word for a value in tables: `met` or `missed`."""
        return "met" if self.is_met(value) else "missed"
