# SPDX-License-Identifier: Apache-2.0
"""`tools/gpu_tokens.py`: what it calls wrong, what failed, what it writes; a run on the CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from .nursery_site import nursery_client

TOOL = Path(__file__).resolve().parent.parent / "tools" / "gpu_tokens.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_tokens", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "gpu_tokens", module)  # dataclasses look there
        spec.loader.exec_module(module)
    return module


def answers(tool: ModuleType, *tokens: list[int], found: int = 0, tier: str = "cpu") -> Any:
    cached = [found // len(tokens)] * len(tokens)
    return tool.Answers(list(tokens), Counter({tier: found}), cached, [0.5, 0.2])


def test_tokens_agree_until_the_first_that_differs(tool: ModuleType) -> None:
    mine, theirs = answers(tool, [1, 2, 3], [7, 8]), answers(tool, [1, 9, 3], [7, 8])
    assert tool.agreed(mine, theirs) == 3 and tool.agreed(mine, mine) == 5


def test_other_tokens_are_wrong_and_far_ones_failed(tool: ModuleType, tmp_path: Path) -> None:
    report = tool.Report("cpu", tmp_path / "tokens.json")
    one, other = answers(tool, [1, 2], [3, 4]), answers(tool, [1, 9], [3, 4])
    far = answers(tool, [9, 9], [3, 9])
    report.equal("same", one, one)
    report.equal("other", other, one)
    report.near("close", other, one)
    report.near("far", far, one)
    report.found("cpu", answers(tool, [1], found=tool.FOUND_TOKENS), "all")
    report.found("cpu", answers(tool, [1], found=tool.FOUND_TOKENS // 2), "half")
    report.found("cpu", answers(tool, [1], found=tool.FOUND_TOKENS, tier="pool"), "elsewhere")
    ends = {each.name: each.result for each in report.checks}
    assert ends == {
        "same": "ok", "other": "wrong", "close": "ok", "far": "failed", "all": "ok",
        "half": "failed", "elsewhere": "failed",
    }  # fmt: skip
    body = json.loads((tmp_path / "tokens.json").read_text())
    assert [each["name"] for each in body["checks"]] == list(ends) and body["is_rehearsal"]


class Fakes:
    """Engines that give answers in this order, whoever asks."""

    def __init__(self, answers: list[Any]) -> None:
        self.options: list[dict[str, Any]] = []
        self._answers = answers

    def open_engine(self, device: str, **given: Any) -> Fakes:
        self.options.append({"device": device, **given})
        return self

    def ask(self, *_: object) -> Any:
        return self._answers.pop(0)

    def __enter__(self) -> Fakes:
        return self

    def __exit__(self, *_: object) -> None:
        pass


Part = Callable[[str, list[Any], str], tuple[Any, Fakes]]


@pytest.fixture
def run_part(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Part:
    """The report of one part of the check, and the engines that it had."""

    def run(device: str, given: list[Any], part: str) -> tuple[Any, Fakes]:
        fakes = Fakes(given)
        monkeypatch.setattr(tool, "open_engine", fakes.open_engine)
        monkeypatch.setattr(tool, "ask", fakes.ask)
        monkeypatch.setattr(tool, "make_prompts", lambda _: [[1], [2]])
        report = tool.Report(device)
        session = tool.Session(device, report)
        session._kept = session._recorded = answers(tool, [1, 2], found=592)
        report.attempt(part, getattr(session, part))
        return report, fakes

    return run


def ends_of(report: Any) -> dict[str, str]:
    return {each.name: each.result for each in report.checks}


def test_float64_is_compared_wherever_its_blocks_come_from(
    tool: ModuleType, run_part: Part
) -> None:
    right, wrong = answers(tool, [1, 2]), answers(tool, [1, 3])
    tiers = [answers(tool, [1, 2], found=tool.FOUND_TOKENS, tier=tier) for tier in ("cpu", "ssd")]
    all_right = [right, right, right, *tiers]
    report, fakes = run_part("cuda", list(all_right), "float64")
    assert [*ends_of(report).values()] == ["ok"] * 6
    assert [each["device"] for each in fakes.options] == ["cpu", "cuda", "cuda", "cuda"]
    assert all(each["dtype"] == "float64" for each in fakes.options)
    for number in range(1, 5):
        given = [*all_right[:number], wrong, *all_right[number + 1 :]]
        report, _ = run_part("cuda", given, "float64")
        assert [*ends_of(report).values()].count("wrong") == 1


@pytest.mark.parametrize(
    ("tokens", "found", "end"),
    [([1, 2], 592, "ok"), ([1, 3], 592, "wrong"), ([1, 3], 576, "failed")],
)
def test_bfloat16_out_of_a_tier_equals_that_out_of_the_pool(
    tool: ModuleType, run_part: Part, tokens: list[int], found: int, end: str
) -> None:
    given = [answers(tool, [1, 2]), answers(tool, tokens, found=found)]
    report, fakes = run_part("cuda", given, "bfloat16_tiers")
    assert ends_of(report)["bfloat16: out of the cpu tier as out of the pool"] == end
    assert fakes.options[0]["kv_offload"] == "cpu" and fakes.options[0]["strict_kernels"]


def test_the_compiler_took_what_the_first_answers_took_beyond_the_next(
    tool: ModuleType, run_part: Part
) -> None:
    report, _ = run_part("cuda", [answers(tool, [1, 2])] * 2, "bfloat16")
    assert set(ends_of(report).values()) == {"ok"}
    assert report.seconds["of_the_compiler"] == pytest.approx(2 * (0.5 - 0.2))
    assert report.seconds["first_answers"] == [0.5, 0.2]


@pytest.mark.parametrize(("second", "end"), [([1, 2], "ok"), ([7, 7], "failed")])
def test_long_chunks_by_a_library_are_nearly_the_kernels(
    tool: ModuleType, run_part: Part, second: list[int], end: str
) -> None:
    given = [answers(tool, [1, 2]), answers(tool, second)]
    report, fakes = run_part("cuda", given, "library")
    assert list(ends_of(report).values()) == [end]
    assert [each["attention_backend"] for each in fakes.options] == ["kernels", "sdpa"]
    assert all(
        1024 <= 2 * tool.PROMPT_TOKENS <= each["max_num_batched_tokens"] for each in fakes.options
    )


@pytest.mark.parametrize(("share", "end"), [(2**40, "ok"), (2**10, "failed")])
def test_parts_of_a_gpu_work_with_a_real_engine(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, share: int, end: str
) -> None:
    """Options, statistics and comparisons; the engine is the CPU's."""
    import torch

    real = tool.open_engine
    monkeypatch.setattr(tool, "open_engine", lambda _, **given: real("cpu", **given))
    memory = SimpleNamespace(total_memory=share)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    monkeypatch.setattr(tool, "make_prompts", lambda count: [[5, 6, 7]] * count)
    monkeypatch.setattr(tool, "ANSWER_TOKENS", {"cuda": 2})
    report = tool.Report("cuda")
    session = tool.Session("cuda", report)
    for part in (session.bfloat16, session.launched, session.sized):
        report.attempt("part", part)
    ends = ends_of(report)
    assert ends.pop("pool by what is left") == end, report.checks
    assert len(ends) == 4 and set(ends.values()) == {"ok"}, report.checks


