# SPDX-License-Identifier: Apache-2.0
"""Every link and picture of the documents leads to a file, and to a heading where it names one."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from .pages import FOLDERS
from .test_static_rules import sources

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))


def _anchors(page: Path) -> set[str]:
    """What headings are called in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in _anchors(path), target


def test_the_pages_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "tiers.md"} <= {page.name for page in PAGES}


def test_every_result_is_told_of() -> None:
    told = (ROOT / "docs" / "figures.md").read_text()
    results = [path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    assert results and [name for name in results if name not in told] == []


def test_the_glossary_has_at_most_25_words() -> None:
    rows = re.findall(r"^\| (?!word|-)", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert 10 <= len(rows) <= 25


# Paths in backticks: `tiers/base.py`, `tests/tiers/remote`, `engine/request/request.py: Name`. The
# move map names past paths too.
PAST = {"moves.md"}
TOPS = ("benchmarks", "connector", "deploy", "docs", "engine", "kernels", "proto", "tests", "tiers")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in PAST], ids=lambda page: page.stem
)
def test_paths_that_pages_name_are_there(page: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(TOPS)})/[\w./-]*)(?::[^`]*)?`", page.read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_the_move_map_leads_to_what_is_there() -> None:
    rows = re.findall(
        r"^\| `([^`]+)` \| `([^`]+)` \|$", (ROOT / "docs" / "moves.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 60
    assert [old for old, new in rows if not (ROOT / new).is_file()] == []


def test_a_name_on_the_pages_of_the_house_is_borne_by_one_class() -> None:
    """So `grep "class NAME"` follows a block's way from there."""
    borne = Counter(
        node.name
        for path in sources()
        if path.parts[0] in ("connector", "engine", "kernels", "tiers")
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.ClassDef)
    )
    for page in ("architecture.md", "life-of-a-block.md"):
        text = (ROOT / "docs" / page).read_text()
        named = set(re.findall(r"`([A-Z][a-z]+[A-Za-z]*)`", text))
        drawn = {word for word in re.findall(r"\b[A-Z][a-z]+[A-Za-z]*\b", text) if borne[word]}
        assert named and {name: borne[name] for name in named | drawn if borne[name] != 1} == {}
