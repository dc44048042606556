# SPDX-License-Identifier: Apache-2.0
"""What the sections of `stratakv bench gpu` leave: ceilings, rows, ratios, the targets' verdicts.

The JSON is written after every section, so a run that is cut off keeps what it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..harness.comparison import Gate
from ..harness.report import Report

Row = dict[str, Any]  # one measured case: "case" names it, the other entries are plain values


@dataclass(frozen=True, slots=True)
class Target(Gate):
    """A promise about one ratio or figure: its name in `ratios`, and what it is."""

    name: str
    what: str


class Results:
    """One run's results; sections add to it as they go."""

    def __init__(self, report: Report, directory: Path) -> None:
        self.report = report
        self._directory = directory

    @property
    def ceilings(self) -> Mapping[str, float]:
        """What the device can do at most, by name (`device_copy_gb_per_second`, …)."""
        return self.report.limits

    def set_ceiling(self, name: str, value: float) -> None:
        """Set by the first section only."""
        self.report.limits[name] = value

    def add_row(self, section: str, row: Row) -> None:
        """One measured case of a section."""
        self.report.figures.setdefault(section, {"rows": []})["rows"].append(row)

    def add_note(self, section: str, note: str) -> None:
        """Something a reader of the section must know: a case left out, a peer not found."""
        self.report.figures.setdefault(section, {"rows": []}).setdefault("notes", []).append(note)

    def rows(self, section: str) -> list[Row]:
        """What a section has measured."""
        found: list[Row] = self.report.figures.get(section, {}).get("rows", [])
        return found

    def set_ratio(self, name: str, value: float) -> None:
        """A figure that a target, or a reader of another run, compares."""
        self.report.ratios[name] = value

    def ratio_to_ceiling(self, value: float, ceiling: str) -> float | None:
        """None where the ceiling was not measured, so that no number is made up."""
        limit = self.report.limits.get(ceiling)
        return value / limit if limit else None

    def write(self) -> Path:
        """Write what there is so far. Raises OSError."""
        return self.report.write(self._directory)

    @property
    def directory(self) -> Path:
        """Where JSON and plots go."""
        return self._directory
