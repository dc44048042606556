# SPDX-License-Identifier: Apache-2.0
"""The section of KV writes: rehearsed whole, its bytes, and writes that are wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stratakv.benchmarks.gpu.attention import writes
from stratakv.benchmarks.gpu.attention.writes import Case
from stratakv.benchmarks.gpu.section import WrongResult

from .attention_runs import empty_results, on_a_device, refuse_timing, rehearsal


def test_a_rehearsal(tmp_path: Path) -> None:
    results = empty_results(tmp_path)
    assert writes.SECTION.plot(results, tmp_path) is None
    writes.run(rehearsal(), results)
    rows = results.rows("writes")
    assert len(rows) == 12
    assert {row["pool"] for row in rows} == {"bfloat16", "fp8, head scales", "fp8, token scales"}
    for row in rows:
        assert 0 < row["seconds_p10"] <= row["seconds"] <= row["seconds_p90"] < math.inf
        assert row["gb_per_second"] == pytest.approx(row["floor_bytes"] / row["seconds"] / 1e9)
        assert row["over_device_copy"] == pytest.approx(row["gb_per_second"] / 100.0)
    (wanted,) = (row for row in rows if row["case"] == "16 random")
    assert results.report.ratios == {"write_over_byte_floor": wanted["over_device_copy"]}
    assert {target.name for target in writes.SECTION.targets} == set(results.report.ratios)
    path = writes.SECTION.plot(results, tmp_path / "plots")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")
    results.write()


def test_the_sizes_on_a_device() -> None:
    full = writes.choose_cases(on_a_device(is_quick=False))
    assert {case.tokens for case in full} == {1, 64, 512, 8192} and len(full) == 24
    assert "8192 random" in {case.name for case in writes.choose_cases(on_a_device(is_quick=True))}


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        # 2 * 8 * 128 values, read with two bytes; one slot; then written.
        ("", 4096 + 8 + 4096),
        ("head", 4096 + 8 + 2048),
        ("token", 4096 + 8 + 2048 + 2 * 8 * 4),
    ],
)
def test_the_floor_of_the_bytes(scales: str, expected: int) -> None:
    assert Case(tokens=1, order="random", scales=scales).floor_bytes == expected


def test_slots_are_scattered_and_none_is_given_twice() -> None:
    place = rehearsal()
    buffers = writes.make_buffers(place, Case(tokens=64, order="random", kv_heads=1, head_dim=16))
    slots = buffers[0].slots.tolist()
    assert len(set(slots)) == 64 and slots != sorted(slots)
    assert min(slots) >= 0 and max(slots) < 128
    assert buffers[0].k.stride(0) > buffers[0].k.shape[1] * 16  # a slice of qkv
    assert not torch.equal(buffers[0].slots, buffers[1].slots)


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["", "head", "token"])
def test_on_a_device(scales: str, tmp_path: Path) -> None:
    results = empty_results(tmp_path)
    case = Case(tokens=100, order="random", scales=scales)
    writes.measure(on_a_device(is_quick=True), results, case)
    (row,) = results.rows("writes")
    assert 0 < row["seconds"] < 1e-3


def write_too_little(*arguments: Any, **options: Any) -> None:
    k, v, kv, slots = arguments
    writes_kv(k[:-1], v[:-1], kv, slots[:-1], **options)


def write_elsewhere_too(*arguments: Any, **options: Any) -> None:
    k, v, kv, slots = arguments
    writes_kv(k, v, kv, slots, **options)
    unused = next(slot for slot in range(32) if slot not in slots.tolist())
    writes_kv(k[:1], v[:1], kv, slots.new_tensor([unused]), **options)


writes_kv = writes.write_kv


@pytest.mark.parametrize("wrong", [write_too_little, write_elsewhere_too])
@pytest.mark.parametrize("scales", ["", "head", "token"])
def test_a_wrong_write_is_not_timed(
    wrong: Any, scales: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tokens=16, order="random", scales=scales, heads=4, kv_heads=2, head_dim=16)
    monkeypatch.setattr(writes, "choose_cases", lambda place: [case])
    monkeypatch.setattr(writes, "write_kv", wrong)
    refuse_timing(monkeypatch, writes)
    results = empty_results(tmp_path)
    with pytest.raises(WrongResult, match="16 random"):
        writes.run(rehearsal(), results)
    assert not results.rows("writes") and not results.report.ratios
