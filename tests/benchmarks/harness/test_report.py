# SPDX-License-Identifier: Apache-2.0
"""Reports of benchmarks: the commit that they are of, and their tables."""

from __future__ import annotations

import pytest

from stratakv.benchmarks.harness.report import environment, print_table


def test_the_commit_is_the_one_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAKV_COMMIT", " 0123abc-dirty ")
    assert environment()["commit"] == "0123abc-dirty"


def test_without_one_git_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRATAKV_COMMIT", raising=False)
    monkeypatch.setenv("GIT_DIR", "/nowhere/at/all")
    assert environment()["commit"] == ""


def test_a_row_of_a_table_is_one_line_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    columns = ["what", *(f"figure {number}" for number in range(12))]
    print_table("A table", columns, [["a name of six words here", *["1,234,567.89"] * 12]])
    row = next(line for line in capsys.readouterr().out.splitlines() if "six words" in line)
    assert row.count("1,234,567.89") == 12
