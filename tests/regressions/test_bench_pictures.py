# SPDX-License-Identifier: Apache-2.0
"""Findings about the pictures of benchmarks (U2), mended."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from stratakv.benchmarks.harness.plots import DPI, WIDTH_INCHES
from stratakv.benchmarks.harness.report import Report
from stratakv.benchmarks.offload import command as offload
from stratakv.benchmarks.redraw import draw

pytestmark = pytest.mark.regression

ROOT = Path(__file__).parents[2]
MOST_BYTES = 120_000  # of a picture
RESULTS = ROOT / "benchmarks" / "results"
OFFLOAD = RESULTS / "2026-11-21-offload-cpu-2-cores.json"


def test_u02_whiskers_reach_only_where_something_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy
    from matplotlib.axes import Axes

    drawn: list[Any] = []
    plain = Axes.errorbar

    def errorbar(self: Axes, x: Any, y: Any, xerr: Any = None, **options: Any) -> Any:
        drawn.append((list(x), numpy.broadcast_to(numpy.asarray(xerr), (2, len(x)))))
        return plain(self, x, y, xerr=xerr, **options)

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    report = Report.read(OFFLOAD)
    offload.show(report, tmp_path / "offload.json")
    ((medians, (below, above)),) = drawn
    phases = report.figures["phases"].values()
    assert list(below) == [0.0] * len(medians), "nothing below the median was measured"
    highs = [1e3 * phase["ttft_p99_seconds"] for phase in phases]
    assert [m + a for m, a in zip(medians, above, strict=True)] == pytest.approx(highs)


def drawn_results() -> list[Path]:
    return sorted(path for path in RESULTS.glob("*.json") if path.with_suffix(".png").exists())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The oldest and the newest report of each benchmark are drawn; the long run draws all."""
    if "result" in metafunc.fixturenames:
        results = drawn_results()
        if metafunc.config.getoption("--scale") == "ci":
            named = [(Report.read(path).name, path) for path in results]
            results = sorted({*dict(named).values(), *dict(reversed(named)).values()})
        metafunc.parametrize("result", results, ids=[path.stem for path in results])


def test_u02_every_picture_names_machine_date_and_version(
    result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    said: list[str] = []
    plain = Figure.savefig

    def savefig(self: Figure, *words: Any, **options: Any) -> None:
        said.extend(text.get_text() for text in self.findobj(Text))
        plain(self, *words, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    report = Report.read(result)
    draw(report, tmp_path / "picture.png")
    machine = report.environment
    version = machine.get("version", "")  # reports of before 2026-11-22 have none
    build = " ".join(filter(None, ("StrataKV", version, f"({machine['commit']})")))
    foot = [text for text in said if build in text]
    assert len(foot) == 1
    for part in (machine["cpu"], f"{machine['cores']} cores", machine["date"]):
        assert part in foot[0]
    check_picture(tmp_path / "picture.png")


def test_u02_pictures_of_results_are_as_wide_and_small() -> None:
    results = drawn_results()
    assert len(results) >= 20
    for result in results:
        check_picture(result.with_suffix(".png"))


def check_picture(path: Path) -> None:
    png = path.read_bytes()
    assert png.startswith(b"\x89PNG") and 10_000 < len(png) < MOST_BYTES, path
    assert struct.unpack(">I", png[16:20])[0] == DPI * WIDTH_INCHES, path
