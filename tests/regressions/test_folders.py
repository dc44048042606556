# SPDX-License-Identifier: Apache-2.0
"""The SSD tier's folder: removed, moved or unmounted under a running store, and paths
that cannot be one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from stratakv.engine.cli.main import main
from stratakv.tiers import registry
from stratakv.tiers.contract import make_keys, payload_of
from stratakv.tiers.errors import TierConfigError, TierDown
from stratakv.tiers.reopening_store import GONE, ReopeningStore
from stratakv.tiers.ssd.folder.inventory import look_at
from stratakv.tiers.ssd.store import SsdStore
from stratakv.tiers.tier_settings import SsdSettings

from ..tiers.blocks import SMALL
from ..tiers.store_contract import SECONDS, fetch, put, wait_until

pytestmark = pytest.mark.regression
KEYS = make_keys(8)
RIGHT = [payload_of(key, SMALL) for key in KEYS]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "ssd"


@pytest.fixture
def store(path: Path) -> Iterator[ReopeningStore]:
    def open_it(create: bool) -> SsdStore:
        return SsdStore(path, SMALL, 2**20, create=create)

    made = ReopeningStore(
        "ssd", SMALL, open_it, open_it(True), look_seconds=0.005, first_pause_seconds=0.005
    )
    assert all(put(made, KEYS))
    yield made
    made.close(SECONDS)


def is_gone(store: ReopeningStore) -> bool:
    return store.stats().errors.get(GONE) == 1


def test_w05_a_folder_that_was_removed(
    store: ReopeningStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(path)
    wait_until(lambda: is_gone(store))
    assert not store.is_up
    assert store.stats().used_bytes == store.stats().capacity_bytes == 0
    assert put(store, KEYS) == [False] * len(KEYS), "nothing is taken that nobody finds again"
    assert fetch(store, KEYS) == [None] * len(KEYS)
    assert not path.exists(), "it is not made anew"
    assert caplog.text.count("is gone") == 1
    assert caplog.text.count(f"nothing is at {path}") == 1


@pytest.mark.parametrize("what", ["moved", "another in its place", "parent moved"])
def test_w05_a_folder_that_comes_back(store: ReopeningStore, path: Path, what: str) -> None:
    place = path.parent if what == "parent moved" else path
    away = place.with_name("away")
    place.rename(away)
    if what == "another in its place":
        SsdStore(path, SMALL, 2**20, namespace=b"others").close(SECONDS)
    wait_until(lambda: is_gone(store))
    assert not store.is_up
    if place.exists():
        shutil.rmtree(place)
    away.rename(place)
    wait_until(lambda: store.is_up)
    assert fetch(store, KEYS) == RIGHT


@pytest.mark.parametrize("name", ["lock", "blocks", "index"])
def test_w05_a_file_that_a_cleaner_took(store: ReopeningStore, path: Path, name: str) -> None:
    if name == "index":
        shutil.rmtree(path / name)
    else:
        (path / name).unlink()
    wait_until(lambda: is_gone(store))
    if name == "lock":  # by which a store is known
        (path / name).touch()
    wait_until(lambda: store.is_up)
    assert {*fetch(store, KEYS)} <= {None, *RIGHT}
    put(store, KEYS)
    assert fetch(store, KEYS) == RIGHT


def test_y13_a_look_reads_nothing_and_a_place_that_is_closed_to_us_stays(
    store: ReopeningStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = store.opened
    assert opened is not None
    real: Callable[[Path], os.stat_result] = Path.lstat
    looked: list[str] = []

    def refused(self: Path) -> os.stat_result:
        looked.append(self.name)
        if self.is_relative_to(path):
            raise PermissionError(13, "Permission denied")
        return real(self)

    monkeypatch.setattr("stratakv.tiers.ssd.disk.slot_file.SlotFile.can_be_read", None)
    monkeypatch.setattr(Path, "lstat", refused)
    assert not opened.has_lost_disk()
    assert {"lock", "blocks", "data.mdb"} <= set(looked)
    monkeypatch.setattr(Path, "lstat", real)


def made_at(path: Path) -> type[TierConfigError]:
    """How a store there is refused."""
    with pytest.raises(TierConfigError) as raised:
        SsdStore(path, SMALL, 2**20)
    return raised.type


def test_w07_what_passes_and_what_never_will(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "not mounted" / "disk")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "file").touch()
    passes = [tmp_path / "link", tmp_path / "link" / "ssd"]
    never = [
        tmp_path / "circle",
        tmp_path / "circle" / "ssd",
        tmp_path / "file",
        tmp_path / "file" / "ssd",
        tmp_path / ("n" * 300),
        Path("/proc/stratakv"),
    ]
    assert [made_at(path) for path in passes] == [TierDown] * len(passes)
    assert [made_at(path) for path in never] == [TierConfigError] * len(never)
    assert not (tmp_path / "not mounted").exists(), "nothing is made where a disk is to be"
    with pytest.raises(TierConfigError, match="circle: its links lead in a circle; name"):
        SsdStore(tmp_path / "circle", SMALL, 2**20)
    (tmp_path / "not mounted" / "disk").mkdir(parents=True)
    SsdStore(tmp_path / "link", SMALL, 2**20).close(SECONDS)


def test_w07_a_circle_of_links_is_a_setting_like_others(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    paths = SsdSettings(path=Path(f"{tmp_path}/circle,{tmp_path}/b")).paths
    assert len(paths) == 2


@pytest.mark.parametrize("code", [errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EROFS])
def test_w07_a_file_that_may_not_be_so_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert made_at(tmp_path / "ssd") is (TierConfigError if code == errno.EFBIG else TierDown)


def test_w07_a_tier_of_a_package_is_judged_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, kind in ((errno.ENAMETOOLONG, TierConfigError), (errno.EIO, TierDown)):

        def open_it(_: object, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        point = SimpleNamespace(load=lambda open_it=open_it: open_it, value="a:b")
        monkeypatch.setattr(registry, "find_entry", lambda *_, point=point: point)
        with pytest.raises(TierConfigError) as raised:
            registry.open_tier(registry.TierRequest("own", SMALL, b"", {}))
        assert raised.type is kind


def test_z12_what_is_used_of_what_is_reserved(
    path: Path, store: ReopeningStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.close(SECONDS)
    entry = look_at(path)
    assert entry.used_bytes == len(KEYS) * SMALL.page_bytes < entry.allocated_bytes
    assert main(["cache", "ls", str(path)]) == 0
    assert f"KiB used by {len(KEYS)} blocks" in capsys.readouterr().out
