# SPDX-License-Identifier: Apache-2.0
"""What `make env` has uv install, and from where."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).resolve().parent.parent / "tools" / "install_dependencies.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_dependencies", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_extras_bring_those_that_they_name(tool: ModuleType) -> None:
    project = {
        "name": "ours",
        "dependencies": ["a>=1"],
        "optional-dependencies": {"x": ["b", "ours[y,z]"], "y": ["c; python_version>'3'"], "z": []},
    }
    assert [*tool.requirements(["x"], project)] == ["a>=1", "b", "c; python_version>'3'"]
    assert [*tool.requirements([], project)] == ["a>=1"]


def test_uv_takes_the_indexes_that_pip_takes(tool: ModuleType) -> None:
    listed = """:env:.find-links='/of the environment'
global.cert='/etc/certs.pem'
global.extra-index-url='file:///one file:///two'
global.find-links='/of-the-file'
global.index-url='https://host/simple?a=b'
install.no-index='true'
global.timeout='9'"""
    assert tool.settings(listed) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/of,the,environment",  # pip splits it at blanks too
        "SSL_CERT_FILE": "/etc/certs.pem",
        "UV_INDEX": "file:///one file:///two",
        "UV_DEFAULT_INDEX": "https://host/simple?a=b",
        "UV_NO_INDEX": "true",
    }


def test_what_fails_is_told_and_left_to_pip(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        if "uv" in command:
            raise subprocess.CalledProcessError(2, command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(tool.subprocess, "run", run)
    monkeypatch.setattr(tool, "has_uv", lambda: False)
    monkeypatch.setattr(sys, "argv", ["", "test"])
    assert tool.main() == 1, "then pip installs what ours needs"
    assert [command[1:5] for command in asked] == [
        ["-P", "-m", "pip", "config"],
        ["-P", "-m", "pip", "install"],
        ["-P", "-m", "uv", "pip"],
    ]
    assert any(each.startswith("torch") for each in asked[-1])
    assert "pip installs everything" in capsys.readouterr().err


def test_one_requirement_goes_into_a_folder_alone(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(tool.subprocess, "run", run)
    monkeypatch.setattr(tool, "has_uv", lambda: True)
    monkeypatch.setattr(sys, "argv", ["", "--into", "folder", "triton==3.6.0"])
    assert tool.main() == 0
    assert [command[3] for command in asked] == ["pip", "uv"]
    assert asked[-1][-4:] == ["--no-deps", "--target", "folder", "triton==3.6.0"]
