# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench core --peer-python`: interpreters that cannot do it, ratios, and vLLM itself.

The last takes an interpreter that has vLLM: PEER_PYTHON=/path/to/python.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stratakv.benchmarks.core import command as core
from stratakv.benchmarks.core import vllm_cases
from stratakv.benchmarks.core.command import (
    RATIOS,
    STEP_OVER_DEVICE,
    TITLES,
    Case,
    Rounds,
    fill_report,
    peer_plan,
)
from stratakv.benchmarks.core.traced_steps import Spent, TraceRound, add_trace_ratios
from stratakv.benchmarks.core.vllm_cases import PEERS, Seconds, VllmPeer
from stratakv.benchmarks.harness.peer import PeerFailed
from stratakv.benchmarks.harness.report import Report
from stratakv.engine.cli.main import main

REAL = os.environ.get("PEER_PYTHON", "")


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Makes an executable that runs Python text instead of what it is told to run."""

    def make(text: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!{sys.executable} -S\n{text}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


def said(words: list[str], out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status and the only line on standard error; nothing may have been written."""
    status = main(["bench", "core", "--quick", "--out", str(out), "--peer-python", *words])
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    assert "Traceback" not in error
    assert not list(out.glob("*"))
    return status, error


@pytest.mark.parametrize("path", ["", "/nowhere/python", "/etc/passwd", "/etc"])
def test_a_path_that_is_no_program(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, error = said([path], tmp_path / "out", capsys)
    assert status == 2
    assert "--peer-python takes the path of a Python interpreter that has vLLM, not" in error


def test_a_file_that_no_system_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "python"
    path.write_bytes(bytes(64))
    path.chmod(0o755)
    status, error = said([str(path)], tmp_path / "out", capsys)
    assert status == 2
    assert f"--peer-python {path} cannot be run: Exec format error" in error


def test_an_interpreter_without_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This one has all packages of the tests, and vLLM is none of them."""
    status, error = said([sys.executable], tmp_path / "out", capsys)
    assert status == 1
    assert "cannot import vLLM (ModuleNotFoundError: No module named 'vllm')" in error
    assert f"for {sys.executable}, or name with --peer-python a Python interpreter" in error


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "vLLM's side ended with code 0: install vLLM"),
        ("import sys; sys.exit('a bad day')", "ended with code 1 (a bad day): install vLLM"),
        ("print('hello')", "answered 'hello', which is no JSON object: install vLLM"),
        ("print('[1]')", "answered '[1]', which is no JSON object: install vLLM"),
        ("print('{}')", "answered without a version: install vLLM"),
        ('print(\'{"error": "no room"}\')', "vLLM's side: no room: install vLLM"),
    ],
)
def test_programs_that_are_something_else(
    text: str,
    what: str,
    program: Callable[[str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, error = said([program(text)], tmp_path / "out", capsys)
    assert status == 1
    assert what in error


@pytest.mark.parametrize(
    ("then", "what"),
    [
        ("import os; os._exit(9)", "vLLM's side ended with code 9"),
        ('print(\'{"error": "17 tokens were found, not 16"}\')', "vLLM's side: 17 tokens"),
        ("sys.stdin.read()", "vLLM's side did not answer in 0.5 s"),
    ],
)
def test_a_peer_that_fails_later(
    then: str, what: str, program: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of its work, when it is no question any more of which Python it is."""
    ready = 'import sys\nsys.stdin.readline()\nprint(\'{"version": "0"}\', flush=True)\n'
    monkeypatch.setattr(vllm_cases, "CASE_SECONDS", 0.5)
    python = program(f"{ready}sys.stdin.readline()\n{then}")
    with VllmPeer(python, {}) as peer:
        assert peer.start() == {"version": "0"}
        with pytest.raises(PeerFailed) as failed:
            peer.take("peer_steps", 1)
    assert what in str(failed.value)
    assert "install" not in str(failed.value)


def test_its_cases_come_right_after_ours(program: Callable[[str], str]) -> None:
    """And its own clock counts: what waiting for its answer takes is nobody's."""
    answer = '{"version": "0", "wall": 2.0, "busy": 1.0}'
    python = program(f"import sys\nfor line in sys.stdin: print('{answer}', flush=True)\n")
    cases = [Case(name, "steps/s", 4, lambda: None) for name in TITLES]
    with VllmPeer(python, {}) as peer:
        peer.start()
        peer.take = lambda case, count: Seconds(2.0, 1.0)  # type: ignore[method-assign]
        both = core.with_peers(cases, peer)
        rounds = core.take_rounds(both, 2)
    names = [case.name for case in both]
    assert set(names) - set(TITLES) == set(PEERS)
    for name, pair in PEERS.items():
        place = names.index(name)
        assert names[place - 1] == pair.ours
        assert (rounds[place].wall_seconds, rounds[place].busy_seconds) == ([2.0] * 2, [1.0] * 2)


def test_ratios_from_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [Case(name, "steps/s", 12, lambda: None) for name in (*TITLES, *PEERS)]
    rounds = [Rounds([1.0, 4.0, 2.0], [1.0, 2.0, 2.0]) for _ in cases]
    rounds[-1].wall_seconds = [7.0, 28.0, 6.0]
    report = Report("core", "probe", environment={})
    report.figures["peer"] = {"version": "0.33.0", "algorithm": "sha256"}
    fill_report(report, cases, rounds)
    add_trace_ratios(report, [TraceRound(*[Spent(1.0, 1.0)] * 3)])
    assert {*RATIOS, *STEP_OVER_DEVICE, *PEERS} <= report.ratios.keys()
    assert report.ratios["peer_steps"] == 7.0
    assert report.ratios["peer_cycles"] == report.ratios["peer_hash"] == 1.0
    assert report.figures["spreads"]["peer_steps"] == (5.0, 7.0)
    assert report.figures["rates"]["peer_steps"]["median"] == 12 / 7
    core.print_core(report)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Ours over vLLM 0.33.0" in shown
    assert "peer steps 7.00 5.00..7.00 >= 6.5 met" in shown
    assert "peer cycles 1.00 1.00..1.00 >= 3.5 missed" in shown


def test_the_plan_is_that_of_our_cases() -> None:
    plan = peer_plan(repeats=5)
    assert json.loads(json.dumps(plan)) == plan
    assert len(plan["prompt_lengths"]) == core.NUM_RUNNING
    assert plan["hash_tokens"] == core.HASHED_TOKENS
    # The step of the prompts gives a token too, and nobody comes to the end.
    assert plan["max_tokens"] == 6 * 50 + 2


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="PEER_PYTHON names no Python that has vLLM")
def test_vllm_itself(tmp_path: Path) -> None:
    words = ["bench", "core", "--quick", "--repeats", "2", "--out", str(tmp_path)]
    assert main([*words, "--peer-python", REAL]) == 0
    written = json.loads((tmp_path / "core.json").read_text())
    assert written["figures"]["peer"]["version"]
    assert written["figures"]["rates"].keys() == {*TITLES, *PEERS}
    assert all(written["ratios"][name] > 0 for name in PEERS)
