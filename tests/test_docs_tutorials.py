# SPDX-License-Identifier: Apache-2.0
"""The tutorials are followed as they stand: commands, programs, and what should come out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from .pages import ROOT, Reader, blocks

# A few seconds each on a quiet machine, most of them the starts of engines.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FOLDER = "docs/tutorials"
PAGES = sorted(path.name for path in (ROOT / FOLDER).glob("*.md"))
# Page → the page whose files its reader has beside: names of files.
FILES_OF: Mapping[str, tuple[str, str]] = {"shared-cache.md": ("cpu-and-ssd.md", "ask.py")}


@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_does_what_it_says(page: str, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    other, name = FILES_OF.get(page, ("", ""))
    done = 0
    try:
        if other:
            [brought] = [each for each in blocks(f"{FOLDER}/{other}") if each.file_name == name]
            reader.do(brought)
        for block in blocks(f"{FOLDER}/{page}"):
            reader.do(block)
            done += block.language in ("sh", "python", "text")
    finally:
        reader.stop()
    assert done >= 5, "a tutorial with next to nothing to do"


def test_every_tutorial_is_there() -> None:
    assert set(PAGES) == {
        "cpu-and-ssd.md", "shared-cache.md", "write-a-tier.md", "write-an-eviction-policy.md",
    }  # fmt: skip
