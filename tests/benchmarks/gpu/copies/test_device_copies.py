# SPDX-License-Identifier: Apache-2.0
"""The section of the copy device, rehearsed; and that it would see a wrong byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratakv.benchmarks.gpu.copies import device_copies
from stratakv.benchmarks.gpu.section import WrongResult
from stratakv.connector.device import cpu

from ..copy_rehearsal import rehearse


def test_three_directions_and_their_ratios(tmp_path: Path) -> None:
    results = rehearse(device_copies.SECTION, tmp_path)
    rows = results.rows(device_copies.NAME)
    assert [row["case"] for row in rows] == ["to_host", "to_device", "both"]
    assert all(row["gb_per_second"] > 0 and row["submit_microseconds"] > 0 for row in rows)
    # No ceilings were measured, so nothing is held against them.
    assert set(results.report.ratios) == {
        "device_both_ways_over_one_way",
        "device_submit_64_blocks_microseconds",
    }
    assert all(row["over_pinned"] is None for row in rows)


def test_a_wrong_byte_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_all_but_a_byte(
        source: cpu.Bytes, target: cpu.Bytes, runs: list[tuple[int, int, int]]
    ) -> None:
        for start, end, count in runs:
            target[end : end + count, :-1] = source[start : start + count, :-1]

    monkeypatch.setattr(cpu, "_copy_runs", copy_all_but_a_byte)
    with pytest.raises(WrongResult, match="64 blocks left other bytes"):
        rehearse(device_copies.SECTION, tmp_path)
