# SPDX-License-Identifier: Apache-2.0
"""A disk that goes while the tier is in use, and comes back: of two the other serves on, no byte is
wrong at any time, and what the disk held is found again without a restart.

With a loop device the file system itself goes (`PulledDisk`); without one its folder is moved away
and every read of it fails.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.contract import check_store_contract, make_keys, payload_of
from stratakv.tiers.errors import TierError
from stratakv.tiers.reopening_store import GONE, ReopeningStore
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.disk.slot_file import SlotFile
from stratakv.tiers.ssd.disk_array import Disk, SeveralDisks
from stratakv.tiers.ssd.index.index_file import IndexFile

from ..blocks import SMALL
from ..store_contract import SECONDS, fetch, put, wait_until
from .loop_disk import PulledDisk, why_not

MIB = 2**20
KEYS = make_keys(80)
RIGHT = [payload_of(key, SMALL) for key in KEYS]


def watched(path: Path) -> ReopeningStore:
    def open_it(create: bool) -> SsdStore:
        return SsdStore(path, SMALL, 2 * MIB, namespace=b"n", create=create)

    return ReopeningStore(
        "ssd", SMALL, open_it, open_it(True), look_seconds=0.02, first_pause_seconds=0.02
    )


class MovedFolder:
    """A disk without a loop device: `pull` moves the folder away, and reads and writes of files
    that were opened before fail."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / "mounted"
        self.path.mkdir()
        self._away = folder / "away"
        self._opened: list[object] = []
        self._monkeypatch = monkeypatch
        for owner in (SlotFile, IndexFile):
            self._note_opened(owner)

    def pull(self) -> None:
        self.path.rename(self._away)
        self.path.mkdir()  # the mount point, on another disk
        for name in ("start_read", "start_write", "sync"):
            self._let_fail(SlotFile, name)
        for name in ("put", "delete"):
            self._let_fail(IndexFile, name)

    def _note_opened(self, owner: type) -> None:
        real = owner.__init__

        def init(opened: object, path: Path, *arguments: Any) -> None:
            real(opened, path, *arguments)
            if path.is_relative_to(self.path):
                self._opened.append(opened)

        self._monkeypatch.setattr(owner, "__init__", init)

    def _let_fail(self, owner: type, name: str) -> None:
        """Of what is open there now."""
        real: Callable[..., Any] = getattr(owner, name)
        dead = list(self._opened)

        def call(opened: object, *arguments: Any) -> Any:
            if any(opened is each for each in dead):
                raise OSError(errno.EIO, "pulled out")
            return real(opened, *arguments)

        self._monkeypatch.setattr(owner, name, call)

    def put_back(self) -> None:
        assert not list(self.path.iterdir()), "nothing was made in the empty mount point"
        self.path.rmdir()
        self._away.rename(self.path)

    def close(self) -> None:
        pass


@pytest.fixture(params=["file system", "folder"])
def disk(
    request: pytest.FixtureRequest, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PulledDisk | MovedFolder]:
    if request.param == "folder":
        yield MovedFolder(memory_path, monkeypatch)
        return
    if why_not() is not None:
        pytest.skip(str(why_not()))
    try:
        made = PulledDisk(memory_path)
    except Exception as error:  # what a container forbids shows only when it is tried
        pytest.skip(f"a loop device cannot be mounted here: {error}")
    yield made
    made.close()


def test_one_of_two_goes_and_comes_back(
    disk: PulledDisk | MovedFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = watched(tmp_path / "a"), watched(disk.path / "b")
    tier = SeveralDisks([Disk("a", first), Disk("b", second)], SMALL)
    wrong: list[Any] = []
    ended = threading.Event()

    def read_on() -> None:
        """Loads and stores all the while; `fetch` fails for a byte that was not stored."""
        rng = random.Random(1)
        while not ended.is_set():
            some = rng.sample(KEYS, 16)
            try:
                fetch(tier, some)
                put(tier, rng.sample(KEYS, 4))
            except TierError as error:
                wrong.append(error)
            except AssertionError as error:
                wrong.append(error)

    reader = threading.Thread(target=read_on)
    try:
        assert all(put(tier, KEYS))
        on_first = [tier.disk_of(key) == 0 for key in KEYS]
        assert 10 < sum(on_first) < 70
        reader.start()
        disk.pull()
        wait_until(lambda: not second.is_up)
        found = fetch(tier, KEYS)
        assert [each is not None for each in found] == on_first, "the other serves on"
        assert tier.is_up and tier.stats().errors[GONE] == 1
        dropped = [key for key, is_first in zip(KEYS, on_first, strict=True) if not is_first][:3]
        tier.drop(dropped)
        disk.put_back()
        wait_until(lambda: second.is_up)
        ended.set()
        reader.join(SECONDS)
        found = fetch(tier, KEYS)
        there = [key for key, each in zip(KEYS, found, strict=True) if each is not None]
        assert len(there) >= len(KEYS) - 3 and all(put(tier, KEYS))
        assert fetch(tier, KEYS) == RIGHT
    finally:
        ended.set()
        reader.join(SECONDS)
        tier.close(SECONDS)
    assert not wrong
    assert [each.message for each in caplog.records if "is gone" in each.message] == [
        f"the disk of the SSD tier in {disk.path / 'b'} is gone; the tier goes on without it, and "
        "takes it in again when it is back"
    ]


def test_what_was_dropped_while_it_went_stays_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk never learned of it; the store that is opened again does."""

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "pulled out")

    store = watched(tmp_path / "a")
    try:
        assert all(put(store, KEYS))
        with monkeypatch.context() as patch:
            for owner, name in (
                (IndexFile, "delete"),
                (IndexFile, "put"),
                (SlotFile, "start_read"),
            ):
                patch.setattr(owner, name, broken)
            patch.setattr(SlotFile, "can_be_read", lambda _: False)
            assert store.drop(KEYS[:5]) == 5
            assert not store.wait_forgotten(SECONDS)
            wait_until(lambda: store.stats().errors.get(GONE) == 1)
        wait_until(lambda: store.is_up)
        assert store.lookup(KEYS[:9]) == [Answer.MISS] * 5 + [Answer.HIT] * 4
        assert fetch(store, KEYS) == [None] * 5 + RIGHT[5:]
        assert store.stats().stored_blocks == len(KEYS), "counters go on"
    finally:
        store.close(SECONDS)


def test_faults_of_a_disk_that_is_there_close_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector, a full disk."""
    store = watched(tmp_path / "a")
    try:
        assert all(put(store, KEYS))
        looks: list[bool] = []
        real = SsdStore.has_lost_disk
        monkeypatch.setattr(
            SsdStore, "has_lost_disk", lambda self: looks.append(real(self)) or looks[-1]
        )
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> None:
                raise OSError(errno.EIO, "a bad sector")

            patch.setattr(SlotFile, "start_read", fail)
            assert fetch(store, KEYS[:2]) == [None] * 2
        seen = len(looks)
        wait_until(lambda: len(looks) > seen + 1)
        assert not any(looks) and store.is_up and GONE not in store.stats().errors
        assert fetch(store, KEYS[2:]) == RIGHT[2:]
    finally:
        store.close(SECONDS)


def test_the_contract_of_a_store(tmp_path: Path) -> None:
    check_store_contract(watched(tmp_path / "a"))
