# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench speculation`: its quick form, and that other answers are no figure."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from stratakv.benchmarks.speculation import command, models
from stratakv.benchmarks.speculation.command import GATES, Scale
from stratakv.benchmarks.speculation.texts import repetitive
from stratakv.engine.cli.main import main
from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.text.tokenizer import Tokenizer
from stratakv.engine.worker.speculation.drafted_rows import DraftedRows


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "QUICK", Scale(2, (1, 2), 12, 0, 200))
    monkeypatch.setattr(command, "METHODS", ("suffix",))
    monkeypatch.setattr(models, "DEPTH", 2)


def test_the_quick_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speculation", "--quick", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "speculation.json").read_text())
    assert set(written["ratios"]) == set(GATES)
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in written["ratios"].values())
    cases = written["figures"]["cases"]
    assert len(cases) == 10  # two of an EAGLE head
    assert all(case["same_answers"] == case["answers"] for case in cases.values())
    assert (tmp_path / "speculation.png").read_bytes().startswith(b"\x89PNG")
    assert "speedup_repetitive_1" in capsys.readouterr().out


def test_drafts_that_are_taken_unseen_are_no_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = DraftedRows.accept

    def unseen(rows: DraftedRows, sampled: object) -> list[list[int]]:
        taken = accept(rows, sampled)  # type: ignore[arg-type]
        return [
            [*rows.draft_token_ids[first], own[-1]]
            for first, own in zip(rows.firsts.tolist(), taken, strict=True)
        ]

    monkeypatch.setattr(DraftedRows, "accept", unseen)
    monkeypatch.setattr(command, "QUICK", Scale(2, (1, 2), 60, 1, 200))
    assert main(["bench", "speculation", "--quick", "--out", str(tmp_path)]) == 1
    assert "answers differ" in capsys.readouterr().err


def test_answers_quote_and_edit() -> None:
    asked = repetitive(Tokenizer.load(EMBEDDED_MODEL), 12)
    assert all(len(each.prompt) > 100 and len(each.quote) > 100 for each in asked)
    assert all(each.prompt == each.quote for each in asked[::2])
    assert all(each.prompt != each.quote for each in asked[1::2])
