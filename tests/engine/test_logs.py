# SPDX-License-Identifier: Apache-2.0
"""Log lines in both forms: one record never looks like two, and JSON parses line by line."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from stratakv.engine.logs import JsonFormatter, TextFormatter, adopt, short_name

# Runs as a program of its own, since logging is set up once for a process.
PROGRAM = """
import logging, sys, warnings
from stratakv.engine import logs
logs.set_up(sys.argv[1], json=sys.argv[2] == "json")
logger = logging.getLogger("stratakv.engine.cli.serve")
logger.debug("too low")
logger.info("%s lines\\nof text", "two")
try:
    {}["key"]
except KeyError:
    logger.exception("it failed")
warnings.warn("mind this")
logs.announce("ready")
"""


def run(level: str, form: str) -> tuple[str, list[str]]:
    """Standard output, and the lines on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, level, form],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    return done.stdout, done.stderr.splitlines()


def test_json_parses_line_by_line() -> None:
    out, lines = run("info", "json")
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert [record["level"] for record in records] == ["info", "error", "warning"]
    first, failed, warned = records
    assert first["logger"] == "cli.serve"
    assert first["message"] == "two lines\nof text"
    assert "exception" not in first
    age = datetime.now(UTC) - datetime.fromisoformat(first["time"])
    assert abs(age.total_seconds()) < 60
    assert failed["message"] == "it failed"
    assert failed["exception"].startswith("Traceback (most recent call last):\n")
    assert failed["exception"].endswith("KeyError: 'key'")
    assert "mind this" in warned["message"]
    assert json.loads(out)["message"] == "ready"


def test_text_is_for_people_and_shows_where_a_record_begins() -> None:
    out, lines = run("info", "text")
    begins = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ([A-Z]+) (\S+): (.*)")
    assert out == "ready\n"
    found = [match.groups() for line in lines if (match := begins.fullmatch(line))]
    assert found[0] == ("INFO", "cli.serve", "two lines")
    assert found[1] == ("ERROR", "cli.serve", "it failed")
    assert [level for level, *_ in found] == ["INFO", "ERROR", "WARNING"]
    assert lines[1] == "    of text"
    assert all(begins.fullmatch(line) or line.startswith("    ") for line in lines)


def test_a_level_leaves_out_what_is_below_it() -> None:
    assert [json.loads(line)["level"] for line in run("error", "json")[1]] == ["error"]


def record_of(message: str) -> logging.LogRecord:
    return logging.LogRecord("stratakv.tiers.ssd.index", logging.INFO, "", 1, message, None, None)


def test_text_that_is_no_unicode() -> None:
    """A file name of other bytes becomes surrogates, which UTF-8 has no bytes for."""
    line = JsonFormatter().format(record_of("name \udcff"))
    assert json.loads(line)["message"] == "name \\udcff"


def test_a_stack_is_part_of_the_record() -> None:
    record = record_of("here")
    record.stack_info = "Stack (most recent call last):\n  f()"
    assert json.loads(JsonFormatter().format(record))["exception"] == record.stack_info
    assert (
        TextFormatter()
        .format(record)
        .endswith("INFO tiers.ssd.index: here\n    Stack (most recent call last):\n      f()")
    )


@pytest.mark.parametrize(
    ("name", "short"),
    [("stratakv.engine.core.loop", "core.loop"), ("stratakv.tiers.dram", "tiers.dram"),
     ("uvicorn.error", "uvicorn"), ("asyncio", "asyncio"), ("stratakvx.y", "stratakvx.y")],
)  # fmt: skip
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


def test_a_library_writes_no_lines_of_its_own_form() -> None:
    library = logging.getLogger("stratakv_test_library")
    library.addHandler(logging.NullHandler())
    library.propagate = False
    adopt("stratakv_test_library")
    assert (library.handlers, library.propagate) == ([], True)
