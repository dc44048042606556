# SPDX-License-Identifier: Apache-2.0
"""The parts of `stratakv bench gpu`: what each runs and draws, what it leaves, and its targets.

The JSON is written after every section, so a run that is cut off keeps what it had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..harness.comparison import Gate
from ..harness.plots import save_figure
from ..harness.report import Report
from .place import Place, SectionOver, WrongResult

MAX_REASON = 300  # characters of an error in a note
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


# Makes a figure of a section's rows and the ceilings by name; None where there is nothing to see.
Draw = Callable[[Sequence[Row], Mapping[str, float]], Any]


@dataclass(frozen=True, slots=True)
class Section:
    """`run` checks each case against its reference before timing it, and adds rows and ratios."""

    name: str
    title: str
    run: Callable[[Place, Results], None]
    draw: Draw | None = None
    targets: tuple[Target, ...] = ()

    def plot(self, results: Results, directory: Path) -> Path | None:
        """Draw `gpu-NAME.png`; None where nothing was measured."""
        rows = results.rows(self.name)
        figure = self.draw(rows, results.ceilings) if self.draw is not None and rows else None
        if figure is None:
            return None
        return save_figure(figure, results.report.environment, directory / f"gpu-{self.name}.png")


def run_cases(
    place: Place,
    results: Results,
    section: str,
    cases: Sequence[Any],
    measure: Callable[[Any], None],
) -> None:
    """Each in turn, by its `name`. Too little memory is a note; another fault is one too, and
    raises RuntimeError after all other cases. A wrong result stops everything. Raises SectionOver,
    WrongResult."""
    failed = []
    for case in cases:
        place.check_time()
        try:
            measure(case)
        except (SectionOver, WrongResult):
            raise
        except torch.OutOfMemoryError:
            results.add_note(section, f"{case.name}: left out, the device has too little memory")
        except Exception as error:  # noqa: BLE001 - Triton's errors have no other base in common
            results.add_note(section, f"{case.name}: failed: {one_line(error)}")
            failed.append(case.name)
        place.release_memory()
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(cases)} cases failed: {', '.join(failed)}")


def one_line(error: BaseException) -> str:
    """What went wrong, without the pages that a compiler may add."""
    words = " ".join(str(error).split())[:MAX_REASON]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
