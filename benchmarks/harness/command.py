# SPDX-License-Identifier: Apache-2.0
"""What every benchmark's command does: measure, write JSON, print tables, draw; or fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...tiers.settings.values import ConfigError
from .plots import draw_and_tell
from .report import Report


def run_and_tell(
    report: Report,
    out: Path,
    measure: Callable[[], object],
    show: Callable[[Report], object],
    plot: Callable[[Report, Path], Path],
    *failures: type[Exception],
) -> int:
    """Measure, write the JSON, print tables, draw; 0, or 1 with the reason of a failure on the
    terminal. Raises ConfigError."""
    path = measure_and_write(report, out, measure, *failures)
    if path is None:
        return 1
    show(report)
    print(f"written: {path}")
    draw_and_tell(lambda: plot(report, path.with_suffix(".png")))
    return 0


def measure_and_write(
    report: Report, out: Path, measure: Callable[[], object], *failures: type[Exception]
) -> Path | None:
    """Where the JSON is; None with the reason of a failure on the terminal. Raises ConfigError."""
    expected: tuple[type[Exception], ...] = (*failures, OSError)
    try:
        measure()
        return report.write(out)
    except ConfigError:
        raise
    except expected as error:
        tell_failure(report.name, error)
        return None


def tell_failure(name: str, error: object) -> None:
    """In red on standard error. No markup: errors name extras, as in '.[test]'."""
    console = Console(stderr=True)
    console.print(f"bench {name}: {error}", style="red", markup=False, soft_wrap=True)


def progress(console: Console) -> Progress:
    """A bar with what is done at present, and how many are done."""
    columns = (TextColumn("{task.description:26}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)
