# SPDX-License-Identifier: Apache-2.0
"""Interference: a rehearsal, a pump whose events end on command, wrong results, the target."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest
import torch

from stratakv.benchmarks.gpu.attention import cases as attention_cases
from stratakv.benchmarks.gpu.copies import interference
from stratakv.benchmarks.gpu.copies import methods as copy_methods
from stratakv.benchmarks.gpu.copies.interference import (
    FIRST_STEPS,
    JOBS_AHEAD,
    STEPS_AHEAD,
    DecodeStep,
    Pump,
)
from stratakv.benchmarks.gpu.section import WrongResult

from ..copy_rehearsal import forbid_timing, is_plot, no_results, rehearsal, rehearse


@pytest.mark.parametrize("quick", [True, False])
def test_a_rehearsal(tmp_path: Path, quick: bool) -> None:
    results = rehearse(interference.SECTION, tmp_path, quick)
    rows = results.rows("interference")
    assert [row["case"] for row in rows] == ["batched", "kernel, 12 programs", "kernel, uncapped"]
    for row in rows:
        assert row["steps"] == 8
        assert 0 < row["p50_alone_seconds"] <= row["p99_alone_seconds"]
        assert row["p99_over_alone"] == pytest.approx(
            row["p99_beside_seconds"] / row["p99_alone_seconds"]
        )
        assert row["copies_gb_per_second"] == pytest.approx(
            row["to_host_gb_per_second"] + row["to_device_gb_per_second"]
        )
        assert row["to_host_gb_per_second"] > 0 < row["to_device_gb_per_second"]
        # 2 layers of 2 blocks, K and V of 16 tokens, 8 heads of 128 elements of 2 bytes
        assert row["kv_bytes"] == 2 * 2 * 2 * 16 * 8 * 128 * 2
    least, most = (pick(row["p99_over_alone"] for row in rows) for pick in (min, max))
    assert least <= results.report.ratios["decode_p99_while_streaming"] <= most
    assert is_plot(interference.SECTION.plot(results, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-interference.png"]


def test_nothing_measured_is_no_plot(tmp_path: Path) -> None:
    assert interference.SECTION.plot(no_results(), tmp_path) is None


def test_a_wrong_decode_stops_the_section(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real, calls = attention_cases.paged_decode, itertools.count()

    def wrong(*arguments: object, out: torch.Tensor, **rest: object) -> None:
        real(*arguments, out=out, **rest)  # type: ignore[arg-type]
        if next(calls) >= 2:  # after the reference of both layers
            out[1, 3] = 0

    forbid_timing(monkeypatch, interference)
    monkeypatch.setattr(attention_cases, "paged_decode", wrong)
    with pytest.raises(WrongResult, match=r"^decode, layer 0: "):
        rehearse(interference.SECTION, tmp_path)


def test_a_wrong_copy_stops_the_section(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forbid_timing(monkeypatch, interference)
    monkeypatch.setattr(copy_methods, "copy_batch_plain", lambda batch: None)
    with pytest.raises(WrongResult, match=r"^batched: 64 of the 64 blocks of job 0"):
        rehearse(interference.SECTION, tmp_path)


def test_a_decode_that_copies_disturb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step = DecodeStep(rehearsal())
    step.run()
    step.check("decode")
    monkeypatch.setattr(interference, "DecodeStep", lambda place: step)
    real = interference.measure

    def disturb(*arguments: object) -> object:
        row = real(*arguments)  # type: ignore[arg-type]
        step.outs[1][0, 0, 5] = torch.nan
        return row

    monkeypatch.setattr(interference, "measure", disturb)
    with pytest.raises(WrongResult, match=r"^decode beside copies, batched, layer 1: "):
        rehearse(interference.SECTION, tmp_path)


class Clock:
    """A device whose time passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited: list[float] = []


class FakeEvent:
    def __init__(self, clock: Clock, at: float) -> None:
        self.clock, self.at = clock, at

    def query(self) -> bool:
        return self.at <= self.clock.now

    def synchronize(self) -> None:
        self.clock.waited.append(self.at)
        self.clock.now = max(self.clock.now, self.at)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query() and end.query(), "CUDA would not know it yet"
        return 1e3 * (end.at - self.at)


def test_a_pump_keeps_a_few_jobs_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ends = Clock(), iter([10.0, 14.0, 18.0, 22.0, 26.0, 30.0])
    monkeypatch.setattr(interference, "record_event", lambda: FakeEvent(clock, next(ends)))
    monkeypatch.setattr(interference, "on", lambda stream: contextlib.nullcontext())
    clock.now, launched = 10.0, []
    launches = [lambda: launched.append(0), lambda: launched.append(1)]
    pump = Pump(object(), launches, 8_000_000_000)  # type: ignore[arg-type]
    pump.start()
    pump.top_up()
    pump.top_up()
    assert launched == [0, 1] and len(launched) == JOBS_AHEAD
    clock.now = 19.0  # two have arrived
    pump.top_up()
    assert launched == [0, 1, 0, 1]
    clock.now = 23.0
    pump.stop()
    assert (pump.moved_bytes, pump.seconds) == (24_000_000_000, 12.0)
    assert pump.gb_per_second == 2.0


def test_a_pump_of_which_nothing_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    ends = itertools.count(5.0)
    monkeypatch.setattr(interference, "record_event", lambda: FakeEvent(clock, next(ends)))
    monkeypatch.setattr(interference, "on", lambda stream: contextlib.nullcontext())
    pump = Pump(object(), [lambda: None], 8)  # type: ignore[arg-type]
    pump.start()
    pump.top_up()
    pump.stop()
    assert (pump.gb_per_second, pump.moved_bytes) == (0.0, 0)


def test_every_step_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 3 s, and of 50 s before the count begins; the host stays a few steps ahead."""
    clock, device_time = Clock(), itertools.count()
    lengths = [50.0] * FIRST_STEPS + [3.0] * 4
    points = [0.0]
    for length in lengths:
        points += [points[-1] + length, points[-1] + length]
    monkeypatch.setattr(
        interference, "record_event", lambda: FakeEvent(clock, points[next(device_time)])
    )
    monkeypatch.setattr(interference, "on", lambda stream: contextlib.nullcontext())
    launched = []
    taken = interference.time_steps(
        rehearsal(),
        object(),  # type: ignore[arg-type]
        lambda: launched.append(len(clock.waited)),
        4,
    )
    assert taken == pytest.approx([3.0] * 4)
    assert launched == [0] * STEPS_AHEAD + list(range(1, len(lengths) - STEPS_AHEAD + 1))


def test_the_target_by_hand() -> None:
    results = no_results()
    for rate, ratio in ((80.0, 1.30), (65.0, 1.04), (60.0, 1.01)):
        results.add_row("interference", {"copies_gb_per_second": rate, "p99_over_alone": ratio})
    interference.set_ratio(results)
    # 60 is less than 0.8 of 80: it disturbs least because it copies least.
    assert results.report.ratios == {"decode_p99_while_streaming": 1.04}
    assert interference.TARGETS[0].is_met(1.04) and not interference.TARGETS[0].is_met(1.051)


def test_no_rows_are_no_answer() -> None:
    results = no_results()
    interference.set_ratio(results)
    assert results.report.ratios == {}
