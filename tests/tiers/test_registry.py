# SPDX-License-Identifier: Apache-2.0
"""Tiers of other packages are found by entry point; what is wrong with one is said by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratakv.tiers.contract import check_store_contract
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.registry import TierRequest, installed_tiers, open_tier

from .blocks import ODD, SMALL

MODULE = """
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.testing.memory_store import MemoryStore

def open_tier(request):
    if "blocks" not in request.options:
        raise TierConfigError("the tier shelf needs the option blocks=N")
    size = int(request.options["blocks"]) * request.layout.page_bytes
    return MemoryStore(request.layout, size, name=request.name)

def broken(request):
    raise RuntimeError("no connection")

def nonsense(request):
    return {}

def other_layout(request):
    return MemoryStore(BlockLayout(2, 2, 2, 2, "float16"), 2**20)
"""
POINTS = """[stratakv.tiers]
shelf = shelf_tier:open_tier
broken = shelf_tier:broken
nonsense = shelf_tier:nonsense
elsewhere = shelf_tier:other_layout
missing = no_such_module_of_ours:open_tier
twice = shelf_tier:open_tier
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two installed packages, as pip leaves them on the path."""
    (tmp_path / "shelf_tier.py").write_text(MODULE)
    for name, points in (("shelf", POINTS), ("other", "[stratakv.tiers]\ntwice = other:open\n")):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("shelf_tier", None)


def request(name: str, **options: str) -> TierRequest:
    return TierRequest(name, ODD, b"namespace", options)


def test_a_tier_is_listed_without_being_imported_and_opened_by_name() -> None:
    assert {"shelf", "broken", "missing"} <= set(installed_tiers())
    assert "shelf_tier" not in sys.modules
    store = open_tier(request("shelf", blocks="64"))
    assert (store.name, store.layout) == ("shelf", ODD)
    check_store_contract(store)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shelf", "the tier shelf needs the option blocks=N"),
        ("nowhere", "there is no tier 'nowhere'; there are: cpu, ssd, .*shelf"),
        ("broken", r"the tier broken \(shelf_tier:broken\) could not be opened: .*no connection"),
        ("missing", "the tier missing .* could not be opened: ModuleNotFoundError"),
        ("nonsense", "returned dict; expected a StoreTier"),
        ("elsewhere", "has the layout .*; expected BlockLayout"),
        ("twice", "several packages bring the tier 'twice'"),
    ],
)
def test_what_is_wrong_with_a_tier_is_said(name: str, message: str) -> None:
    assert SMALL != ODD
    with pytest.raises(TierConfigError, match=message):
        open_tier(request(name))
