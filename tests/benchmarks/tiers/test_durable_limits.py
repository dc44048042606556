# SPDX-License-Identifier: Apache-2.0
"""Z13: what is written durably is held against what the disk can make durable."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from stratakv.benchmarks.harness.comparison import take_rounds
from stratakv.benchmarks.harness.report import Report
from stratakv.benchmarks.tiers import command, disk_limit
from stratakv.benchmarks.tiers.scale import MIB, layout_of
from stratakv.benchmarks.tiers.store_case import StoreCase
from stratakv.engine.cli.main import main
from stratakv.tiers.slab.cpu_slab import CpuSlab

pytestmark = pytest.mark.regression

GB = 1e9


@pytest.fixture
def slab() -> Iterator[CpuSlab]:
    slab = CpuSlab(layout_of(2**18), 4 * MIB)
    yield slab
    slab.close()


def case_of(durability: str, kind: str = "fio") -> SimpleNamespace:
    """A disk whose flush is dear."""
    limit = SimpleNamespace(
        name=kind,
        write=lambda num_bytes: 1.9 * GB,
        write_durably=lambda num_bytes, batch_bytes: 0.6 * GB,
        write_in_turn=lambda num_bytes, batch_bytes: 0.62 * GB,
    )
    return SimpleNamespace(limit=limit, _batch=8, _size=MIB, _is_durable=durability == "sync")


@pytest.mark.parametrize(
    ("durability", "kind", "decides", "ratio"),
    [
        ("sync", "fio", "loop+sync", 0.6 / 0.62),
        ("sync", "loop", "loop+sync", 0.6 / 0.62),
        ("async", "fio", "fio", 0.6 / 1.9),
        ("async", "loop", "loop", 0.6 / 1.9),
    ],
)
def test_z13_the_limit_of_what_is_promised_decides(
    durability: str, kind: str, decides: str, ratio: float
) -> None:
    case = case_of(durability, kind)
    comparison = StoreCase._written(case, "ssd_write_2MiB", lambda: 0.6 * GB, 64 * MIB)  # type: ignore[arg-type]
    outcome = take_rounds(comparison, 4)
    figures = outcome.figures()
    assert (figures["limit"], outcome.ratio) == (decides, pytest.approx(ratio))
    assert set(figures["by_limit"]) == {kind, f"{kind}+sync", "loop+sync"}, "all are shown"
    assert figures["by_limit"][kind]["ratio"] == pytest.approx(0.6 / 1.9), "the old figure too"


def test_z13_both_limits_stand_in_one_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = Report("tiers", "stratakv bench tiers")
    report.figures["contests"] = {}
    written = StoreCase._written(case_of("sync"), "ssd_write_2MiB", lambda: 0.65 * GB, 64 * MIB)  # type: ignore[arg-type]
    take_rounds(written, 4).add_to(report)
    command._print_disk_limits(report)
    lines = capsys.readouterr().out.replace("│", " ").splitlines()
    rows = [line.split() for line in lines if "ssd" in line]
    assert [" ".join(row[3:]) for row in rows] == [
        "fio+sync 0.65 / 0.60 1.08",
        "loop+sync 0.65 / 0.62 1.05 decides",
        "fio 0.65 / 1.90 0.34",
    ]


def test_z13_a_sync_is_in_the_time_of_what_is_durable(
    tmp_path: Path, slab: CpuSlab, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = disk_limit.make_limit("loop", tmp_path / "limit", 2**18, 8 * MIB, slab)
    seconds = itertools.count()  # which pass while the disk syncs, and when somebody looks
    passed = [0.0]

    def sync(descriptor: int) -> None:
        passed[0] += 10.0
        next(seconds)

    def clock() -> float:
        passed[0] += 1.0
        return passed[0]

    monkeypatch.setattr(disk_limit.os, "fdatasync", sync)
    monkeypatch.setattr(disk_limit, "time", SimpleNamespace(perf_counter=clock))

    def taken(work: Callable[[], float]) -> tuple[float, int]:
        """Seconds of the rate, and syncs, but for that which follows."""
        before = next(seconds)
        rate = work()
        return 8 * MIB / rate, next(seconds) - before - 2

    assert taken(lambda: limit.write(8 * MIB)) == (1.0, 0), "it follows, and is not in the time"
    took, syncs = taken(lambda: limit.write_durably(8 * MIB, 2 * MIB))
    assert took == 1.0 + 10.0 * syncs
    assert 1 <= syncs <= 5, "four batches at most, and the end"
    limit.close()


def test_z13_fio_counts_the_sync_behind_it(
    tmp_path: Path, slab: CpuSlab, monkeypatch: pytest.MonkeyPatch
) -> None:
    fio = tmp_path / "fio"
    fio.write_text(
        "#!/bin/sh\n"
        """echo '{"jobs": [{"write": {"io_bytes": 1000000, "runtime": 1000}}]}'\n"""
    )
    fio.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(disk_limit, "_sync", lambda path: 3.0)
    limit = disk_limit.make_limit("fio", tmp_path / "limit", 2**18, MIB, slab)
    assert limit.write(MIB) == 1e6
    assert limit.write_durably(MIB, MIB) == 1e6 / 4


def test_z13_an_unknown_durability_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "tiers", "--durability", "never", "--out", str(tmp_path)]) == 2
    assert "--durability takes sync or async, not 'never'" in capsys.readouterr().err
