# SPDX-License-Identifier: Apache-2.0
"""The command `stratakv bench tiers`; the package's docstring describes the measurements."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...tiers.errors import TierError
from ...tiers.settings import readers
from ...tiers.settings.values import ConfigError
from ...tiers.slab.shared_memory import HUGE_PAGE_BYTES
from ...tiers.tier_settings import DURABILITIES
from ..harness import plots
from ..harness.comparison import COMPARISON_COLUMNS, WrongWork, comparison_row, take_rounds
from ..harness.gate import Gate
from ..harness.report import Report, chosen, median, print_table, run_and_tell
from . import store_case
from .index_case import IndexCase
from .scale import CODECS, FULL, INDEX, MIB, QUICK, SECTIONS, SIZES, SLAB, SSD, Scale
from .slab_case import SlabCase, footprint_bytes
from .store_case import NAMES as CHECKSUM_NAMES
from .store_case import StoreCase, measure_codecs, print_codecs

LOOK_UPS = "index_lookups_per_second"
LOOK_UPS_WHILE_CHURNING = "index_lookups_per_second_while_churning"
BYTES_PER_ENTRY = "index_bytes_per_entry"
REOPEN = "reopen_over_sequential_read"
# case → its label in the picture
_FAMILIES = {
    "slab_put": "slab, put",
    "slab_get": "slab, get",
    "ssd_write": "ssd, durable write",
    "ssd_read_cold": "ssd, cold read",
    "ssd_churn": "ssd, turned over",
}


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
    gates[REOPEN] = Gate(most=1.4)
    return gates


GATES: Mapping[str, Gate] = _gates()


def print_tiers(report: Report) -> None:
    """Print the figure, limit, ratio and gate of each row."""
    rows = [comparison_row(report, name, GATES[name]) for name in report.ratios]
    rows = [[name.replace("_", " "), *cells] for name, *cells in rows]
    title = (
        "Tiers against the limits of this machine, measured in turn. "
        "A/A: the limit against itself, quartiles"
    )
    print_table(title, COMPARISON_COLUMNS, rows)
    if SSD in report.figures["plan"]["sections"]:
        _print_disk_limits(report)
    if CODECS in report.figures:
        print_codecs(report)


def _print_disk_limits(report: Report) -> None:
    """Print every limit of the disk in one table, with a mark at each limit that is used."""
    rows = []
    for name, comparison in report.figures["contests"].items():
        for limit, cell in comparison.get("by_limit", {}).items():
            rates = f"{comparison['median'] / 1e9:.2f} / {cell['median'] / 1e9:.2f}"
            mark = "decides" * (limit == comparison["limit"])
            rows.append([name.replace("_", " "), limit, rates, f"{cell['ratio']:.2f}", mark])
    title = (
        "Every limit of the disk; of those of reads, and of those of what is written durably, the "
        "strictest decides. x8: eight requests at a time"
    )
    print_table(title, ["what", "limit", "GB/s / limit", "ratio", ""], rows)


def plot_tiers(report: Report, path: Path) -> Path:
    """Draw bars of the ratios with gates: a group for each kind of figure, a bar per block size."""
    figure, [[axes]] = plots.new_figure(1, 1, 4.6)
    families = [each for each in _FAMILIES if f"{each}_{_SMALLEST}" in report.ratios]
    names = [[f"{family}_{size}" for family in families] for size in SIZES]
    ratios = [[report.ratios[name] for name in row] for row in names]
    colours = [
        [plots.MET if GATES[name].is_met(report.ratios[name]) else plots.MISSED for name in row]
        for row in names
    ]
    series = dict(zip(SIZES, ratios, strict=True))
    plots.draw_bars(axes, [_FAMILIES[family] for family in families], series, colours, fmt="%.2f")
    width = 0.84 / len(SIZES)
    for number, (size, row) in enumerate(zip(SIZES, names, strict=True)):
        places = [place - 0.42 + width * (number + 0.5) for place in range(len(row))]
        gates = [GATES[name].least for name in row]
        plots.mark_gates(axes, dict(zip(places, gates, strict=True)), width, plots.GATE)
        for place in places:
            axes.annotate(size, (place, 0), (0, 4), textcoords="offset points", rotation=90,
                          ha="center", fontsize=8, color="white")  # fmt: skip
    axes.axhline(1.0, color="#bbbbbb", linewidth=0.8, zorder=0)
    plan = report.figures["plan"]
    pages = "huge" if plan.get("huge_pages") else "plain"
    several = any("by_limit" in comparison for comparison in report.figures["contests"].values())
    disk = f"{plan.get('disk_limit')}{' or a stricter one' * several}"
    title = (
        "Slab and SSD store, as a share of what memory and disk can do\n"
        f"1.0: memcpy (slab); {disk}, O_DIRECT, random places, {pages} pages (ssd). "
        "Orange: promised"
    )
    plots.caption(axes, title, y="share of the limit")
    return plots.save_figure(figure, report.environment, path)


MOUNTS = Path("/proc/self/mountinfo")
MEMINFO = Path("/proc/meminfo")
_IN_MEMORY = ("tmpfs", "ramfs")


@contextlib.contextmanager
def working_folder(path: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a new folder below `path`, which is removed on exit. Raises ConfigError if folder or
    disk is unsuitable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        kind = file_system_of(path)
        if kind in _IN_MEMORY:
            raise ConfigError(
                f"--path {path} is on {kind}, which is memory and says nothing of a disk; choose "
                "a folder on the disk to be measured"
            )
        free = shutil.disk_usage(path).free
        if free < needed_bytes:
            raise ConfigError(
                f"--path {path} has {free:,} bytes free and the benchmark takes {needed_bytes:,}; "
                "make room or choose another folder"
            )
        folder = tempfile.TemporaryDirectory(prefix="stratakv-bench-", dir=path)
    except OSError as error:
        raise ConfigError(
            f"--path {path} cannot be written to ({error.strerror}); choose another folder"
        ) from error
    with folder as name:
        yield Path(name)


def file_system_of(path: Path, mounts: Path = MOUNTS) -> str | None:
    """Return the kind of file system of `path`; None if the kernel does not list it."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return None


