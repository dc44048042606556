# SPDX-License-Identifier: Apache-2.0
"""Opens SSD stores for tests, and closes what they left open."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratakv.tiers.block import BlockLayout
from stratakv.tiers.ssd import SsdStore

from ..blocks import SMALL
from ..store_contract import SECONDS
from .nursery import Nursery
from .stores import Open, capacity_for


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: for kills, which lose no page of a file anyway."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="stratakv-test-", dir=shared) as folder:
        yield Path(folder)


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    """Children for crash tests; none is left behind."""
    made = Nursery(tmp_path)
    yield made
    made.close()


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """Opens stores in one directory, and closes what a test left open."""
    opened: list[SsdStore] = []

    def make(slots: int = 64, layout: BlockLayout = SMALL, **options: object) -> SsdStore:
        path = options.pop("path", tmp_path / "ssd")
        store = SsdStore(path, layout, capacity_for(slots, layout), **options)  # type: ignore[arg-type]
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close(SECONDS)
