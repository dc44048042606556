# SPDX-License-Identifier: Apache-2.0
"""Reports of benchmarks: the commit that they are of."""

from __future__ import annotations

import pytest

from stratakv.benchmarks.harness.report import environment


def test_the_commit_is_the_one_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAKV_COMMIT", " 0123abc-dirty ")
    assert environment()["commit"] == "0123abc-dirty"


def test_without_one_git_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRATAKV_COMMIT", raising=False)
    monkeypatch.setenv("GIT_DIR", "/nowhere/at/all")
    assert environment()["commit"] == ""
