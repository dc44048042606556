# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench core`: the whole of it in its quick form, and work that is not what it claims."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from stratakv.benchmarks.core import cases
from stratakv.benchmarks.core import command as core
from stratakv.benchmarks.core.cases import (
    BLOCK_SIZE,
    NUM_RUNNING,
    Case,
    Decodes,
    WrongWork,
)
from stratakv.benchmarks.core.command import (
    RATIOS,
    STEP_OVER_DEVICE,
    TITLES,
    TWO_GROUPS_OVER_ONE,
    TWO_OVER_ONE,
    Rounds,
    fill_report,
)
from stratakv.benchmarks.core.hash_peers import pickle_sha256_chain
from stratakv.benchmarks.core.traced_steps import (
    FLOOR,
    LEAST_ROUNDS,
    TRACED,
    TRACED_THREAD,
    Spent,
    TracedSteps,
    TraceRound,
    add_trace_ratios,
    traced_steps,
)
from stratakv.benchmarks.harness.report import Report
from stratakv.engine.cli.main import main
from stratakv.engine.trace.records import DecisionRecord, read_records

# The figures are not looked at.
LITTLE = {
    "HASHED_TOKENS": 2**13, "_CYCLES": 20, "_EVICTING": 20, "_LOOK_UPS": 20, "_STEPS": 5,
    "_DEVICE_STEPS": 5, "_TRACED_STEPS": 5,
}  # fmt: skip


@pytest.mark.slow
def test_the_quick_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in LITTLE.items():
        monkeypatch.setattr(core, name, count)
    assert main(["bench", "core", "--quick", "--out", str(tmp_path), "--repeats", "2"]) == 0
    written = json.loads((tmp_path / "core.json").read_text())
    assert written["figures"]["plan"] == {"block_size": 16, "token_dtype": "int32", "repeats": 2}
    rates = written["figures"]["rates"]
    assert rates.keys() == TITLES.keys()
    for figures in rates.values():
        assert 0 < figures["lowest"] <= figures["median"] <= figures["highest"] < math.inf
    groups = {f"{TWO_GROUPS_OVER_ONE}_{name}" for name in TWO_OVER_ONE} | {TWO_GROUPS_OVER_ONE}
    traced = {TRACED, TRACED_THREAD, FLOOR}
    assert written["ratios"].keys() == RATIOS.keys() | STEP_OVER_DEVICE.keys() | groups | traced
    assert written["figures"]["trace"]["rounds"] == LEAST_ROUNDS, "however few repeats"
    assert written["ratios"]["sync_step_over_device"] > 1, "nothing is done before the device is"
    assert all(0 < ratio < math.inf for ratio in written["ratios"].values())
    assert written["limits"]["sha256_alone_tokens_per_second"] > 0
    assert (tmp_path / "core.png").read_bytes().startswith(b"\x89PNG")
    shown = " ".join(capsys.readouterr().out.split())
    assert "hash vs pickle sha256" in shown
    assert "peer" not in written["figures"], "without --peer-python"


@pytest.mark.parametrize("repeats", ["0", "1001"])
def test_repeats_that_cannot_be(
    repeats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "core", "--out", str(tmp_path), "--repeats", repeats]) == 2
    assert "--repeats takes a whole number from 1 to 1000" in capsys.readouterr().err


def test_work_that_went_wrong_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise WrongWork("17 tokens were found, not 16")

    monkeypatch.setattr(core, "make_cases", lambda *_: [Case("hash", "tokens/s", 1, fail)])
    assert main(["bench", "core", "--out", str(tmp_path)]) == 1
    assert "17 tokens were found" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_cases_take_turns() -> None:
    seen: list[str] = []

    def noting(name: str) -> Callable[[], None]:
        return lambda: seen.append(name)

    two = [Case(name, "steps/s", 1, noting(name)) for name in "ab"]
    rounds = core.take_rounds(two, 2)
    assert seen == ["a", "b"] * 3, "once to warm up, then in turn"
    assert [len(taken.wall_seconds) for taken in rounds] == [2, 2]


