# SPDX-License-Identifier: Apache-2.0
"""Findings about processes that are started: what they import, and from where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stratakv.engine.cli.checks.python import PROBE
from stratakv.tiers.processes.python_command import python_command, spawn_context

pytestmark = pytest.mark.regression
SECONDS = 60.0


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory has files in place of packages; the path of one that is there once any
    of them has run."""
    mark = tmp_path / "executed"
    for name in ("json", "msgspec", "multiprocessing", "importlib", "os"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\nraise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    return mark


def test_y02_a_python_that_is_started_imports_nothing_of_the_working_directory(
    trap: Path,
) -> None:
    for words in (("-c", "import json"), ("-m", "json.tool", "--help")):
        done = subprocess.run(
            python_command(*words), capture_output=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0 and not trap.exists(), done.stderr


def test_y02_nor_does_the_probe_of_another_python(trap: Path) -> None:
    """Which may be too old for -P: it takes the folder from its path itself, before it imports."""
    code = PROBE.read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", code, '{"modules": [], "host": null}'],
        capture_output=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and not trap.exists(), done.stderr


def test_y02_nor_does_a_child_of_multiprocessing(
    trap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with spawn_context() as context:
        child = context.Process(target=os.getpid)
        child.start()
    assert "PYTHONSAFEPATH" not in os.environ, "what is started later is another matter"
    child.join(SECONDS)
    assert child.exitcode == 0 and not trap.exists()
