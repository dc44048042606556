# SPDX-License-Identifier: Apache-2.0
"""The section of prefill by a library: rehearsed, with ratios over ours, and what is left out."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

import pytest

from stratakv.benchmarks.gpu.attention import cases as attention_cases
from stratakv.benchmarks.gpu.attention import prefill_library
from stratakv.benchmarks.gpu.section import Results, WrongResult
from stratakv.kernels.attention.gathered_prefill import GatheredPrefill

from .attention_runs import empty_results, one_wrong_row, refuse_timing, rehearsal

NAME = "prefill-library"


def notes(results: Results) -> list[str]:
    return list(results.report.figures[NAME]["notes"])


def test_a_rehearsal(tmp_path: Path) -> None:
    results = empty_results(tmp_path)
    prefill_library.SECTION.run(rehearsal(), results)
    rows = results.rows(NAME)
    assert [row["case"] for row in rows] == ["2k + 8k", "8k + 32k", "8k + 8k"]
    assert all(row["peers"].keys() == {"sdpa"} for row in rows), notes(results)
    gain = geometric_mean([row["seconds"] / row["peers"]["sdpa"] for row in rows])
    assert results.report.ratios == pytest.approx({"prefill_sdpa_over_triton": gain})
    missing, remark = notes(results)
    assert missing.startswith("fa3: not measured, ModuleNotFoundError")
    assert "fa3_fwd_interface" in missing and remark.startswith("sdpa: K and V gathered")
    path = prefill_library.SECTION.plot(results, tmp_path / "plots")
    assert path is not None and path.name == "gpu-prefill-library.png"


def test_a_library_that_breaks_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(GatheredPrefill, "run", fail)
    results = empty_results(tmp_path)
    prefill_library.SECTION.run(rehearsal(), results)
    assert all(row["seconds"] > 0 and not row["peers"] for row in results.rows(NAME))
    assert not results.report.ratios
    assert sum("RuntimeError: no kernel image" in note for note in notes(results)) == 3


def test_a_wrong_library_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatheredPrefill, "run", one_wrong_row(GatheredPrefill.run))
    results = empty_results(tmp_path)
    prefill_library.SECTION.run(rehearsal(), results)
    assert sum("sdpa, " in note and "WrongResult" in note for note in notes(results)) == 3
    assert not results.report.ratios


def test_ours_must_be_right_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = one_wrong_row(attention_cases.paged_prefill)
    monkeypatch.setattr(attention_cases, "paged_prefill", wrong)
    refuse_timing(monkeypatch, attention_cases)
    with pytest.raises(WrongResult):
        prefill_library.SECTION.run(rehearsal(), empty_results(tmp_path))
