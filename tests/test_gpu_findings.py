# SPDX-License-Identifier: Apache-2.0
"""The last lines of `tools/on_gpu.py first`: what counts as wrong, and what is to be run then."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.sax.saxutils import quoteattr

import pytest

from .gpu_session_tool import imported_tool

ROOT = Path(__file__).resolve().parent.parent
WRONG_TOKENS = {"name": "float64: above tiers", "result": "wrong", "said": "7 of 128 tokens"}
DEAD = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with imported_tool() as module:
        yield module


@pytest.fixture
def findings(tool: ModuleType) -> ModuleType:
    return sys.modules["gpu_session.findings"]


def junit(*cases: tuple[str, str, str]) -> str:
    """The XML of pytest, by name, kind of the end, and message."""
    rows = [
        f"<testcase name={quoteattr(name)}>"
        + (f"<{kind} message={quoteattr(message)}>long text</{kind}>" if kind else "")
        + "</testcase>"
        for name, kind, message in cases
    ]
    return f"<testsuites><testsuite>{''.join(rows)}</testsuite></testsuites>"


def command(tool: ModuleType, name: str, status: int, **files: str) -> Any:
    """A command that leaves files and ends with `status`."""
    code = (
        "import json, pathlib, sys\n"
        "for name, text in json.loads(sys.argv[2]).items():\n"
        "    pathlib.Path(sys.argv[1], name.replace('_', '.')).write_text(text)\n"
        f"sys.exit({status})"
    )
    steps = sys.modules["gpu_session.steps"]
    return steps.Command(name, ("-c", code, "{out}", json.dumps(files)), 60)


def tokens(*checks: dict[str, str]) -> str:
    return json.dumps({"checks": checks})


def run_first(
    tool: ModuleType, group: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> int:
    monkeypatch.setattr(tool, "groups_of", lambda *_, **__: [tuple(group)])
    monkeypatch.setattr(tool, "machine", lambda *_, **__: {"device": "a fake one"})
    monkeypatch.setattr(tool, "check_modules", lambda *_: None)
    monkeypatch.setattr(tool, "bench_sections", lambda *_: [])
    given = ["--commit", "0123abc", "--out", str(tmp_path / "out"), "--seconds", "600"]
    status: int = tool.main(["first", *given])
    return status


def test_wrong_tokens_are_the_last_word(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    group = [
        command(tool, "tokens", 1, tokens_json=tokens(WRONG_TOKENS)),
        command(tool, "tests-order", 0, junit_xml=junit(("test_a", "", ""))),
        command(tool, "tests-kernels", 0),
    ]
    assert run_first(tool, group, tmp_path, monkeypatch) == 1
    wrong, refusal, instead, last = capsys.readouterr().out.splitlines()[-4:]
    assert wrong == "WRONG: tokens: float64: above tiers (7 of 128 tokens)"
    assert refusal.startswith("DO NOT RUN `figures`")
    assert last == "and give the machine back."
    words = shlex.split(instead)
    assert words[:2] == ["python", "tools/on_gpu.py"]
    args = tool.read_arguments(words[2:])
    assert (args.step, args.commit, args.seconds) == ("sanitize", "0123abc", 600.0)
    assert args.out == tmp_path / "out"
    steps = sys.modules["gpu_session.steps"]
    groups = steps.groups_of("sanitize", is_rehearsal=False)
    [chosen] = [each for group in groups for each in group if each.name == args.only]
    assert chosen.seconds <= 200 and "decode or write" in chosen.words


def test_nothing_wrong_is_no_word_about_figures_in_a_rehearsal(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    group = [command(tool, "tokens", 0, tokens_json=tokens())]
    assert run_first(tool, group, tmp_path, monkeypatch) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("`figures` is next, at once")
    monkeypatch.setattr(tool, "read_arguments", _rehearsed(tool.read_arguments))
    assert run_first(tool, group, tmp_path, monkeypatch) == 0
    assert "figures" not in capsys.readouterr().out
    group = [command(tool, "tokens", 1, tokens_json=tokens(WRONG_TOKENS))]
    assert run_first(tool, group, tmp_path, monkeypatch) == 1
    assert "DO NOT RUN `figures`" in capsys.readouterr().out, "the twins are wrong then"


def _rehearsed(read: Any) -> Any:
    return lambda words: read([*words, "--rehearse"])


def test_the_page_has_the_command_that_comes_instead(tool: ModuleType) -> None:
    words = ["first", "--wheels", ".whl", "--commit", "ID", "--out", "DIR"]
    line = tool.sanitize_command(tool.read_arguments(words))
    page = (ROOT / "docs" / "gpu.md").read_text()
    given = [shlex.split(each) for each in page.splitlines() if each.startswith("python tools/")]
    assert sorted(shlex.split(line)) in [sorted(each) for each in given]


@pytest.mark.parametrize(
    ("name", "kind", "message", "is_wrong"),
    [
        ("test_a[x]", "failure", "AssertionError: Tensor-likes are not close!\n\nMismatched", True),
        ("test_a[x]", "failure", "assert 1 == 2", True),
        ("test_a[x]", "failure", DEAD, True),
        ("test_a[x]", "error", DEAD, True),
        ("test_a[x]", "failure", "torch.OutOfMemoryError: CUDA out of memory", False),
        ("test_a[x]", "failure", "Failed: Timeout (>120.0s) from pytest-timeout.", False),
        ("test_a[x]", "error", "AssertionError: in a fixture", False),
        ("test_a[x]", "skipped", "assert that is none", False),
        ("test_the_pool_is_sized_by_what_is_left", "failure", "assert 1 == 2", False),
        ("test_the_pool_is_sized_by_what_is_left", "failure", DEAD, True),
        ("test_without_the_events_the_fault_is_seen", "failure", "AssertionError: x", False),
    ],
)
def test_failures_that_are_wrong_bytes(
    findings: ModuleType, tmp_path: Path, name: str, kind: str, message: str, is_wrong: bool
) -> None:
    for command_name in ("tests-order", "tests-kernels"):
        (tmp_path / command_name).mkdir()
        xml = junit(("test_other", "", ""), (name, kind, message))
        (tmp_path / command_name / "junit.xml").write_text(xml)
        outcome = sys.modules["gpu_session.running"].Outcome(command_name, "", "failed")
        found = findings.find_wrong(tmp_path, [outcome])
        first_line = message.splitlines()[0]
        assert found == ([f"{command_name}: {name}: {first_line}"] if is_wrong else [])


def test_a_dead_device_is_wrong_though_no_token_was(findings: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    check = {"name": "fp8 KV", "result": "failed", "said": f"RuntimeError: {DEAD}"}
    near = {"name": "launched", "result": "failed", "said": "60 of 128 tokens"}
    (tmp_path / "tokens" / "tokens.json").write_text(tokens(check, near))
    outcome = sys.modules["gpu_session.running"].Outcome("tokens", "", "failed")
    [found] = findings.find_wrong(tmp_path, [outcome])
    assert found.startswith("tokens: fp8 KV (RuntimeError: ")


@pytest.mark.parametrize("text", [None, "", "<testsuites><testcase", '{"checks"'])
def test_results_that_were_cut_off_are_not_shown(
    findings: ModuleType, tmp_path: Path, text: str | None
) -> None:
    outcomes = []
    for name, file in (("tokens", "tokens.json"), ("tests-order", "junit.xml")):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / file).write_text(text)
        outcomes.append(sys.modules["gpu_session.running"].Outcome(name, "", "timed out"))
    outcomes.append(sys.modules["gpu_session.running"].Outcome("probe", "", "failed"))
    assert findings.find_wrong(tmp_path, outcomes) == []
    unproven = findings.find_unproven(tmp_path, outcomes)
    how = "timed out without a result that can be read"
    assert unproven == [f"tokens {how}", f"tests-order {how}"]
    [line] = findings.advice([], unproven, "")
    assert line.startswith(f"NOT SHOWN: tokens {how}; tests-order {how}. Read the log first")


@pytest.mark.parametrize(
    ("kinds", "result", "is_shown"),
    [
        (["excused"], "failed", True),
        (["excused", "excused"], "failed", True),
        (["excused"], "timed out", False),
        (["excused", "other"], "failed", False),
        ([], "failed", False),  # in collecting, say
        ([], "ok", True),
    ],
)
def test_failures_that_are_excused_leave_bytes_shown(
    findings: ModuleType, tmp_path: Path, kinds: list[str], result: str, is_shown: bool
) -> None:
    excused = ("test_the_pool_is_sized_by_what_is_left", "failure", "assert 1 == 2")
    other = ("test_a", "failure", "torch.OutOfMemoryError: CUDA out of memory")
    cases = [excused if kind == "excused" else other for kind in kinds]
    (tmp_path / "tests-order").mkdir()
    (tmp_path / "tests-order" / "junit.xml").write_text(junit(("test_b", "", ""), *cases))
    outcome = sys.modules["gpu_session.running"].Outcome("tests-order", "", result)
    known = f"tests-order {result}, with no wrong byte found until then"
    assert findings.find_unproven(tmp_path, [outcome]) == ([] if is_shown else [known])


def test_many_faults_are_counted(findings: ModuleType) -> None:
    wrong = [f"tests-order: test_{number}" for number in range(7)]
    assert findings.advice(wrong, [], "")[0].endswith("test_4; and 2 more")


def test_tests_that_may_fail_otherwise_are_there(findings: ModuleType) -> None:
    steps = sys.modules["gpu_session.steps"]
    text = "".join((ROOT / "tests" / place).read_text() for place in steps.ORDER_TESTS)
    for name in findings.NOT_ABOUT_BYTES:
        assert f"def {name}(" in text
