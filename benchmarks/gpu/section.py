# SPDX-License-Identifier: Apache-2.0
"""One part of `stratakv bench gpu`: a name, the targets it answers, what it runs and draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..harness.plots import save_figure
from .place import Place
from .results import Results, Row, Target

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
