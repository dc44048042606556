# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench service`: its quick form over little memory, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stratakv.benchmarks.harness.comparison import WrongWork
from stratakv.benchmarks.harness.served import OPENSSL, find_redis
from stratakv.benchmarks.service import command
from stratakv.benchmarks.service.clients import Clients, cpu_seconds
from stratakv.benchmarks.service.command import (
    CASES,
    FOUR,
    GATES,
    LOOK_UP_KEYS,
    QUICK,
    SIZES,
    look_up_name,
    row_name,
)
from stratakv.benchmarks.service.transports import Plan
from stratakv.benchmarks.tiers.scale import MIB
from stratakv.engine.cli.main import main

LOOK_UPS = [look_up_name(keys) for keys in LOOK_UP_KEYS]


LITTLE = replace(QUICK, copied_bytes=8 * MIB, sent_bytes=8 * MIB, look_ups=5)


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are not looked at."""
    monkeypatch.setattr(command, "footprint_bytes", lambda _least: 8 * MIB)
    monkeypatch.setattr(command, "QUICK", LITTLE)


def check_report(folder: Path, names: list[str]) -> None:
    written = json.loads((folder / "service.json").read_text())
    assert list(written["ratios"]) == [*names, *LOOK_UPS]
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in written["ratios"].values())
    assert list(written["figures"]["contests"]) == names
    for name, comparison in written["figures"]["contests"].items():
        assert len(comparison["rounds"]) == len(comparison["limit_rounds"]) >= 2
        assert comparison["cpu_seconds_per_gb"] > 0 and comparison["limit_cpu_seconds_per_gb"] > 0
        assert written["limits"][f"{name}_limit"] == comparison["limit_median"] > 0
    assert len(written["figures"]["plan"]["load_average_after"]) == 3
    assert (folder / "service.png").read_bytes().startswith(b"\x89PNG")


def test_two_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SIZES", {"2MiB": SIZES["2MiB"]})
    options = ["--quick", "--out", str(tmp_path), "--clients", "2"]
    assert main(["bench", "service", *options, "--cases", "data_load,shm_batch"]) == 0
    names = [row_name(case, "2MiB", 2) for case in ("shm_batch", "data_load")]
    check_report(tmp_path, names)
    assert "data_load_2MiB_2" in capsys.readouterr().out


@pytest.mark.slow
def test_the_quick_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--out", str(tmp_path), "--redis-server", "no-such-redis"]
    assert main(["bench", "service", *options]) == 0
    transports = {"shm", "tier", "data", "grpc"} | ({"tls"} if shutil.which(OPENSSL) else set())
    skipped = json.loads((tmp_path / "service.json").read_text())["figures"]["skipped"]
    transports |= {"mooncake"} - skipped.keys()
    cases = [case for case in CASES if case.transport in transports]
    assert skipped["redis"] == "no-such-redis is not installed"
    names = [row_name(case.name, size, 1) for size in SIZES for case in cases]
    written = json.loads((tmp_path / "service.json").read_text())
    assert sorted(written["ratios"]) == sorted([*names, *LOOK_UPS])
    if OPENSSL not in skipped:
        of_four = {row_name(case.name, size, FOUR) for size in SIZES for case in CASES}
        assert GATES.keys() - of_four <= written["ratios"].keys()
        assert GATES.keys() & of_four
    assert "skipped: redis: no-such-redis is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--clients", "0"), "--clients takes numbers from 1 to 64"),
        (("--clients", "many"), "--clients takes numbers from 1 to 64"),
        (
            ("--cases", "data_lode"),
            "--cases takes names by commas, not 'data_lode'; did you mean data_load",
        ),
    ],
)
def test_what_is_refused(
    options: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "service", *options, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_client_that_fails_ends_the_run() -> None:
    clients = Clients(2, 4096, 8)
    try:
        with (
            pytest.raises(WrongWork, match="ConnectionRefusedError"),
            clients.transport("raw", [Plan("raw", {"port": 1})] * 2),
        ):
            raise AssertionError("it was opened")
    finally:
        clients.close()


def test_wrong_work_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_arguments: object) -> None:
        raise WrongWork("the server did not keep every block")

    monkeypatch.setattr(command.Measurement, "take", fail)
    assert main(["bench", "service", "--quick", "--out", str(tmp_path)]) == 1
    assert "bench service: the server did not keep every block" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_a_process_took_of_the_processor() -> None:
    before = cpu_seconds(os.getpid())
    assert sum(range(10**6)) > 0
    assert 0 < cpu_seconds(os.getpid()) - before < 60


def test_a_redis_that_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "redis"
    assert find_redis(str(binary)) == ("", f"{binary} is not installed")
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o700)
    assert find_redis(str(binary)) == (str(binary), "")
