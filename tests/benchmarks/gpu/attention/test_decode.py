# SPDX-License-Identifier: Apache-2.0
"""The section of decode: rehearsed whole, its bytes and ratios, and results that are wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stratakv.benchmarks.gpu.attention import cases as attention_cases
from stratakv.benchmarks.gpu.attention import decode, launch_sweep
from stratakv.benchmarks.gpu.attention.cases import (
    Case,
    check_attention,
    decode_case,
    make_batch,
    num_layers,
)
from stratakv.benchmarks.gpu.section import SectionOver, WrongResult, run_cases
from stratakv.kernels.attention import paged_decode_launch, paged_prefill_launch

from .attention_runs import empty_results, on_a_device, one_wrong_row, refuse_timing, rehearsal

TINY: dict[str, Any] = {"kv_heads": 2, "head_dim": 16, "block_size": 8}


def test_a_rehearsal(tmp_path: Path) -> None:
    results = empty_results(tmp_path)
    assert decode.SECTION.plot(results, tmp_path) is None
    decode.run(rehearsal(), results)
    rows = results.rows("decode")
    assert [row["case"] for row in rows] == [c.name for c in decode.choose_cases(rehearsal())]
    for row in rows:
        assert 0 < row["seconds_p10"] <= row["seconds"] <= row["seconds_p90"] < math.inf
        assert row["gb_per_second"] == pytest.approx(row["read_bytes"] / row["seconds"] / 1e9)
    assert {row["pool"] for row in rows} == {"as q", "fp8, head scales", "fp8, token scales"}
    assert {target.name for target in decode.SECTION.targets} <= set(results.report.ratios)
    path = decode.SECTION.plot(results, tmp_path / "plots")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")
    results.write()


def test_the_cases_on_a_device() -> None:
    full = decode.choose_cases(on_a_device(is_quick=False))
    quick = decode.choose_cases(on_a_device(is_quick=True))
    assert len({case.name for case in full}) == len(full) > len(quick)
    assert all(case.is_decode for case in full)
    assert {case.group for case in full} == {1, 4, 7, 8}
    assert {case.block_size for case in full} == {16, 32, 64}
    assert {case.scales for case in full} == {"", "head", "token"}
    assert {case.head_dim for case in full} == {64, 128}
    for cases in (full, quick):
        large = [c for c in cases if c.name in decode.LARGE]
        assert len(large) == 3
        assert all(c.read_bytes >= decode.LARGE_BYTES for c in large)


def test_bytes_and_operations_by_hand() -> None:
    assert decode_case("a", 64, 1024).read_bytes == 64 * 1024 * 2 * 8 * 128 * 2
    assert decode_case("a", 64, 1024, scales="head").read_bytes == 64 * 1024 * 2 * 8 * 128
    assert decode_case("a", 2, 1024, window=100).read_bytes == 2 * 100 * 4096
    # The first of two new tokens reaches 99 tokens back.
    assert Case(name="a", chunks=((2, 900),), window=100).read_bytes == 101 * 4096
    # Two tokens behind three see four and five keys.
    assert Case(name="a", chunks=((2, 3),)).flops == 4 * 32 * 128 * 9
    assert Case(name="a", chunks=((2, 3), (1, 0)), window=4).keys_seen == 4 + 4 + 1


def test_layers_are_cold_together() -> None:
    place = on_a_device(is_quick=False)
    assert num_layers(place, 2**22) == 64
    assert num_layers(place, 2**26) == 4
    assert num_layers(place, 2**26 + 1) == 4
    assert num_layers(place, 2**31) == 1
    assert num_layers(place, 1000) == attention_cases.MAX_LAYERS


@pytest.mark.parametrize("scales", ["", "head", "token"])
def test_a_batch(scales: str) -> None:
    case = Case(name="ragged", chunks=((1, 70), (3, 0), (2, 30)), scales=scales, **TINY)
    batch, again = (make_batch(rehearsal(), case) for _ in range(2))
    used = [int(b) for row, n in zip(batch.block_tables, (9, 1, 4), strict=True) for b in row[:n]]
    assert sorted(used) == list(range(14)) and used != sorted(used)
    assert batch.seq_lens.tolist() == [71, 3, 32] and batch.query_starts.tolist() == [0, 1, 4, 6]
    assert batch.layers[0].shape == (14, 2, 8, 2, 16)
    assert batch.layers[0].stride(0) == 2 * 2 * 8 * 2 * 16  # a block holds both layers
    for one, other in zip(batch.layers, again.layers, strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    values = batch.layers[1].float()
    if scales == "head":
        values = values * batch.scales[1][None, :, None, :, None]
    elif scales == "token":
        values = values * batch.scales[1][..., None]
    assert 0.8 < float(values.std()) < 1.2


def test_rows_are_compared_in_units_of_their_own() -> None:
    right = torch.randn(4, 2, 64)
    right[3] *= 1e-3  # a long context
    check_attention("a", right.to(torch.bfloat16), right)
    for row in range(4):
        wrong = right.clone()
        wrong[row, 1] *= 1.1
        with pytest.raises(WrongResult):
            check_attention("a", wrong, right)
    with pytest.raises(WrongResult, match="expected"):
        check_attention("a", right[:3], right)
    with pytest.raises(WrongResult):
        check_attention("a", torch.full_like(right, math.nan), right)


def test_a_wrong_result_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = one_wrong_row(attention_cases.paged_decode)
    monkeypatch.setattr(attention_cases, "paged_decode", wrong)
    refuse_timing(monkeypatch, attention_cases)
    results = empty_results(tmp_path)
    with pytest.raises(WrongResult, match="1k x 1"):
        decode.run(rehearsal(), results)
    assert not results.rows("decode") and not results.report.ratios


def test_one_fault_leaves_the_other_cases(tmp_path: Path) -> None:
    seen: list[str] = []

    def measure(case: Case) -> None:
        if case.name == "large":
            raise torch.OutOfMemoryError("too much")
        if case.name == "broken":
            raise KeyError("no row in the table")
        seen.append(case.name)

    results = empty_results(tmp_path)
    cases = [decode_case(name, 1, 8) for name in ("large", "broken", "good")]
    with pytest.raises(RuntimeError, match="1 of 3 cases failed: broken"):
        run_cases(rehearsal(), results, "decode", cases, measure)
    assert seen == ["good"]
    assert results.report.figures["decode"]["notes"] == [
        "large: left out, the device has too little memory",
        "broken: failed: KeyError: 'no row in the table'",
    ]


def test_time_that_is_over_keeps_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, results = rehearsal(), empty_results(tmp_path)
    right = decode.measure

    def measure_and_be_late(*arguments: Any) -> None:
        right(*arguments)
        place.start_section(seconds=-1.0)

    monkeypatch.setattr(decode, "measure", measure_and_be_late)
    with pytest.raises(SectionOver):
        decode.run(place, results)
    assert len(results.rows("decode")) == 1
    assert set(results.report.ratios) == {"decode_1k_by_1_microseconds"}


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["", "head", "token"])
def test_on_a_device(scales: str, tmp_path: Path) -> None:
    results = empty_results(tmp_path)
    case = decode_case("a", 2, 1000, scales=scales)
    decode.measure(on_a_device(is_quick=True), results, case)
    (row,) = results.rows("decode")
    assert 0 < row["seconds"] < 1e-3 and row["layers"] > 1


def test_ratios_by_hand(tmp_path: Path) -> None:
    results = empty_results(tmp_path)
    for name, seconds, share in (
        ("1k x 1", 11e-6, 0.1),
        ("1k x 64", 2.0, 0.7),
        ("4k x 32", 4.0, 0.95),
        ("8k x 64", 16.0, 0.9),
        ("128k x 1", 5.0, None),
        ("8k x 64 fp8 head", 8.0, 0.9),
        ("8k x 64 fp8 token", 10.0, 0.8),
        ("4k x 32 fp8 head", 2.5, 0.8),
    ):
        row = {"case": name, "seconds": seconds, "over_device_copy": share}
        results.add_row("decode", row)
    decode.set_ratios(results)
    assert results.report.ratios == pytest.approx(
        {
            "decode_over_device_copy": 0.9,
            "decode_1k_by_64": 0.7,
            "decode_1k_by_1_microseconds": 11.0,
            "decode_fp8_head_scales_speedup": 1.6,
            "decode_fp8_token_scales_speedup": 1.6,
            "decode_fp8_speedup": 1.6,
        }
    )


def test_the_sweep_of_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = paged_prefill_launch
    tables = (paged_decode_launch.TABLE, prefill.WIDE, prefill.WIDE_FP8, prefill.NARROW)
    before = [dict(table) for table in tables]
    met: list[Any] = []
    right = attention_cases.paged_decode

    def watch(*arguments: Any, **options: Any) -> torch.Tensor:
        launch = paged_decode_launch.choose_launch(None, 4, 16, torch.bfloat16)
        met.append((launch.tile, launch.num_warps, launch.num_stages))
        return right(*arguments, **options)

    monkeypatch.setattr(attention_cases, "paged_decode", watch)
    results = empty_results(tmp_path)
    launch_sweep.run(rehearsal(), results)
    assert [dict(table) for table in tables] == before
    # What is chosen, and a row that stands in the table for a while.
    assert list(dict.fromkeys(met)) == [(64, 4, 3), (64, 4, 5)]
    rows = results.rows("launch-sweep")
    assert [row["swept"] for row in rows] == ["prefill table", "decode table"]
    for row in rows:
        assert row["best"] in row["tried"] and len(row["tried"]) >= 2
        assert 0 < row["best_over_chosen"] <= 1
        assert [trial["is_chosen"] for trial in row["tried"]].count(True) == 1
    assert launch_sweep.SECTION.plot(results, tmp_path) == tmp_path / "gpu-launch-sweep.png"
    results.write()


def test_a_launch_that_fails_is_no_fault_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention_cases.paged_decode

    def refuse_five_stages(*arguments: Any, **options: Any) -> torch.Tensor:
        if paged_decode_launch.choose_launch(None, 4, 16, torch.bfloat16).num_stages == 5:
            raise KeyError("too much shared memory")
        return right(*arguments, **options)

    monkeypatch.setattr(attention_cases, "paged_decode", refuse_five_stages)
    results = empty_results(tmp_path)
    launch_sweep.sweep_decode_rows(rehearsal(), results, decode_case("a", 2, 40, **TINY))
    (row,) = results.rows("launch-sweep")
    assert "KeyError" in row["tried"][1]["failed"]
    assert row["best"]["num_stages"] == 3


def test_a_quick_run_sweeps_nothing(tmp_path: Path) -> None:
    results = empty_results(tmp_path)
    launch_sweep.run(on_a_device(is_quick=True), results)
    assert results.report.figures["launch-sweep"] == {
        "rows": [],
        "notes": ["only in the full form"],
    }
    assert launch_sweep.SECTION.plot(results, tmp_path) is None
