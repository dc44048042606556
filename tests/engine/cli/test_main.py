# SPDX-License-Identifier: Apache-2.0
"""The border of the command line: odd output and input, and refusals that stay one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stratakv.engine.cli.main import main

COMMAND = [sys.executable, "-m", "stratakv.engine.cli.main"]


def run(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """One command with its output on a full disk."""
    with Path("/dev/full").open("w") as full:
        return subprocess.run(
            [*COMMAND, *words], env={**os.environ, **changes}, stdout=full, stderr=subprocess.PIPE,
            text=True, timeout=60, check=False,
        )  # fmt: skip


@pytest.mark.parametrize("buffering", ["", "1"])
@pytest.mark.parametrize("words", [("--version",), ("config", "show")])
def test_a_full_disk_is_one_sentence(words: tuple[str, ...], buffering: str) -> None:
    done = run(*words, PYTHONUNBUFFERED=buffering)
    assert done.returncode == 2
    assert done.stderr.startswith("stratakv: the system refused something ([Errno 28] No space")
    assert done.stderr.count("\n") == 1


def test_text_that_the_terminal_cannot_show() -> None:
    done = subprocess.run(
        [*COMMAND, "config", "show", "--served-model-name", "é"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert r'served_model_name: "\xe9"' in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["x" * 5000], ["there is no command 'xxx", "the commands are serve"]),
        (["config", "check", "/no\nwhere.yaml"], ["FILE takes one line of UTF-8"]),
        (["config", "check", "/\x1b[31m.yaml"], [r"not '/\x1b[31m.yaml'"]),
        (["bench", "core", "--out", ""], ["--out takes a text that is not empty"]),
        (["bench", "x" * 5000], ["there is no benchmark 'xxx"]),
        (["plan", "--x\ny"], [r"there is no option --x\ny"]),
    ],
)
def test_refusals_are_one_short_line(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("stratakv: ")
    assert err.count("\n") == 1 and len(err) < 400 and "\x1b" not in err
    for part in parts:
        assert part in err


def test_a_variable_of_two_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRATAKV_A\nB", "1")
    assert main(["config", "show"]) == 2
    assert r"STRATAKV_A\nB is set and names no option" in capsys.readouterr().err


def test_a_cache_of_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name")
    assert main(["config", "show", "--kv-offload", "cpu,ssd"]) == 2
    assert "XDG_CACHE_HOME takes a path" in capsys.readouterr().err
