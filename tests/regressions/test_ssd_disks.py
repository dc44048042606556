# SPDX-License-Identifier: Apache-2.0
"""What an audit found in the SSD store, shown on real stores: full and read-only disks (T5), and
blocks that came back (T7)."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratakv.connector.build import build_offload
from stratakv.tiers.base import Answer, Stored
from stratakv.tiers.errors import TierConfigError, TierDown
from stratakv.tiers.reopening_store import ReopeningStore
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.folder import open_store as opening
from stratakv.tiers.ssd.store_check import check_store
from stratakv.tiers.tier_settings import CpuSettings, SsdSettings, TierSettings
from stratakv.tiers.wire.frames import State

from ..tiers.blocks import SMALL, filled_buffers, make_keys
from ..tiers.ssd.loop_disk import COMMAND_SECONDS, unmount
from ..tiers.ssd.stores import capacity_for
from ..tiers.store_contract import SECONDS, fetch, put, wait_until
from .one_tenant_store import keep, make_room

pytestmark = pytest.mark.regression

CAPACITY = capacity_for(256)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


# T5: a full and a read-only disk at a restart.


class Disk:
    """A file system in memory at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        with (self.path / "other").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def remount(self, how: str) -> None:
        command = ["mount", "-o", f"remount,{how}", str(self.path)]
        subprocess.run(command, check=True, timeout=COMMAND_SECONDS)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(folder)]
    done = subprocess.run(command, check=False, timeout=COMMAND_SECONDS, capture_output=True)
    if done.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {done.stderr.decode(errors='replace')}")
    yield Disk(folder)
    unmount(folder)


def test_t05_a_store_opens_again_on_a_full_disk(disk: Disk) -> None:
    """It wanted room for a second index, a note and the owner's number, and refused for good."""
    keys = make_keys(20)
    for _ in range(2):
        store = SsdStore(disk.path / "ssd", SMALL, CAPACITY)
        assert all(put(store, keys))
        store.close(SECONDS)
    disk.fill()
    for _ in range(2):
        store = SsdStore(disk.path / "ssd", SMALL, CAPACITY)
        assert None not in fetch(store, keys)
        more = make_keys(5, "more")
        assert all(put(store, more))
        store.clear()
        assert store.wait_forgotten(SECONDS)
        assert all(put(store, keys))
        store.close(SECONDS)
    assert check_store(disk.path / "ssd").is_clean


def test_t05_a_damaged_index_on_a_full_disk_makes_room_for_another(disk: Disk) -> None:
    store = SsdStore(disk.path / "ssd", SMALL, CAPACITY)
    store.close(SECONDS)
    data = disk.path / "ssd" / "index" / "data.mdb"
    with data.open("r+b") as file:
        file.write(b"not an index" * 1000)
    disk.fill()
    store = SsdStore(disk.path / "ssd", SMALL, CAPACITY)
    assert store.stats().errors == {"index_set_aside": 1}
    assert all(put(store, make_keys(5)))
    store.close(SECONDS)
    assert not list((disk.path / "ssd").glob("index.bad-*"))


def test_t05_no_room_for_the_files_is_down_and_not_refused_for_good(disk: Disk) -> None:
    disk.fill()
    with pytest.raises(TierDown):
        SsdStore(disk.path / "ssd", SMALL, CAPACITY)
    with pytest.raises(TierConfigError, match="lower its size") as caught:
        SsdStore(disk.path.parent / "ssd", SMALL, 2**60)
    assert not isinstance(caught.value, TierDown), "no disk is so large"


def test_t05_a_read_only_disk_is_down(disk: Disk) -> None:
    store = SsdStore(disk.path / "ssd", SMALL, CAPACITY)
    store.close(SECONDS)
    disk.remount("ro")
    with pytest.raises(TierDown):
        SsdStore(disk.path / "ssd", SMALL, CAPACITY)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("name", ["posix_fallocate", "ftruncate", "fsync"])
def test_t05_what_a_disk_refuses_at_a_restart_is_down(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int, name: str
) -> None:
    keys = make_keys(5)
    store = SsdStore(path, SMALL, CAPACITY)
    assert all(put(store, keys))
    store.close(SECONDS)
    with monkeypatch.context() as patch:

        def refuse(*_: Any) -> None:
            raise OSError(code, os.strerror(code))

        patch.setattr(os, name, refuse)
        with pytest.raises(TierDown):
            SsdStore(path, SMALL, CAPACITY)
    store = SsdStore(path, SMALL, CAPACITY)
    assert None not in fetch(store, keys)
    store.close(SECONDS)


def test_t05_a_room_starts_without_its_store_and_takes_it_in(disk: Disk) -> None:
    """The tenant's memory was gone with the disk."""
    keys = make_keys(8)
    tenant_stores, tenant_store = make_room(disk.path / "stores")
    assert keep(tenant_store, keys) == [State.KEPT] * 8
    assert tenant_stores.close(SECONDS)
    disk.remount("ro")
    tenant_stores, tenant_store = make_room(disk.path / "stores")
    assert tenant_store.lookup(keys) == [State.MISS] * 8
    fresh = make_keys(4, "fresh")
    assert keep(tenant_store, fresh) == [State.KEPT] * 4
    assert tenant_store.lookup(fresh) == [State.HIT] * 4
    assert tenant_store.stats()["ssd"].errors["down"]
    disk.remount("rw")
    wait_until(lambda: tenant_store.lookup(keys) == [State.HIT] * 8)
    read_lease = tenant_store.begin_load(keys)
    tenant_store.wait_loaded(read_lease, time.monotonic() + SECONDS)
    assert None not in read_lease.slots
    tenant_store.end_load(read_lease)
    assert tenant_stores.close(SECONDS)