def check_huge_pages(needed_bytes: int, meminfo: Path = MEMINFO) -> None:
    """Raise ConfigError if less than `needed_bytes` are free in the host's pool of huge pages."""
    found = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    free = int(found.get("HugePages_Free", "0"))
    needed = -(-needed_bytes // HUGE_PAGE_BYTES)
    if free < needed:
        raise ConfigError(
            f"--huge-pages takes {needed} free pages of the host's pool, which has {free}; run "
            f"`sysctl vm.nr_hugepages={needed}` or leave the option out"
        )


# The size of the slab for blocks that are being written to or read from the disk, and for the
# limit's buffers: four batches of seven blocks of 5 MiB.
HUGE_BYTES = 140 * MIB
_SMALLEST, _MIDDLE = "256KiB", "2MiB"


@dataclass(frozen=True, slots=True)
class Disk:
    """The folder on the measured disk, and the settings of the measurement."""

    folder: Path
    limit: str | None  # "fio", "loop", or None for fio if it is installed
    huge_pages: bool
    durability: str  # the durability setting of the store


def run(arguments: argparse.Namespace) -> int:
    """Measure all figures; return 0, or 1 after printing an error. Raises ConfigError."""
    if arguments.limit is not None:
        readers.one_of("fio", "loop")("--limit", arguments.limit)
    readers.one_of(*DURABILITIES)("--durability", arguments.durability)
    if arguments.huge_pages:
        check_huge_pages(HUGE_BYTES)
    path = readers.path("--path", arguments.path)
    scale = QUICK if arguments.quick else FULL
    options = " --quick" * arguments.quick + " --huge-pages" * arguments.huge_pages
    options += " --durability async" * (arguments.durability == "async")
    sections = chosen("--sections", arguments.sections, SECTIONS)
    options += f" --sections {arguments.sections}" * (len(sections) < len(SECTIONS))
    report = Report("tiers", f"stratakv bench tiers{options}")
    report.figures["plan"] = {"sections": sections}

    def take() -> None:
        with working_folder(path, scale.needed_bytes) as folder:
            disk = Disk(folder, arguments.limit, arguments.huge_pages, arguments.durability)
            measure(report, disk, scale)

    return run_and_tell(report, arguments.out, take, print_tiers, plot_tiers, WrongWork, TierError)


def measure(report: Report, disk: Disk, scale: Scale) -> None:
    """Run the chosen sections and fill the report. Raises WrongWork for wrong results."""
    plan = report.figures["plan"]
    report.figures |= {"contests": {}, "first_writes": {}, "spreads": {}}
    work: Mapping[str, Callable[[], object]] = {
        SLAB: lambda: measure_slab(report, scale),
        SSD: lambda: measure_stores(report, disk, scale),
        INDEX: lambda: measure_index(report, disk.folder / "index", scale),
        CODECS: lambda: report.figures.update(codecs=measure_codecs()),
    }
    for section in plan["sections"]:
        began = time.monotonic()
        work[section]()
        plan[f"{section}_seconds"] = round(time.monotonic() - began, 1)
    report.ratios = {name: report.ratios[name] for name in GATES if name in report.ratios}


def measure_slab(report: Report, scale: Scale) -> None:
    slab_bytes = footprint_bytes(scale.slab_bytes)
    report.figures["plan"]["slab_bytes"] = slab_bytes
    for size, block_bytes in SIZES.items():
        with contextlib.closing(SlabCase(block_bytes, slab_bytes)) as case:
            for comparison in case.comparisons(size):
                take_rounds(comparison, scale.slab_rounds, scale.seconds).add_to(report)
        gc.collect()


def measure_stores(report: Report, disk: Disk, scale: Scale) -> None:
    for size in SIZES:
        folder = disk.folder / size
        how: dict[str, Any] = {"huge_pages": disk.huge_pages, "durability": disk.durability}
        case = StoreCase(folder, SIZES[size], scale, disk.limit, **how)
        report.figures["plan"] |= {"disk_limit": case.limit.name, **how}
        report.figures["first_writes"][size] = case.first_write_rate
        try:
            for comparison in case.comparisons(size):
                take_rounds(comparison, scale.rounds, scale.seconds).add_to(report)
            take_rounds(case.churn_comparison(size), scale.rounds, scale.seconds).add_to(report)
            if size == _SMALLEST:
                rates = [case.look_ups_while_churning() for _ in range(scale.index_rounds)]
                report.ratios[LOOK_UPS_WHILE_CHURNING] = median(rates)
            if size == _MIDDLE:
                for comparison in store_case.checksum_comparisons(case):
                    taken = take_rounds(comparison, scale.rounds, scale.seconds)
                    taken.add_to(report, store_case.cost)
                case.clear()
        finally:
            case.close()
            shutil.rmtree(folder)


def measure_index(report: Report, folder: Path, scale: Scale) -> None:
    case = IndexCase(folder, scale.index_entries)
    outcome = take_rounds(case.comparison(), scale.index_rounds, scale.seconds)
    report.ratios[REOPEN] = 1 / outcome.ratio
    report.figures["reopen"] = {
        **outcome.figures(),
        "entries": case.entries,
        "against": "a pass over all rows by LMDB cursor; both with a warm page cache",
    }
    report.ratios[BYTES_PER_ENTRY] = case.bytes_per_entry()
    report.ratios[LOOK_UPS] = median(case.look_ups(scale.index_rounds))
