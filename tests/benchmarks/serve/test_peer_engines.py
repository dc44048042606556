# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench serve --peer-python`: how phases are timed, its report on made-up rates, and
interpreters that cannot do it. A real vLLM takes STRATAKV_VLLM_PYTHON=/path/to/python."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stratakv.benchmarks.harness.report import Report
from stratakv.benchmarks.redraw import draw
from stratakv.benchmarks.serve import peer_engines, phases_process
from stratakv.benchmarks.serve.phases_process import NewTokens, StrataKvSide, WrongWork, answer
from stratakv.engine.cli.main import main

REAL = os.environ.get("STRATAKV_VLLM_PYTHON", "")


class Scripted:
    """Gives out what a list of steps says, each of which takes a second of its own clock."""

    version = "1"

    def __init__(self, steps: Sequence[Sequence[NewTokens]], now: list[float]) -> None:
        self._steps, self._now = list(steps), now

    def forget(self) -> None:
        self._steps.clear()

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        pass

    def step(self) -> Iterator[NewTokens]:
        self._now[0] += 1.0
        yield from self._steps.pop(0)


def test_decoding_begins_when_every_prompt_has_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(phases_process.time, "perf_counter", lambda: now[0])
    steps = [
        [NewTokens("0", [1], False)],
        [NewTokens("0", [2], False), NewTokens("1", [5], False)],
        [NewTokens("1", [6], False), NewTokens("0", [3], True)],
        [NewTokens("1", [7], True)],
    ]
    assert answer(Scripted(steps, now), [[1], [2]], 3) == {
        "first_seconds": 2.0, "decode_seconds": 2.0, "decode_tokens": 3,
        "tokens": [[1, 2, 3], [5, 6, 7]],
    }  # fmt: skip
    with pytest.raises(WrongWork, match="not every prompt got 3 tokens"):
        answer(Scripted([[NewTokens("0", [1], True)]], now), [[1]], 3)


def test_our_side_answers_and_finds_the_prompt_again(one_layer: Path) -> None:
    side = StrataKvSide(
        {"model": str(one_layer), "dtype": "float32", "max_model_len": 128, "num_blocks": 40}
    )
    prompts = [[5 + place for place in range(40)], [9, 8, 7]]
    found = answer(side, prompts, 4)
    assert [len(tokens) for tokens in found["tokens"]] == [4, 4]
    assert found["decode_tokens"] <= 6 and found["decode_seconds"] > 0
    again = answer(side, prompts, 4)
    side.forget()
    assert answer(side, prompts, 4)["tokens"] == again["tokens"] == found["tokens"]
    with pytest.raises(WrongWork, match="a request was refused"):
        side.add("x", [10**6], 4)
    side._core.shutdown(0.0)


def made_up(ours: float) -> Any:
    """Three rounds; the last one met something else on the machine, and met it on both sides."""
    theirs = {case: [100.0, 100.0, 20.0] for case in peer_engines.CASES}
    mine = {case: [ours, ours, ours / 5] for case in peer_engines.CASES}
    return {"vllm": theirs, "stratakv": mine}, 0.75


def test_the_report_has_the_lower_ratio_of_dense_models_and_those_of_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ready:
        version = "0.32.0"

    rates = iter([150.0, 110.0, 130.0])
    monkeypatch.setattr(peer_engines, "make_model", lambda *_: None)
    monkeypatch.setattr(peer_engines, "_start", lambda *_: {"vllm": Ready(), "stratakv": Ready()})
    monkeypatch.setattr(peer_engines, "_take_rounds", lambda *_: made_up(next(rates)))
    words = ["--peer-python", sys.executable, "--quick", "--out", str(tmp_path)]
    assert main(["bench", "serve", *words]) == 0
    written = json.loads((tmp_path / "serve_peer.json").read_text())
    dense = {f"peer_{case}": pytest.approx(1.1) for case in peer_engines.CASES}
    experts = {f"peer_experts_{count}": pytest.approx(1.3) for count in (1, 16, 64)}
    assert written["ratios"] == dense | experts
    models = written["figures"]["peer"]["models"]
    assert [each["cases"]["decode_16"]["ratio"] for each in models.values()] == [
        pytest.approx(1.5), pytest.approx(1.1), pytest.approx(1.3)
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "In turns with vLLM 0.32.0" in out and "qwen3-0.6b shape in bfloat16: 75%" in out
    assert (tmp_path / "serve_peer.png").stat().st_size > 0
    again = tmp_path / "again.png"
    assert draw(Report.read(tmp_path / "serve_peer.json"), again) == [again]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--peer-python", "/nowhere/python"], "takes the path of a Python interpreter"),
        (["--peer-python", sys.executable, "--rounds", "0"], "--rounds takes 1 to 1000 here"),
        (["--peer-python", sys.executable, "--requests", "4"], "--requests is of no use beside"),
        (["--peer-python", sys.executable, "--model", "x"], "--model is of no use beside"),
    ],
)
def test_what_cannot_take_turns(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--out", str(tmp_path), *words]) != 0
    assert expected in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(not REAL, reason="needs STRATAKV_VLLM_PYTHON, an interpreter that has vLLM")
@pytest.mark.slow
def test_a_real_vllm_takes_turns(tmp_path: Path) -> None:
    words = ["--peer-python", REAL, "--quick", "--rounds", "1", "--out", str(tmp_path)]
    assert main(["bench", "serve", *words]) == 0
    written = json.loads((tmp_path / "serve_peer.json").read_text())
    assert set(written["ratios"]) == set(peer_engines.GATES)