# T7: what was forgotten comes back.

KILLED = """
import os, signal, sys
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.contract import make_keys, put
from stratakv.tiers.ssd import SsdStore
path, capacity, how, count = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
layout = BlockLayout(num_layers=1, block_size=16, num_kv_heads=1, head_dim=32, kv_dtype="float32")
store, keys = SsdStore(path, layout, capacity), make_keys(count)
assert all(put(store, keys))
if how == "clear":
    store.clear()
else:
    assert store.drop(keys) == count
assert store.wait_forgotten(30.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def forget_and_die(path: Path, how: str, count: int) -> None:
    command = [sys.executable, "-c", KILLED, str(path), str(CAPACITY), how, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -9, done.stderr


@pytest.mark.parametrize("how", ["clear", "drop"])
def test_t07_a_kill_after_forgetting_brings_nothing_back(path: Path, how: str) -> None:
    keys = make_keys(200)
    forget_and_die(path, how, 200)
    assert check_store(path).is_clean
    store = SsdStore(path, SMALL, CAPACITY)
    assert store.lookup(keys) == [Answer.MISS] * 200
    assert all(put(store, keys[:50])), "the same blocks may be kept again"
    store.close(SECONDS)
    store = SsdStore(path, SMALL, CAPACITY)
    assert store.lookup(keys).count(Answer.HIT) == 50
    store.close(SECONDS)


@pytest.mark.parametrize("how", ["clear", "drop"])
def test_t07_a_lost_index_made_again_brings_nothing_back(path: Path, how: str) -> None:
    keys = make_keys(32)
    forget_and_die(path, how, 32)
    shutil.rmtree(path / "index")
    result = check_store(path, fix=True)
    assert result.orphans == result.rebuilt_rows == 0
    store = SsdStore(path, SMALL, CAPACITY)
    assert store.lookup(keys) == [Answer.MISS] * 32
    assert all(put(store, keys[:10]))
    store.close(SECONDS)
    shutil.rmtree(path / "index")
    assert check_store(path, fix=True).rebuilt_rows == 10, "what came later is found"
    store = SsdStore(path, SMALL, CAPACITY)
    assert None not in fetch(store, keys[:10])
    store.close(SECONDS)


def test_t07_what_was_being_written_is_forgotten_too(path: Path) -> None:
    """In the queue, with the disk, or before its commit."""
    keys = make_keys(150)
    store = SsdStore(path, SMALL, CAPACITY)
    futures = [store.store([key], filled_buffers([key], SMALL)) for key in keys]
    store.drop(keys[:75])
    assert store.wait_forgotten(SECONDS)
    for future in futures[75:]:
        assert future.result(SECONDS) == [Stored.KEPT]
    rows = {row.key for row in store._opened.index_file.iter_rows()}
    assert not rows & set(keys[:75])
    more = make_keys(100, "more")
    futures = [store.store([key], filled_buffers([key], SMALL)) for key in more]
    store.clear()
    assert store.wait_forgotten(SECONDS)
    cleared_up_to = opening.read_note(path).cleared_up_to
    for future in futures:
        future.result(SECONDS)
    wait_until(lambda: not store._state.index.has_leaving)
    assert store.lookup(keys + more) == [Answer.MISS] * 250
    assert all(row.generation <= cleared_up_to for row in store._opened.index_file.iter_rows())
    store.close(SECONDS)


def test_t07_a_disk_that_fails_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SsdStore(path, SMALL, CAPACITY)
    assert all(put(store, make_keys(5)))

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(opening, "write_note", fail)
        store.clear()
        assert not store.wait_forgotten(SECONDS)
    assert store.wait_forgotten(SECONDS), "the next one to wait has it tried again"
    store.close(SECONDS)
    assert not store.wait_forgotten(SECONDS)


def test_t07_a_room_answers_when_it_is_durable(tmp_path: Path) -> None:
    """What the server's Delete calls."""
    keys = make_keys(40)
    tenant_stores, tenant_store = make_room(tmp_path)
    for start in range(0, 40, 4):
        keep(tenant_store, keys[start : start + 4])
        wait_until(lambda: not tenant_store._hierarchy._write_backs.in_flight)
    [watched] = tenant_store._stores
    assert isinstance(watched, ReopeningStore)
    store = watched.opened
    assert store is not None and store.stats().blocks
    assert tenant_store.drop(keys[:10]) == 10
    rows = list(store._opened.index_file.iter_rows())
    known = {row.key for row in rows}
    assert known and not known & set(tenant_store._salt.salt_keys(keys[:10]))
    tenant_store.clear()
    note = opening.read_note(next(tmp_path.glob("*/identity")).parent)
    assert note.cleared_up_to >= max(row.generation for row in rows)
    assert tenant_stores.close(SECONDS)


def test_t07_a_reset_of_the_engine_answers_when_it_is_durable(path: Path) -> None:
    """What `/reset_prefix_cache?tiers=all` calls."""
    ssd = SsdSettings(path=path, capacity_bytes=16 * 1024**2)
    settings = TierSettings(
        cpu=CpuSettings(capacity_bytes=64 * SMALL.slot_bytes, populate_threads=1), ssd=ssd
    )
    scheduler, worker = build_offload(SMALL, settings, namespace=b"test")
    [watched] = scheduler._hierarchy.stores
    assert isinstance(watched, ReopeningStore)
    store = watched.opened
    assert store is not None and all(put(store, make_keys(20)))
    last = max(row.generation for row in store._opened.index_file.iter_rows())
    scheduler.reset()
    assert opening.read_note(path).cleared_up_to >= last
    scheduler.shutdown(SECONDS)
    worker.shutdown()