def test_a_part_that_cannot_run_leaves_the_others(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def broken(device: str, **given: Any) -> Any:
        raise RuntimeError(f"no engine in {given['dtype']}")

    monkeypatch.setattr(tool, "open_engine", broken)
    monkeypatch.setattr(tool, "make_prompts", lambda _: [[1]])
    assert tool.main(["--device", "cpu", "--out", str(tmp_path / "t.json")]) == 1
    body = json.loads((tmp_path / "t.json").read_text())
    ends = [each["result"] for each in body["checks"]]
    assert ends == ["failed"] * 4 + ["left out"]
    assert "no engine in float64" in body["checks"][0]["said"]
    assert "nothing to compare with" in body["checks"][2]["said"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("not right: float64; ")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_whole_check_on_the_cpu(tmp_path: Path) -> None:
    """Every engine that a CPU has, the tiers among them."""
    out = tmp_path / "tokens.json"
    words = [sys.executable, "-m", nursery_client.PROGRAM, str(TOOL), "--device", "cpu"]
    done = nursery_client.run([*words, "--out", str(out)], timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    body = json.loads(out.read_text())
    ends = [each["result"] for each in body["checks"]]
    assert ends.count("ok") == len(ends) - 1 >= 11 and ends[-1] == "left out"
    assert body["is_rehearsal"] and "says anything about a GPU" in done.stdout
