# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench transfer`: the whole of it over little memory, and what it must not report."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from stratakv.benchmarks.tiers.scale import MIB
from stratakv.benchmarks.transfer import command, layer_ranges
from stratakv.benchmarks.transfer.copy_case import GATES
from stratakv.benchmarks.transfer.layer_ranges import RANGES, cell_name
from stratakv.connector.device import cpu
from stratakv.engine.cli.main import main

pytestmark = pytest.mark.usefixtures("one_thread")
SUFFIXES = (32, 64)


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are not looked at."""
    monkeypatch.setattr(command, "footprint_bytes", lambda _least: 20 * MIB)
    monkeypatch.setattr(layer_ranges, "CACHED", {"1k": 256})
    monkeypatch.setattr(layer_ranges, "SUFFIXES", SUFFIXES)


def test_the_quick_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--quick", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "transfer.json").read_text())
    cells = written["figures"]["layer_ranges"]
    assert list(written["ratios"]) == [*GATES, *cells]
    assert list(cells) == [
        cell_name("1k", suffix, ranges) for suffix in SUFFIXES for ranges in RANGES
    ]
    for cell in cells.values():
        assert 1.0 <= cell["most_to_win"] <= 2.0
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in written["ratios"].values())
    for name, comparison in written["figures"]["contests"].items():
        assert len(comparison["rounds"]) == len(comparison["limit_rounds"]) >= 3
        assert written["limits"][f"{name}_limit"] == comparison["limit_median"] > 0
    assert written["figures"]["plan"]["region_bytes"] == 20 * MIB
    assert (tmp_path / "transfer.png").read_bytes().startswith(b"\x89PNG")
    assert "submit over copy 64KiB" in " ".join(capsys.readouterr().out.split())


def test_copies_that_do_nothing_end_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_copy_runs", lambda *_args: None)
    assert main(["bench", "transfer", "--quick", "--out", str(tmp_path)]) == 1
    assert "bench transfer: block" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
