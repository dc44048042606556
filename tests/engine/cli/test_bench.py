# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench NAME` hands the rest of the line to the benchmark of that name."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path

import pytest

from stratakv.engine.cli import bench
from stratakv.engine.cli.main import main

MODULE = "stratakv_test_benchmark"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """What a benchmark named `probe` was called with; it exits with 3."""
    calls: list[argparse.Namespace] = []

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=1)

    def run(args: argparse.Namespace) -> int:
        calls.append(args)
        return 3

    module = types.ModuleType(MODULE, "Measures nothing.")
    module.add_arguments, module.run = add_arguments, run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setitem(bench.BENCHMARKS, "probe", MODULE)
    return calls


def test_its_options_and_its_exit_code(
    seen: list[argparse.Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "probe", "--quick", "--out", "somewhere", "--rounds", "4"]) == 3
    [args] = seen
    assert (args.quick, args.out, args.rounds) == (True, Path("somewhere"), 4)
    assert main(["bench", "probe"]) == 3
    assert (seen[1].quick, seen[1].out) == (False, Path("build/bench/probe"))
    assert (tmp_path / "somewhere").is_dir(), "made before the benchmark runs"


def test_an_unknown_option(
    seen: list[argparse.Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "probe", "--qick"]) == 2
    assert "no option --qick; did you mean --quick" in capsys.readouterr().err
    assert main(["bench", "probe", "--rounds", "many"]) == 2
    assert "--rounds: invalid int value: 'many'" in capsys.readouterr().err
    assert not seen
