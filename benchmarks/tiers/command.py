# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench tiers`: slab, SSD store and index against the limits of this machine.

Blocks of 256 KiB, 2 MiB and 5 MiB into and out of the real slab, against plain copies; the same to
and from the real store, durable and checked, against random I/O past the page cache; what checksums
cost; look-ups, memory and opening of an index with a million blocks. Every figure and its limit are
taken in turn, a ratio is the median of the ratios within a round, and beside it stands how far they
spread, and how far the limit spreads against itself.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...tiers.errors import TierError
from ...tiers.settings import readers
from ...tiers.settings.values import ConfigError
from ...tiers.shared_memory import HUGE_PAGE_BYTES
from ..harness.command import run_and_tell
from ..harness.comparison import WrongWork, take_rounds
from ..harness.report import Report, median
from . import cost_cases
from .cost_cases import measure_codecs
from .index_case import IndexCase
from .report import (
    BYTES_PER_ENTRY,
    GATES,
    LOOK_UPS,
    LOOK_UPS_WHILE_CHURNING,
    REOPEN,
    plot_tiers,
    print_tiers,
)
from .scale import FULL, MIB, QUICK, SIZES, Scale
from .slab_case import SlabCase, footprint_bytes
from .store_case import StoreCase

MOUNTS = Path("/proc/self/mountinfo")
MEMINFO = Path("/proc/meminfo")
_IN_MEMORY = ("tmpfs", "ramfs")


@contextlib.contextmanager
def working_folder(path: Path, needed_bytes: int) -> Iterator[Path]:
    """A new folder below `path`, removed with all it holds. Raises ConfigError."""
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
    """The kind of file system that `path` is on; None where the kernel does not say."""
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
    """Raises ConfigError where the host's pool has not so much free."""
    found = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    free = int(found.get("HugePages_Free", "0"))
    needed = -(-needed_bytes // HUGE_PAGE_BYTES)
    if free < needed:
        raise ConfigError(
            f"--huge-pages takes {needed} free pages of the host's pool, which has {free}; run "
            f"`sysctl vm.nr_hugepages={needed}` or leave the option out"
        )


# What is on its way to the disk: four batches of seven blocks of 5 MiB. The limit's buffers, too.
HUGE_BYTES = 140 * MIB
_SMALLEST, _MIDDLE = "256KiB", "2MiB"


@dataclass(frozen=True, slots=True)
class Disk:
    """Where the disk is measured, and how."""

    folder: Path
    limit: str | None  # "fio", "loop", or whichever there is
    huge_pages: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; `--quick` and `--out` are the dispatcher's."""
    parser.add_argument(
        "--path", metavar="DIR", default=Path("build/bench/tiers.disk"),
        help="a folder on the disk to be measured (default: build/bench/tiers.disk)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", metavar="NAME",
        help="what the disk is driven by for its limit: fio, or loop, which this benchmark brings "
        "(default: fio where it is installed)",
    )  # fmt: skip
    parser.add_argument(
        "--huge-pages", action="store_true",
        help="blocks for the disk, ours and the limit's, lie on huge pages of the host's pool",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Take all figures; 0, or 1 with the reason on the terminal. Raises ConfigError."""
    if arguments.limit is not None:
        readers.one_of("fio", "loop")("--limit", arguments.limit)
    if arguments.huge_pages:
        check_huge_pages(HUGE_BYTES)
    path = readers.path("--path", arguments.path)
    scale = QUICK if arguments.quick else FULL
    options = " --quick" * arguments.quick + " --huge-pages" * arguments.huge_pages
    report = Report("tiers", f"stratakv bench tiers{options}")

    def take() -> None:
        with working_folder(path, scale.needed_bytes) as folder:
            disk = Disk(folder, arguments.limit, arguments.huge_pages)
            measure(report, disk, scale)

    return run_and_tell(report, arguments.out, take, print_tiers, plot_tiers, WrongWork, TierError)


def measure(report: Report, disk: Disk, scale: Scale) -> None:
    """Fill the report. Raises WrongWork where something did not do what it should."""
    report.figures |= {"plan": {}, "contests": {}, "first_writes": {}, "spreads": {}}
    measure_slab(report, scale)
    for size in SIZES:
        measure_store(report, size, disk, scale)
    measure_index(report, disk.folder / "index", scale)
    report.figures["codecs"] = measure_codecs()
    report.ratios = {name: report.ratios[name] for name in GATES}


def measure_slab(report: Report, scale: Scale) -> None:
    slab_bytes = footprint_bytes(scale.slab_bytes)
    report.figures["plan"]["slab_bytes"] = slab_bytes
    for size, block_bytes in SIZES.items():
        case = SlabCase(block_bytes, slab_bytes)
        try:
            for comparison in case.comparisons(size):
                take_rounds(comparison, scale.slab_rounds).add_to(report)
        finally:
            case.close()
            gc.collect()


def measure_store(report: Report, size: str, disk: Disk, scale: Scale) -> None:
    folder = disk.folder / size
    case = StoreCase(folder, SIZES[size], scale, disk.limit, huge_pages=disk.huge_pages)
    report.figures["plan"] |= {"disk_limit": case.limit.name, "huge_pages": disk.huge_pages}
    report.figures["first_writes"][size] = case.first_write_rate
    try:
        for comparison in case.comparisons(size):
            take_rounds(comparison, scale.rounds).add_to(report)
        take_rounds(case.churn_comparison(size), scale.turnovers).add_to(report)
        if size == _SMALLEST:
            rates = [case.look_ups_while_churning() for _ in range(scale.index_rounds)]
            report.ratios[LOOK_UPS_WHILE_CHURNING] = median(rates)
        if size == _MIDDLE:
            for comparison in cost_cases.comparisons(case):
                take_rounds(comparison, scale.rounds).add_to(report, cost_cases.cost)
            case.clear()
    finally:
        case.close()
        shutil.rmtree(folder)


def measure_index(report: Report, folder: Path, scale: Scale) -> None:
    case = IndexCase(folder, scale.index_entries)
    outcome = take_rounds(case.comparison(), scale.index_rounds)
    report.ratios[REOPEN] = 1 / outcome.ratio
    report.figures["reopen"] = {
        **outcome.figures(),
        "entries": case.entries,
        "against": "a pass over all rows by LMDB cursor; both with a warm page cache",
    }
    report.ratios[BYTES_PER_ENTRY] = case.bytes_per_entry()
    report.ratios[LOOK_UPS] = median(case.look_ups(scale.index_rounds))
