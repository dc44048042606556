# SPDX-License-Identifier: Apache-2.0
"""The report of a benchmark: `DIR/NAME.json`, tables on the terminal, and a picture.

The JSON always has `environment`, `limits`, `figures` and `ratios`. The values of `ratios` are
numbers; the values of the other three may be nested."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median as median  # re-exported
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ...tiers.settings.format import format_value
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from .plots import draw_and_tell

_PACKAGES = ("torch", "numpy", "lmdb", "msgspec", "pyzmq", "fastapi", "uvicorn")


def environment() -> dict[str, Any]:
    """Return the machine and software of a measurement, without any host name or user name."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "packages": package_versions(_PACKAGES),
        "version": package_versions(["stratakv"]).get("stratakv", "not installed"),
        "commit": _commit(),
    }


@dataclass(slots=True)
class Report:
    """The results of one benchmark run."""

    name: str
    command: str
    environment: dict[str, Any] = field(default_factory=environment)
    limits: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)

    def write(self, directory: Path) -> Path:
        """Write `NAME.json` atomically; return its path. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        body = {
            "name": self.name,
            "command": self.command,
            "environment": self.environment,
            "limits": self.limits,
            "figures": self.figures,
            "ratios": self.ratios,
        }
        partial = path.with_suffix(".json.partial")
        partial.write_text(json.dumps(body, indent=2, allow_nan=False) + "\n")
        partial.replace(path)
        return path

    @classmethod
    def read(cls, path: Path) -> Report:
        """Return the report that `write` has written to `path`. Raises OSError, ValueError."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of `values`, which must not be empty."""
    ordered = sorted(values)
    rank = max(1, math.ceil(percent / 100.0 * len(ordered)))
    return ordered[rank - 1]


def ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return `ones` divided by `others`, pair by pair; the two lists are from the same rounds."""
    return [one / other for one, other in zip(ones, others, strict=True)]


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column has names, all other columns have numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    # In a log file, which has no width, each row is printed on one line.
    console = Console()
    console = console if console.is_terminal else Console(width=1_000)
    console.print(table)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed packages among `names`."""
    versions = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _commit() -> str:
    """Return $STRATAKV_COMMIT or the commit from git, marked if files differ; "" without .git."""
    if given := os.environ.get("STRATAKV_COMMIT", "").strip():
        return given
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError, subprocess.TimeoutExpired):
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        return run.stdout.strip()
    return ""


def run_and_tell(
    report: Report,
    out: Path,
    measure: Callable[[], object],
    show: Callable[[Report], object],
    plot: Callable[[Report, Path], Path],
    *failures: type[Exception],
) -> int:
    """Measure, write the JSON, print tables and draw the picture. Return 0, or 1 after printing the
    reason of a failure. Raises ConfigError."""
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
    """Measure and write the JSON; return its path, or None after printing the reason of a failure.
    Raises ConfigError."""
    expected: tuple[type[Exception], ...] = (*failures, OSError)
    try:
        measure()
        return report.write(out)
    except ConfigError:
        raise
    except expected as error:
        tell_failure(report.name, error)
        return None


def chosen(flag: str, given: str | None, known: Sequence[str]) -> list[str]:
    """Return the names in the comma-separated text `given`, in the order of `known`; all names for
    None. Raises ConfigError for an unknown name."""
    names = known if given is None else [name.strip() for name in given.split(",")]
    for name in names:
        if name not in known:
            near = did_you_mean(name, known) or f"; there are: {', '.join(known)}"
            raise ConfigError(f"{flag} takes names by commas, not {format_value(name)}{near}")
    return [name for name in known if name in names]


def tell_failure(name: str, error: object) -> None:
    """Print a failure in red on standard error; no markup, because of errors with '.[test]'."""
    console = Console(stderr=True)
    console.print(f"bench {name}: {error}", style="red", markup=False, soft_wrap=True)


def progress(console: Console) -> Progress:
    """Return a progress bar with the current item and the number of finished items."""
    columns = (TextColumn("{task.description:26}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)
