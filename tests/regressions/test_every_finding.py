# SPDX-License-Identifier: Apache-2.0
"""Each finding that the README of this folder names has a test that carries its id."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = [file.read_text() for file in HERE.parent.rglob("test_*.py")]
IDS = re.findall(r"^\| ([A-Za-z_]+)(\d+) \|", (HERE / "README.md").read_text(), re.MULTILINE)


def test_the_table_is_read() -> None:
    assert len(IDS) >= 30


@pytest.mark.parametrize(("letters", "number"), IDS, ids=["".join(each) for each in IDS])
def test_a_finding_has_a_test(letters: str, number: str) -> None:
    if letters == "gpu_review_":
        name = f"def test_gpu_review_{number}_"
    else:
        name = f"def test_{letters.lower()}{int(number):02}_"
    # What belongs to one part has its test with that part's.
    assert any(name in text for text in TESTS), f"no test is called {name[4:]}…"