def test_figures_from_seconds() -> None:
    """Ratios are those within a round: a slow second round meets both sides of them."""
    every = [Case(name, "tokens/s", 12, lambda: None) for name in TITLES]
    rounds = [Rounds([1.0, 4.0, 2.0], [1.0, 2.0, 2.0]) for _ in every]
    rounds[0].wall_seconds = [0.5, 2.0, 0.5]
    rounds[list(TITLES).index("cycles_two_groups")].busy_seconds = [1.5, 3.0, 9.0]
    report = Report("core", "probe", environment={})
    fill_report(report, every, rounds)
    assert report.figures["rates"]["hash_pickle_sha256"] == {
        "unit": "tokens/s",
        "median": 6.0,
        "lowest": 3.0,
        "highest": 12.0,
        "processor_share": 5 / 7,
    }
    assert report.figures["rates"]["hash"]["median"] == 24.0
    assert report.ratios["hash_vs_pickle_sha256"] == 2.0
    assert report.ratios["steps_with_waiting_over_without"] == 1.0
    assert report.ratios["two_groups_over_one_steps"] == 1.0
    assert report.ratios["two_groups_over_one_cycles_equal_bytes"] == 1.5, "processor seconds"
    assert report.ratios["two_groups_over_one"] == 1.5, "the strictest decides"
    assert report.ratios["async_step_over_device"] == pytest.approx(2.0 / 12 / 0.010)
    assert report.limits == {"sha256_alone_tokens_per_second": 6.0}


def test_a_trace_is_measured_between_two_turns_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the thread that writes it counts."""
    heard: list[bool] = []

    class Turns(TracedSteps):
        def _turn(self, count: int, heard_by: object) -> Spent:
            heard.append(heard_by is not None)
            return super()._turn(count, heard_by)  # type: ignore[arg-type]

    with traced_steps(6) as steps:
        monkeypatch.setattr(steps, "__class__", Turns)
        steps.take_round(2)
        records = list(read_records(steps._trace._writer._path))
    assert heard == [False, True, False]
    assert [record.step for record in records if isinstance(record, DecisionRecord)] == [4, 5]
    report = Report("core", "probe", environment={})
    slow = TraceRound(Spent(1.0, 1.0), Spent(2.0, 1.2), Spent(3.0, 1.4))
    add_trace_ratios(report, [slow])
    assert report.ratios == pytest.approx({TRACED: 1.0, TRACED_THREAD: 1.0, FLOOR: 3.0})


def test_the_peers_chain() -> None:
    """Every block depends on its ids and on all before it, and a partial one has no name."""
    ids = list(range(3 * BLOCK_SIZE + 5))
    root = bytes(32)
    names = pickle_sha256_chain(root, ids, BLOCK_SIZE)
    assert len(names) == 3
    assert {len(name) for name in names} == {hashlib.sha256().digest_size}
    ids[BLOCK_SIZE] += 1
    changed = pickle_sha256_chain(root, ids, BLOCK_SIZE)
    assert [one == other for one, other in zip(names, changed, strict=True)] == [True, False, False]


def test_decodes_that_come_to_their_end_are_noticed() -> None:
    decodes = Decodes(num_waiting=0, max_steps=3)
    for _ in range(3):
        decodes.step()
    with pytest.raises(WrongWork, match=rf"were \({NUM_RUNNING}, {NUM_RUNNING}, 0\)"):
        decodes.step()


def test_a_cycle_that_finds_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.cycle_case(2)
    case.work()
    found = cases.run_through
    monkeypatch.setattr(cases, "run_through", lambda *of: found(*of) - BLOCK_SIZE)
    with pytest.raises(WrongWork, match="2032 tokens were found, not 2048"):
        case.work()
