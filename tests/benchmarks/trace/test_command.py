# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench trace`: all of it on small traces, its ratios, its workers and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stratakv.benchmarks.harness.report import Report
from stratakv.benchmarks.trace import command, replay
from stratakv.benchmarks.trace.command import fill_report
from stratakv.benchmarks.trace.replay import (
    HEADS_FIRST,
    OPT,
    Answer,
    Arrangement,
    Cell,
    Outcome,
    PairCell,
    Source,
    TwoTierOutcome,
)
from stratakv.engine.cli.main import main
from stratakv.tiers.admission import FILTERS
from stratakv.tiers.policies.known_policies import POLICIES

from .tiny_traces import trace_of

PAIRS = ("1_over_5", "2_over_10", "5_over_20")


def test_made_up_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_REQUESTS", {"chat": (0, 300), "agents": (0, 100)})
    words = ["bench", "trace", "--quick", "--out", str(tmp_path), "--policy", "lru"]
    assert main([*words, "--admission", "all"]) == 0
    written = json.loads((tmp_path / "trace.json").read_text())
    assert {"environment", "limits", "figures", "ratios"} <= written.keys()
    for name in ("chat", "agents"):
        rows = written["figures"]["one_tier"][name]
        assert list(rows) == [*POLICIES, HEADS_FIRST, OPT]
        for figures in rows.values():
            assert list(figures) == ["1", "2", "5", "10", "20", "50"]
        for percent, best in rows[OPT].items():
            assert written["limits"][f"opt_{name}"][percent] == best["hit_percent"]
            assert all(row[percent]["hit_percent"] <= best["hit_percent"] for row in rows.values())
        assert (
            rows[OPT]["50"]["hit_percent"] <= written["limits"][f"infinite_{name}"]["hit_percent"]
        )
        assert tuple(written["figures"]["two_tiers"][name]) == PAIRS
        for pair in PAIRS:
            assert (
                0 < written["ratios"][f"admission_written_over_write_through_{name}_{pair}"] < 1.1
            )
            assert written["ratios"][f"admission_points_lost_{name}_{pair}"] == 0.0
    assert written["ratios"]["gap_closed"] == written["ratios"]["worst_points_below_lru"] == 0.0
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "written over write-through" in shown and "gap closed chat" in shown


def test_a_trace_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my chats_trace.jsonl"
    lines = [
        {"timestamp": n, "input_length": 1024, "output_length": 1, "hash_ids": [n % 3, 10 + n % 3]}
        for n in range(9)
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert main(["bench", "trace", str(path), "--out", str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert written["limits"]["infinite_my_chats"]["hit_percent"] == pytest.approx(100 * 12 / 18)
    assert written["figures"]["plan"]["traces"]["my_chats"]["blocks"] == 6
    assert not written["figures"]["plan"]["made_up"]


def test_ratios() -> None:
    """Hits are pooled before they are divided, and a filter is held against write-back alone."""
    traces = {name: trace_of([0], name=name) for name in ("a", "b")}
    one = {("a", "lru"): 10.0, ("a", "mine"): 15.0, ("a", OPT): 30.0,
           ("b", "lru"): 60.0, ("b", "mine"): 58.0, ("b", OPT): 70.0}  # fmt: skip
    answers = [Answer(Cell(t, r, 5), Outcome(hit, 1.0), 2e-6) for (t, r), hit in one.items()]
    through, back = Arrangement.WRITE_THROUGH, Arrangement.WRITE_BACK
    for name in traces:
        answers += [
            Answer(Cell(name, "lru", 100), Outcome(80.0, 70.0), 1.0),
            Answer(Cell(name, HEADS_FIRST, 5), Outcome(1.0, 1.0), 1.0),
            Answer(PairCell(name, 1, 5, through), TwoTierOutcome(10.0, 10.0, 0.8), 1.0),
            Answer(PairCell(name, 1, 5, back), TwoTierOutcome(10.0, 12.0, 0.7), 1.0),
            Answer(PairCell(name, 1, 5, back, admission="f"), TwoTierOutcome(10.0, 11.5, 0.2), 1.0),
        ]
    report = Report("trace", "probe", environment={})
    report.figures["plan"] = {"policy": "mine", "admission": "f"}
    fill_report(report, traces, answers)
    assert report.ratios == pytest.approx(
        {
            "gap_closed_a": 5 / 20,
            "gap_closed_b": -2 / 10,
            "gap_closed": 3 / 30,
            "worst_points_below_lru": 2.0,
        }
        | {f"admission_written_over_write_through_{name}_1_over_5": 0.25 for name in traces}
        | {f"admission_points_lost_{name}_1_over_5": 0.5 for name in traces}
        | {f"admission_points_below_write_through_{name}_1_over_5": -1.5 for name in traces}
    )
    assert report.limits["infinite_a"] == {"hit_percent": 80.0, "work_percent": 70.0}
    assert report.figures["one_tier"]["a"]["mine"]["5"]["microseconds_per_block"] == pytest.approx(
        2
    )


def test_nothing_to_gain_is_no_share() -> None:
    traces = {"a": trace_of([0], name="a")}
    answers = [
        Answer(Cell("a", row, 5), Outcome(50.0, 1.0), 1.0) for row in ("lru", OPT, HEADS_FIRST)
    ]
    report = Report("trace", "probe", environment={})
    report.figures["plan"] = {"policy": "lru", "admission": "all"}
    fill_report(report, traces, answers)
    assert report.ratios == {"worst_points_below_lru": 0.0}


def test_workers_give_what_this_process_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [Source("chat", requests=60, seed=3), Source("agents", requests=20, seed=3)]
    traces = {source.name: source.load() for source in sources}
    wanted = command.make_cells(list(traces), "lru", "all")
    here = {answer.cell: answer.outcome for answer in replay.run_cells(wanted, sources, traces)}
    monkeypatch.setattr(replay, "WORKERS_FROM_ACCESSES", 0)
    monkeypatch.setattr(replay.os, "sched_getaffinity", lambda _pid: {0, 1})
    there = {answer.cell: answer.outcome for answer in replay.run_cells(wanted, sources, traces)}
    assert here == there and len(here) == len(wanted)


def test_every_policy_and_filter_is_compared() -> None:
    made = command.make_cells(["a"], "lru", "all")
    assert {cell.row for cell in made if isinstance(cell, Cell)} == {*POLICIES, HEADS_FIRST, OPT}
    pairs = [cell for cell in made if isinstance(cell, PairCell)]
    assert {cell.admission for cell in pairs} == set(FILTERS)
    assert {cell.arrangement for cell in pairs} == set(Arrangement)
    assert len(set(made)) == len(made)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--policy", "lruu"], "--policy takes a name, and there is no 'lruu'"),
        (["--admission", "nothing"], "--admission takes a name, and there is no 'nothing'"),
        (["--seed", "-1"], "--seed takes a whole number from 0 to"),
        (["/nowhere/at.jsonl"], "/nowhere/at.jsonl is neither a file nor a folder"),
        (["--quick", "here.jsonl"], "leave out PATH, or --quick"),
    ],
)
def test_refusals(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "trace", "--out", str(tmp_path), *words]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_trace_without_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    fields = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": []}
    path.write_text(json.dumps(fields))
    assert main(["bench", "trace", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "no prompt with a block" in capsys.readouterr().err


def test_names_that_are_keys() -> None:
    names = ["a", "a", "b c/\x1b[1m", "", "é", "a_2"]
    assert command.unique_names(names) == ["a", "a_2", "b_c_1m", "trace", "trace_2", "a_2_2"]
