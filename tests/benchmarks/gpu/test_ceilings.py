# SPDX-License-Identifier: Apache-2.0
"""The ceilings: a rehearsal, figures from given seconds, and copies that are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from stratakv.benchmarks.gpu import ceilings
from stratakv.benchmarks.gpu.copies import methods as copy_methods
from stratakv.benchmarks.gpu.copies.methods import Lanes, page_locked, time_both_ways
from stratakv.benchmarks.gpu.section import Timing, WrongResult
from stratakv.kernels.copy import copy_engine

from .copy_rehearsal import forbid_timing, is_plot, no_results, rehearsal, rehearse

SIZE = 16 << 10  # of a rehearsal
NAMES = {
    "device_copy_gb_per_second",
    "pinned_to_device_gb_per_second",
    "pinned_to_host_gb_per_second",
    "pinned_both_gb_per_second",
    "matmul_bf16_tflops",
}


@pytest.mark.parametrize("quick", [True, False])
def test_a_rehearsal(tmp_path: Path, quick: bool) -> None:
    results = rehearse(ceilings.SECTION, tmp_path, quick)
    rows = results.rows("ceilings")
    assert {row["case"] for row in rows} == set(results.ceilings) == NAMES
    assert sorted({row["piece_bytes"] for row in rows if "piece_bytes" in row}) == [4096, SIZE]
    for name, value in results.ceilings.items():
        assert value == max(row["value"] for row in rows if row["case"] == name) > 0
    path = ceilings.SECTION.plot(results, tmp_path)
    assert is_plot(path) and path == tmp_path / "gpu-ceilings.png"


def test_nothing_measured_is_no_plot(tmp_path: Path) -> None:
    assert ceilings.SECTION.plot(no_results(), tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_figures_from_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def time_launches(place: object, launches: Sequence[object], **_: object) -> Timing:
        return Timing(0.5, 0.5, 0.5, 1)

    for module in (ceilings, copy_methods):
        monkeypatch.setattr(module, "time_launches", time_launches)
    results = rehearse(ceilings.SECTION, tmp_path)
    assert results.ceilings == pytest.approx(
        {
            "device_copy_gb_per_second": 2 * SIZE / 0.5e9,  # read and written
            "pinned_to_host_gb_per_second": SIZE / 0.5e9,
            "pinned_to_device_gb_per_second": SIZE / 0.5e9,
            # One pair between a beginning and an end, which take their share of the time.
            "pinned_both_gb_per_second": 2 * SIZE / 1.5e9,
            "matmul_bf16_tflops": 2 * 64**3 / 0.5e12,
        }
    )


def test_seconds_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def time_launches(place: object, launches: Sequence[object], **_: object) -> Timing:
        assert len(launches) == 6
        for launch in launches:
            launch()  # type: ignore[operator]
        return Timing(2.0, 2.0, 2.0, 1)

    monkeypatch.setattr(copy_methods, "time_launches", time_launches)
    out = [lambda number=number: called.append(f"out {number}") for number in range(4)]
    back = [lambda number=number: called.append(f"back {number}") for number in range(4)]
    assert time_both_ways(rehearsal(), Lanes(None, None), out, back) == 2.0 * 6 / 4
    assert called == [f"{way} {number}" for number in range(4) for way in ("out", "back")]


def test_a_copy_that_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forbid_timing(monkeypatch, ceilings, copy_methods)
    monkeypatch.setattr(ceilings, "_copy_pieces", lambda pair, piece: lambda: None)
    with pytest.raises(WrongResult, match="a copy on the device: the bytes"):
        rehearse(ceilings.SECTION, tmp_path)
    with pytest.raises(WrongResult, match="a copy to the host: the bytes"):
        ceilings.measure_pinned(rehearsal(), no_results())


def test_a_copy_that_forgets_its_last_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pieces before have left may not pass for its result."""
    real = ceilings._copy_pieces
    seen = []

    def forgetful(pair: ceilings.Pair, piece: int) -> object:
        seen.append(piece)
        if len(seen) <= 2:
            return real(pair, piece)
        return real((pair[0][:-piece], pair[1][:-piece]), piece)

    monkeypatch.setattr(ceilings, "_copy_pieces", forgetful)
    with pytest.raises(WrongResult, match="a copy to the host"):
        ceilings.measure_pinned(rehearsal(), no_results())
    assert len(seen) == 4


def test_a_product_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_timing(monkeypatch, ceilings)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: out.copy_(a))
    with pytest.raises(WrongResult, match="a matrix product"):
        ceilings.measure_matmul(rehearsal(), no_results())


def test_want_of_memory_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def want(place: object, results: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ceilings, "measure_matmul", want)
    results = rehearse(ceilings.SECTION, tmp_path)
    assert set(results.ceilings) == NAMES - {"matmul_bf16_tflops"}
    notes = results.report.figures["ceilings"]["notes"]
    assert len(notes) == 1 and "not enough memory" in notes[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_memory_that_cannot_be_mapped_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device the runtime refuses; torch's memory, here without its lock, steps in."""
    real, notes = torch.zeros, []

    def zeros(*sizes: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return real(*sizes, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", zeros)
    place = rehearsal()
    place.is_rehearsal = False
    with page_locked(place, 4096, notes.append) as memory:
        assert memory.shape == (4096,) and memory.dtype == torch.uint8
    assert len(notes) == 1 and "batched copies need a CUDA device" in notes[0]
    assert copy_engine.cuda_runtime.cache_info().currsize == 0, "a refusal is not kept"
