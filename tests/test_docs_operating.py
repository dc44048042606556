# SPDX-License-Identifier: Apache-2.0
"""The pages for those who run it are followed as they stand, by a reader who has a tier, `tier`,
with a store of an earlier format set aside in it."""

from __future__ import annotations

import tarfile

import pytest

from .pages import ROOT, Reader, blocks

PAGES = ("docs/sizing.md", "docs/upgrading.md", "docs/troubles.md")


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
