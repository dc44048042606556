# SPDX-License-Identifier: Apache-2.0
"""Pictures of earlier runs can be drawn again from their JSON."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from stratakv.benchmarks.harness.plots import DPI, WIDTH_INCHES
from stratakv.benchmarks.harness.report import Report
from stratakv.benchmarks.redraw import draw, main

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
DRAWN = sorted(path.stem for path in RESULTS.glob("*.json") if path.with_suffix(".png").exists())
MOST_BYTES = 120_000


def width_of(png: bytes) -> int:
    width: int = struct.unpack(">I", png[16:20])[0]
    return width


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.slow
def test_an_earlier_run_is_drawn_again(name: str, tmp_path: Path) -> None:
    report = Report.read(RESULTS / f"{name}.json")
    [path] = draw(report, tmp_path / "picture.png")
    for png in (path.read_bytes(), (RESULTS / f"{name}.png").read_bytes()):
        assert png.startswith(b"\x89PNG") and len(png) < MOST_BYTES
        assert width_of(png) == DPI * WIDTH_INCHES


@pytest.mark.parametrize("name", ["2026-11-21-offload-costs-cpu-2-cores"])
def test_only_existing_pictures_where_asked(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_bytes((RESULTS / f"{name}.json").read_bytes())
    main([str(file), "--existing"])
    assert not file.with_suffix(".png").exists()
    main([str(file)])
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_gpu_run_has_a_picture_for_each_section(tmp_path: Path) -> None:
    rows = [
        {"case": f"pinned_{direction}_gb_per_second", "piece_bytes": 2**21, "value": 25.0}
        for direction in ("to_host", "to_device")
    ]
    report = Report("gpu", "stratakv bench gpu", environment={"date": "2026-11-23"})
    report.figures = {"ceilings": {"rows": rows}}
    path = report.write(tmp_path)
    assert json.loads(path.read_text())["name"] == "gpu"
    assert draw(Report.read(path), tmp_path / "gpu.png") == [tmp_path / "gpu-ceilings.png"]
