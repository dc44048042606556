# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench gpu` as a command: what it refuses, and a rehearsal of all of it."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest
import torch

from stratakv.benchmarks.gpu import NAMES, command
from stratakv.benchmarks.gpu.section import Place, Results, Section, SectionOver, Target
from stratakv.benchmarks.harness.report import Report
from stratakv.tiers.settings.values import ConfigError


def arguments(tmp_path: Path, **given: object) -> argparse.Namespace:
    settings = {"quick": True, "out": tmp_path, "sections": None, "peers": None, "rehearse": True}
    return argparse.Namespace(**{**settings, "time_limit": None, **given})


@pytest.mark.slow
def test_a_rehearsal_runs_every_section_and_claims_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(arguments(tmp_path)) == 0
    body = json.loads((tmp_path / "gpu.json").read_text())
    assert tuple(section.name for section in command.SECTIONS) == NAMES, "what --help says"
    for section in command.SECTIONS:
        # The sweep is for a device, and there are no peers here.
        if section.name not in ("launch-sweep", "peers"):
            assert body["figures"][section.name]["rows"], section.name
        notes = body["figures"].get(section.name, {}).get("notes", [])
        assert not [note for note in notes if "failed" in note]
    assert body["environment"]["device"] == "cpu, a rehearsal"
    assert "--rehearse" in body["command"]
    output = capsys.readouterr().out
    assert "no figure of it says anything about a GPU" in output
    assert "Targets" not in output
    assert len(list(tmp_path.glob("gpu-*.png"))) >= 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_it_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a CUDA device .* --rehearse"):
        command.run(arguments(tmp_path, rehearse=False))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"sections": "decode,prefil"},
            "--sections takes names by commas, not 'prefil'; did you mean prefill",
        ),
        ({"peers": "/nowhere/at/all"}, "--peers takes a folder"),
        ({"time_limit": 0.0}, "--time-limit takes seconds above 0, not 0"),
    ],
)
def test_refusals(tmp_path: Path, given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command.run(arguments(tmp_path, **given))


def test_the_ceilings_are_always_measured() -> None:
    names = [section.name for section in command.choose_sections(" writes")]
    assert names == ["ceilings", "writes"]


def section_that(error: Exception | None) -> Section:
    def run(place: Place, results: Results) -> None:
        results.add_row("mine", {"case": "first"})
        if error is not None:
            raise error

    return Section("mine", "Mine", run)


@pytest.mark.parametrize(
    ("error", "goes_well", "note"),
    [
        (None, True, None),
        (SectionOver(), True, "its time was over"),
        (RuntimeError("out of memory"), False, "failed: RuntimeError: out of memory"),
        (LookupError("no such kernel"), False, "failed: LookupError"),
    ],
)
def test_what_a_section_measured_stands_whatever_happens_in_it(
    tmp_path: Path, error: Exception | None, goes_well: bool, note: str | None
) -> None:
    results = Results(Report("gpu", "bench gpu"), tmp_path)
    place = command.choose_place(arguments(tmp_path))
    assert command.run_section(section_that(error), place, results) is goes_well
    assert results.rows("mine") == [{"case": "first"}]
    notes = results.report.figures["mine"].get("notes", [])
    assert [note in text for text in notes] == ([True] if note else [])


def test_a_case_is_written_before_the_next_one_is_measured(tmp_path: Path) -> None:
    """A run that is killed in the middle of a section keeps what the section had."""
    results = Results(Report("gpu", "bench gpu"), tmp_path)
    for number in range(2):
        results.add_row("mine", {"case": str(number)})
        body = json.loads((tmp_path / "gpu.json").read_text())
        assert len(body["figures"]["mine"]["rows"]) == number + 1


def test_a_section_has_a_deadline(tmp_path: Path) -> None:
    place = command.choose_place(arguments(tmp_path))
    place.check_time()
    place.start_section(seconds=-1.0)
    with pytest.raises(SectionOver):
        place.check_time()


def test_the_time_of_the_run_bounds_each_section(tmp_path: Path) -> None:
    place = command.choose_place(arguments(tmp_path))
    place.run_ends = time.monotonic()
    place.start_section()
    with pytest.raises(SectionOver):
        place.check_time()


def test_targets_are_promises_in_one_direction() -> None:
    fast = Target("speed", "speed", least=0.9)
    assert fast.is_met(0.9) and not fast.is_met(0.89)
    cheap = Target("cost", "cost", most=12.0, unit=" us")
    assert cheap.is_met(12.0) and not cheap.is_met(12.1)
    assert (fast.wanted, cheap.wanted) == (">= 0.9", "<= 12 us")
