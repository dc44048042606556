# SPDX-License-Identifier: Apache-2.0
"""One part of `stratakv bench gpu`: a name, the targets it answers, and what it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .place import Place
from .results import Results, Target


@dataclass(frozen=True, slots=True)
class Section:
    """`run` checks each case against its reference before timing it, and adds rows and ratios.

    `plot` draws the section's rows into one PNG, or returns None where there is nothing to draw.
    """

    name: str
    title: str
    run: Callable[[Place, Results], None]
    plot: Callable[[Results, Path], Path | None]
    targets: tuple[Target, ...] = ()
