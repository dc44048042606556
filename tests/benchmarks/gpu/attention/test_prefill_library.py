# SPDX-License-Identifier: Apache-2.0
"""The section of prefill by a library: rehearsed, with ratios over ours, and what is left out."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

import pytest

from stratakv.benchmarks.gpu.attention import cases as attention_cases
from stratakv.benchmarks.gpu.attention import prefill_library
from stratakv.benchmarks.gpu.section import WrongResult
from stratakv.kernels.attention.gathered_prefill import GatheredPrefill

from .attention_runs import empty_results, one_wrong_row, refuse_timing, rehearsal

GRID = ["2k + 8k", "8k + 32k", "8k + 8k"]


def test_a_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = empty_results(tmp_path)
    prefill_library.run(rehearsal(), results)
    rows = results.rows("prefill-library")
    assert [row["case"] for row in rows] == GRID
    for row in rows:
        assert row["sdpa"] == row["seconds"] / row["sdpa_seconds"] > 0
        assert "fa3" not in row
    gain = geometric_mean([row["sdpa"] for row in rows])
    assert results.report.ratios == pytest.approx({"prefill_sdpa_over_triton": gain})
    notes = results.report.figures["prefill-library"]["notes"]
    assert len(notes) == 3
    said = capsys.readouterr().out
    for name, note in zip(GRID, notes, strict=True):
        assert note.startswith(f"fa3, {name}: not measured, it runs on a CUDA device")
        assert note in said
    assert prefill_library.SECTION.plot(results, tmp_path) is None


def test_a_library_that_breaks_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(GatheredPrefill, "run", fail)
    results = empty_results(tmp_path)
    prefill_library.run(rehearsal(), results)
    assert all(row["seconds"] > 0 and "sdpa" not in row for row in results.rows("prefill-library"))
    assert not results.report.ratios
    notes = results.report.figures["prefill-library"]["notes"]
    assert sum("sdpa" in note and "RuntimeError: no kernel image" in note for note in notes) == 3


def test_a_wrong_library_ends_the_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatheredPrefill, "run", one_wrong_row(GatheredPrefill.run))
    refuse_timing(monkeypatch, prefill_library)
    with pytest.raises(WrongResult, match=r"sdpa, 2k \+ 8k"):
        prefill_library.run(rehearsal(), empty_results(tmp_path))


def test_ours_must_be_right_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = one_wrong_row(attention_cases.paged_prefill)
    monkeypatch.setattr(attention_cases, "paged_prefill", wrong)
    refuse_timing(monkeypatch, attention_cases)
    with pytest.raises(WrongResult):
        prefill_library.run(rehearsal(), empty_results(tmp_path))
