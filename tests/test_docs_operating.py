# SPDX-License-Identifier: Apache-2.0
"""The pages for those who run it are followed as they stand; what other pages show can be given.

The reader of these three has a tier, `tier`, with a store of an earlier format set aside in it.
"""

from __future__ import annotations

import importlib
import re
import shlex
import tarfile

import pytest

from stratakv.engine.cli.args import Parser
from stratakv.engine.cli.main import COMMANDS

from .pages import ROOT, Reader, blocks

PAGES = ("docs/sizing.md", "docs/upgrading.md", "docs/troubles.md")
# Whose commands run: `test_docs_tutorials.py`, `test_readme.py` and here.
RUN = {*PAGES, "README.md", "docs/commands.md"}
SHOWN = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (".", "docs", "deploy")
    for path in (ROOT / folder).glob("*.md")
    if path.name not in ("LOG.md", "CHANGELOG.md")
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    home = tmp_path_factory.mktemp("home")
    recorded = ROOT / "tests" / "tiers" / "ssd" / "recorded"
    for name, folder in (("format-3", "tier"), ("format-2", "tier/format-2")):
        with tarfile.open(recorded / f"{name}.tar.xz") as file:
            file.extractall(home / folder, filter="data")
    return Reader(home)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(reader: Reader, page: str) -> None:
    done = 0
    try:
        for block in blocks(page):
            reader.do(block)
            done += block.language == "sh"
    finally:
        reader.stop()
    assert done >= 2


@pytest.mark.slow
def test_the_tier_that_is_kept_is_gone_when_the_page_says_so(reader: Reader) -> None:
    """After `docs/upgrading.md`."""
    assert not (reader.home / "tier" / "format-2").exists()
    assert (reader.home / "tier" / "blocks").exists()


def shown(page: str) -> list[str]:
    """The lines of a page's blocks, and of its indented examples, that are commands of ours."""
    text = (ROOT / page).read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)
    lines = "\n".join([*fenced, *indented]).replace("\\\n", " ").splitlines()
    words = (line.strip().removeprefix("$ ") for line in lines)
    return [line for line in words if re.match(r"(\w+=\S+ )*stratakv [a-z]", line)]


@pytest.mark.parametrize("page", SHOWN)
def test_commands_that_a_page_shows_can_be_given(page: str) -> None:
    """Also those that are not run, because they need a model, a GPU, vLLM or other hosts: the
    command and every flag of them exist."""
    for line in shown(page):
        words = shlex.split(re.sub(r"\s[|>&].*|\s#.*|;.*", "", line), comments=True)
        words = [word for word in words if word not in ("…", "...")]
        name, *given = words[words.index("stratakv") + 1 :]
        if any("[" in word for word in given):
            continue  # a synopsis
        assert name in COMMANDS, line
        command = importlib.import_module(f"stratakv.engine.cli.{name.replace('-', '_')}")
        parser = Parser(prog=f"stratakv {name}", description=command.DESCRIPTION)
        command.add_arguments(parser)
        _, unknown = parser.parse_known_args(given)
        assert not unknown, f"{line}: {unknown}"


def test_the_pages_with_commands_are_found() -> None:
    assert len([page for page in SHOWN if shown(page)]) >= 8
    assert all(shown(page) for page in RUN)
