# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench tiers`: the whole of it in its quick form, and what it refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from stratakv.benchmarks.harness.comparison import WrongWork
from stratakv.benchmarks.tiers import command
from stratakv.benchmarks.tiers.command import GATES, file_system_of, working_folder
from stratakv.benchmarks.tiers.scale import MIB, QUICK, SIZES
from stratakv.engine.cli.main import main
from stratakv.tiers.settings.values import ConfigError

IN_MEMORY = Path("/dev/shm")
LITTLE = replace(QUICK, round_bytes=16 * MIB, index_entries=5_000)


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are not looked at."""
    monkeypatch.setattr(command, "footprint_bytes", lambda _least: 32 * MIB)
    monkeypatch.setattr(command, "QUICK", LITTLE)


@pytest.mark.slow
def test_the_quick_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    options = ["--quick", "--out", str(tmp_path), "--path", str(disk), "--limit", "loop"]
    assert main(["bench", "tiers", *options]) == 0
    written = json.loads((tmp_path / "tiers.json").read_text())
    assert list(written["ratios"]) == list(GATES)
    assert all(math.isfinite(ratio) for ratio in written["ratios"].values())
    for name, comparison in written["figures"]["contests"].items():
        assert comparison["median"] > 0 and comparison["limit_median"] > 0
        assert len(comparison["rounds"]) == len(comparison["limit_rounds"]) >= 2
        if name.startswith("ssd"):
            assert comparison["limit"].startswith("loop")
        assert written["limits"][f"{name}_limit"] == comparison["limit_median"]
    plan = written["figures"]["plan"]
    assert (plan["disk_limit"], plan["huge_pages"]) == ("loop", False)
    assert written["figures"]["first_writes"].keys() == SIZES.keys()
    assert (tmp_path / "tiers.png").read_bytes().startswith(b"\x89PNG")
    assert list(disk.iterdir()) == []
    assert "reopen over sequential read" in capsys.readouterr().out


@pytest.mark.slow
def test_one_section(tmp_path: Path) -> None:
    options = ["--quick", "--out", str(tmp_path), "--path", str(tmp_path / "disk")]
    assert main(["bench", "tiers", *options, "--sections", "index"]) == 0
    written = json.loads((tmp_path / "tiers.json").read_text())
    assert list(written["ratios"]) == [command.LOOK_UPS, command.BYTES_PER_ENTRY, command.REOPEN]
    assert written["command"].endswith("--sections index")


def test_an_unknown_section_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tiers", "--sections", "sdd", "--out", str(tmp_path)]) == 2
    assert "--sections takes names by commas, not 'sdd'" in capsys.readouterr().err


def test_a_path_in_memory_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if file_system_of(IN_MEMORY) != "tmpfs":
        pytest.skip(f"{IN_MEMORY} is no tmpfs here")
    path = IN_MEMORY / f"stratakv-{tmp_path.name}"
    try:
        assert main(["bench", "tiers", "--path", str(path), "--out", str(tmp_path)]) == 2
    finally:
        path.rmdir()
    assert "is memory and says nothing of a disk" in capsys.readouterr().err


def test_a_path_without_room_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="make room or choose another folder"),
        working_folder(tmp_path, 2**60),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.touch()
    assert main(["bench", "tiers", "--path", str(path), "--out", str(tmp_path)]) == 2
    assert f"--path {path} cannot be written to" in capsys.readouterr().err


def test_an_unknown_limit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tiers", "--limit", "dd", "--out", str(tmp_path)]) == 2
    assert "--limit takes fio or loop, not 'dd'" in capsys.readouterr().err


def test_huge_pages_that_are_not_there_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1 kB\nHugePages_Free:       7\n")
    monkeypatch.setattr(command.check_huge_pages, "__defaults__", (meminfo,))
    assert main(["bench", "tiers", "--huge-pages", "--out", str(tmp_path)]) == 2
    assert "takes 70 free pages of the host's pool, which has 7" in capsys.readouterr().err
    command.check_huge_pages(7 * 2**21)


def test_the_kind_of_a_file_system(tmp_path: Path) -> None:
    assert file_system_of(Path("/proc")) == "proc"
    assert file_system_of(tmp_path, tmp_path / "nothing") is None
    mounts = tmp_path / "mounts"
    mounts.write_text("22 1 0:999 / /elsewhere rw - tmpfs tmpfs rw\n")
    assert file_system_of(tmp_path, mounts) is None


def test_work_that_went_wrong_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_arguments: object) -> None:
        raise WrongWork("the store did not keep a new block")

    monkeypatch.setattr(command, "measure", fail)
    disk = tmp_path / "disk"
    assert main(["bench", "tiers", "--quick", "--path", str(disk), "--out", str(tmp_path)]) == 1
    assert "did not keep a new block" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["disk"]
