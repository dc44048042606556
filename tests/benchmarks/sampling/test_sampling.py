# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench sampling`: its quick form, and that work that differs is no figure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stratakv.benchmarks.sampling import command
from stratakv.benchmarks.sampling.command import GATES, Requests, Scale
from stratakv.benchmarks.sampling.grammar_step import check_begins_as_asked
from stratakv.engine.cli.main import main
from stratakv.engine.sampling.processors.builtin import MinP, Penalties
from stratakv.engine.sampling.processors.thinking import ThinkingBudget


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "QUICK", Scale(4, 1000, 2, (2,), 2, 12, 3))


def test_the_quick_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sampling", "--quick", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "sampling.json").read_text())
    assert list(written["ratios"]) == list(GATES)
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in written["ratios"].values())
    for name, comparison in written["figures"]["contests"].items():
        rounds = 3 if name == command.HOSTILE else 2
        assert len(comparison["rounds"]) == len(comparison["limit_rounds"]) == rounds
    assert set(written["figures"]["by_clock"]) == set(GATES)
    assert set(written["figures"]["grammar_steps"]) == {"2"}
    assert set(written["figures"]["hostile_ends"]) == {"counts in counts", "plus of plus"}
    assert (tmp_path / "sampling.png").read_bytes().startswith(b"\x89PNG")
    assert "greedy_over_argmax" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [Penalties, MinP])
def test_a_processor_that_does_less_is_no_figure(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "apply", lambda self, logits, *_: logits)
    assert main(["bench", "sampling", "--quick", "--out", str(tmp_path)]) == 1
    assert "differ in row 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_wish_changes_every_row() -> None:
    """Or the figure with all features would be of fewer."""
    requests = Requests(Scale(4, 1000, 2, (2,), 2, 12, 3))
    context = command.ProcessorContext(4, 1000, (command.END,))
    for kind in command.ProcessorSet.built_in(context)._all:
        if isinstance(kind, ThinkingBudget):
            continue  # it forces tokens, which leaves nothing to choose from
        kind.update_state(requests.update(temperature=0.8))
        assert kind.is_active
        result = kind.apply(requests.logits.clone(), requests.rows)
        assert bool((result != requests.logits).any(dim=-1).all()), type(kind)


def test_an_answer_that_does_not_follow_its_schema_is_no_figure() -> None:
    whole = '[{"name":"open","line":1,"is_done":true,"score":null,"tags":["a","b"]},{"na'
    check_begins_as_asked(whole)
    check_begins_as_asked(whole[:15])
    for text in ("The function", whole.replace("line", "lime"), whole.replace('":"', '" "')):
        with pytest.raises(command.WrongWork, match="does not follow its schema"):
            check_begins_as_asked(text)
