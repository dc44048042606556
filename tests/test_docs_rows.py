# SPDX-License-Identifier: Apache-2.0
"""`docs/rows.md` is true: every feature row once, and every command it names can be run.

The commands are not run here, only looked up: a test that runs all tests would run them twice.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from stratakv.engine.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
ROWS_FILE = ROOT / "docs" / "rows.md"
COUNTS = {"A": 10, "B": 20, "C": 7, "D": 10, "E": 6, "F": 7, "G": 6, "H": 8, "I": 7}
STATES = {"open", "partly", "works"}


class Row(NamedTuple):
    """One line of a table."""

    name: str
    what: str
    state: str
    missing: str
    commands: tuple[str, ...]


@cache
def _rows() -> tuple[Row, ...]:
    rows = []
    for line in ROWS_FILE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if re.fullmatch(r"[A-I]\d+", cells[0]):
            assert len(cells) == 5, f"a row has five cells: {line}"
            name, what, state, missing, shown_by = cells
            commands = tuple(re.findall(r"`([^`]+)`", shown_by))
            rows.append(Row(name, what, state, missing, commands))
    return tuple(rows)


@cache
def _definitions(path: Path) -> frozenset[str]:
    """`name` and `Class::name` of everything a test file defines."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found.add(node.name)
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            found |= {f"{node.name}::{n.name}" for n in node.body if isinstance(n, functions)}
    return frozenset(found)


@cache
def _help(*subcommand: str) -> str:
    """What `stratakv SUBCOMMAND --help` prints."""
    said, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
        try:
            code: object = main([*subcommand, "--help"])
        except SystemExit as ended:
            code = ended.code
    assert not code, f"{shlex.join(subcommand)}: {wrong.getvalue()}"
    return said.getvalue()


def _check_pytest(arguments: list[str]) -> None:
    targets = [argument for argument in arguments if argument.startswith("tests")]
    assert targets, "names no test"
    for target in targets:
        file, _, name = target.partition("::")
        path = ROOT / file
        assert path.exists(), f"{file} does not exist"
        if name:
            plain = name.partition("[")[0]
            assert plain in _definitions(path), f"{file} defines no {plain}"


def _check_stratakv(arguments: list[str]) -> None:
    assert arguments, "names no subcommand"
    # `bench` is the one subcommand that has subcommands of its own.
    subcommand = arguments[:2] if arguments[0] == "bench" else arguments[:1]
    text = _help(*subcommand)
    for argument in arguments:
        if argument.startswith("--"):
            flag = argument.partition("=")[0]
            assert re.search(rf"{re.escape(flag)}(?![\w-])", text), f"{flag} is not in the help"


def _check_make(arguments: list[str]) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for argument in arguments:
        assert "=" in argument or argument in targets, f"make has no target {argument}"


KINDS = {"pytest": _check_pytest, "stratakv": _check_stratakv, "make": _check_make}


def _check(command: str) -> None:
    program, *arguments = shlex.split(command)
    assert program in KINDS, f"{program} is none of {', '.join(KINDS)}"
    KINDS[program](arguments)


def test_every_row_is_there_exactly_once_and_in_order() -> None:
    wanted = [f"{letter}{n + 1}" for letter, count in COUNTS.items() for n in range(count)]
    assert [row.name for row in _rows()] == wanted


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row.name)
def test_row_is_true(row: Row) -> None:
    assert row.what
    assert row.state in STATES
    assert bool(row.missing) == (row.state != "works"), "it works, or says what is missing"
    assert bool(row.commands) == (row.state != "open"), "a command if and only if it is not open"
    for command in row.commands:
        _check(command)


@pytest.mark.parametrize(
    "command",
    [
        "pytest tests/test_no_such_file.py",
        "pytest tests/test_docs_rows.py::test_no_such_name",
        "pytest -q",
        "make no-such-target",
        "curl localhost",
    ],
)
def test_a_false_command_is_seen(command: str) -> None:
    with pytest.raises(AssertionError):
        _check(command)


@pytest.mark.parametrize(
    "command",
    [
        "pytest tests/test_docs_rows.py",
        "pytest tests/test_docs_rows.py::test_a_true_command_passes[make]",
        "make test PYTEST_ARGS=-q",
    ],
)
def test_a_true_command_passes(command: str) -> None:
    _check(command)
