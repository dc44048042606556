# SPDX-License-Identifier: Apache-2.0
"""The section of prefill: rehearsed whole, its cases, and results that are wrong."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import geometric_mean

import pytest

from stratakv.benchmarks.gpu.attention import cases as attention_cases
from stratakv.benchmarks.gpu.attention import prefill
from stratakv.benchmarks.gpu.section import WrongResult

from .attention_runs import empty_results, on_a_device, one_wrong_row, refuse_timing, rehearsal


def test_a_rehearsal(tmp_path: Path) -> None:
    results = empty_results(tmp_path)
    assert prefill.SECTION.plot(results, tmp_path) is None
    prefill.run(rehearsal(), results)
    rows = results.rows("prefill")
    assert [row["case"] for row in rows] == [*prefill.GRID, "mixed", "fp8"]
    for row in rows:
        assert 0 < row["seconds_p10"] <= row["seconds"] <= row["seconds_p90"] < math.inf
        assert row["tflops"] == pytest.approx(row["flops"] / row["seconds"] / 1e12)
        assert row["over_matmul"] == pytest.approx(row["tflops"] / 0.5)
    expected = geometric_mean([row["tflops"] for row in rows[:6]])
    assert results.report.ratios == pytest.approx({"prefill_tflops": expected})
    assert {target.name for target in prefill.SECTION.targets} == set(results.report.ratios)
    path = prefill.SECTION.plot(results, tmp_path / "plots")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")
    results.write()


def test_the_cases_on_a_device() -> None:
    full = prefill.choose_cases(on_a_device(is_quick=False))
    assert [case.name for case in full][:6] == list(prefill.GRID) == [
        "2k + 0k", "2k + 8k", "2k + 32k", "8k + 0k", "8k + 8k", "8k + 32k"
    ]  # fmt: skip
    assert len({case.name for case in full}) == len(full)
    assert full[5].chunks == ((8192, 32768),)
    # Half a square without a context; the diagonal counts.
    assert full[0].flops == 4 * 32 * 128 * (2048 * 2049 // 2)
    assert {case.group for case in full} == {4, 8}
    assert {case.scales for case in full} == {"", "head"}
    assert {len(case.chunks) for case in full} == {1, 4, len(prefill.MIXED)}
    assert not any(case.is_decode for case in full)


@pytest.mark.gpu
def test_on_a_device(tmp_path: Path) -> None:
    results = empty_results(tmp_path)
    case = attention_cases.Case(name="a", chunks=((300, 200), (1, 70)))
    prefill.measure(on_a_device(is_quick=True), results, case)
    (row,) = results.rows("prefill")
    assert 0 < row["seconds"] < 1e-2


def test_a_wrong_result_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = one_wrong_row(attention_cases.paged_prefill)
    monkeypatch.setattr(attention_cases, "paged_prefill", wrong)
    refuse_timing(monkeypatch, attention_cases)
    results = empty_results(tmp_path)
    with pytest.raises(WrongResult, match="2k"):
        prefill.run(rehearsal(), results)
    assert not results.rows("prefill") and not results.report.ratios
