# SPDX-License-Identifier: Apache-2.0
"""Pictures of earlier runs are drawn again from their JSON: which, and where.

`tests/regressions/test_bench_findings.py` draws every one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stratakv.benchmarks.harness.report import Report
from stratakv.benchmarks.redraw import draw, main

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


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
