# SPDX-License-Identifier: Apache-2.0
"""What an audit found in the SSD store, shown on real stores: threads that failed (T3), and small
findings (T13). Disks and forgetting are in `test_ssd_disks.py`."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.errors import TierConfigError, TierDown
from stratakv.tiers.remote.transfer_queue import RemoteLate
from stratakv.tiers.remote.transfers import Transfer, Transfers
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.disk import slot_file
from stratakv.tiers.ssd.disk.disk_queue import AioContext
from stratakv.tiers.ssd.disk.io_pool import IoLane
from stratakv.tiers.ssd.folder import guard
from stratakv.tiers.ssd.folder import open_store as opening
from stratakv.tiers.ssd.index import index_file
from stratakv.tiers.ssd.index.index_file import IndexFile
from stratakv.tiers.ssd.index.row_writer import RowWriter
from stratakv.tiers.ssd.store_check import check_store
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.sockets import ConnectionLost

from ..tiers.blocks import SMALL, make_buffers, make_keys
from ..tiers.ssd.stores import capacity_for
from ..tiers.store_contract import SECONDS, fetch, put, wait_until
from .one_tenant_store import keep, make_room

pytestmark = pytest.mark.regression

SLOTS = 256
CAPACITY = capacity_for(SLOTS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def open_store(path: Path) -> Iterator[Callable[..., SsdStore]]:
    opened: list[SsdStore] = []

    def make(**options: Any) -> SsdStore:
        opened.append(SsdStore(path, SMALL, CAPACITY, **options))
        return opened[-1]

    yield make
    for store in opened:
        store.close(SECONDS)


def ends(future: Future[Any]) -> Any:
    return future.result(SECONDS)


# T3: a failed mmap, and threads that meet what nobody foresaw.


class NoMemory:
    """In the place of `mmap`, in one module: the next calls fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def mmap(self, *arguments: Any) -> mmap.mmap:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return mmap.mmap(*arguments)


def test_t03_loads_without_memory_for_pages_are_misses(
    open_store: Callable[..., SsdStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread died, its loads never ended, and their queue places were lost."""
    keys = make_keys(40)
    store = open_store(io_threads=1)
    assert all(put(store, keys))
    memory = NoMemory(2)
    monkeypatch.setattr(slot_file, "mmap", memory)
    assert ends(store.load(keys[:1], make_buffers(1, SMALL))) == [None]
    assert ends(store.load(keys, make_buffers(40, SMALL))).count(None) <= 1
    assert memory.failures == 0
    assert None not in fetch(store, keys), "later loads work, and nothing was forgotten"
    assert store.stats().errors == {"ENOMEM": 1}, "neighbours were tried once more, one by one"
    assert not store._reader.queued_blocks
    assert not any(store._state.index._pins)


def test_t03_stores_without_memory_for_pages_are_refused(
    open_store: Callable[..., SsdStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(40)
    store = open_store(io_threads=1)
    monkeypatch.setattr(slot_file, "mmap", NoMemory(1))
    assert put(store, keys[:1]) == [False]
    assert all(put(store, keys))
    assert None not in fetch(store, keys)
    assert not store._writer.queue.num_blocks


@pytest.mark.parametrize("name", ["turn", "submit_runs", "_finish"])
def test_t03_an_io_thread_that_fails_ends_what_it_has_in_hand(
    open_store: Callable[..., SsdStore], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    keys = make_keys(60)
    store = open_store(io_threads=1)
    assert all(put(store, keys))
    real, failures = getattr(IoLane, name), [MemoryError("as asked")]

    def fail(queue: IoLane, *arguments: Any) -> Any:
        result = real(queue, *arguments) if name == "submit_runs" else None
        if failures:
            raise failures.pop()
        return real(queue, *arguments) if name != "submit_runs" else result

    monkeypatch.setattr(IoLane, name, fail)
    found = ends(store.load(keys, make_buffers(60, SMALL)))
    assert len(found) == 60 and not failures
    assert None not in fetch(store, keys)
    assert not store._reader.queued_blocks
    assert not any(store._state.index._pins)
    store.close(SECONDS)
    assert not any(thread.is_alive() for thread in store._reader._pool._threads)


def test_t03_no_lane_can_be_opened(
    open_store: Callable[..., SsdStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(9)
    with monkeypatch.context() as patch:

        def no_queue(*_: Any) -> Any:
            raise MemoryError("as asked")

        patch.setattr(slot_file, "open_queue", no_queue)
        store = open_store()
        assert put(store, keys) == [False] * 9
    assert put(store, keys) == [True] * 9
    assert None not in fetch(store, keys)


@pytest.mark.parametrize("name", ["remove_leaving", "commit"])
def test_t03_the_writer_goes_on(
    open_store: Callable[..., SsdStore], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    keys = make_keys(30)
    store = open_store()
    assert all(put(store, keys[:10]))
    real, failed = getattr(RowWriter, name), []

    def fail(rows: RowWriter, *arguments: Any) -> Any:
        if not failed:
            failed.append(name)
            raise MemoryError("as asked")
        return real(rows, *arguments)

    monkeypatch.setattr(RowWriter, name, fail)
    monkeypatch.setattr("stratakv.tiers.ssd.writer._PAUSE_SECONDS", 0.01)
    store.drop(keys[:1])
    if name == "commit":
        put(store, keys[10:20])
    wait_until(lambda: failed)
    assert put(store, keys[20:]) == [True] * 10
    assert None not in fetch(store, keys[20:])
    assert store.stats().errors == {"MemoryError": 1}


def test_t03_the_keeper_of_a_room_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it no read from the disk ever ends."""
    caplog.set_level(logging.CRITICAL)
    keys = make_keys(40)
    tenant_stores, tenant_store = make_room(tmp_path)
    for start in range(0, 40, 4):
        assert keep(tenant_store, keys[start : start + 4]) == [State.KEPT] * 4
        wait_until(lambda: not tenant_store._hierarchy._write_backs.in_flight)
    assert tenant_store.lookup(keys[:2]) == [State.HIT] * 2
    failures = [MemoryError("as asked")] * 3
    real = tenant_store._hierarchy.poll

    def poll() -> bool:
        if failures and threading.current_thread().name == "stratakv-tenant-store":
            raise failures.pop()
        return real()

    monkeypatch.setattr(tenant_store._hierarchy, "poll", poll)
    tenant_store._woken.set()
    wait_until(lambda: not failures)
    read_lease = tenant_store.begin_load(keys[:2])
    tenant_store.wait_loaded(read_lease, time.monotonic() + SECONDS)
    assert None not in read_lease.slots
    tenant_store.end_load(read_lease)
    assert tenant_store.stats()["cpu"].errors == {"keeper": 3}
    assert tenant_stores.close(SECONDS)


# T13: the small ones.


class Connection:
    """Stands for one that `move` loses."""

    is_fallback = False
    corrupt_blocks = 0

    def close(self) -> None:
        """Nothing is open."""


class Link:
    address = "grpc://nowhere:1"

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def count_error(self, reason: str) -> None:
        self.reasons.append(reason)

    def mark_lost(self) -> None:
        """Nobody is told."""

    def connect(self, _deadline: float) -> Connection:
        return Connection()


def test_t13_a_late_transfer_says_so() -> None:
    """It ended as UnboundLocalError."""
    link = Link()

    def move(_connection: Any, _batch: Transfer, deadline: float) -> Any:
        time.sleep(max(0.0, deadline - time.monotonic()))
        raise ConnectionLost("the other end went away")

    transfers = Transfers(link, "load", move, size=1, seconds=1.0, most_bytes=100)  # type: ignore[arg-type]
    with pytest.raises(RemoteLate, match="the other end went away"):
        transfers.submit(Transfer([b"k"], [memoryview(bytearray(1))], [None])).result(SECONDS)
    assert link.reasons == ["deadline"]
    transfers.close(time.monotonic() + SECONDS)


@pytest.mark.parametrize("name", ["a[b]c", "[", "a*b", "what?", "[!x]"])
def test_t13_a_path_with_brackets_opens_again(tmp_path: Path, name: str) -> None:
    path, keys = tmp_path / name / "ssd[0]", make_keys(3)
    for _ in range(2):
        store = SsdStore(path, SMALL, CAPACITY)
        assert all(put(store, keys))
        assert None not in fetch(store, keys)
        store.close(SECONDS)
    (path / "index" / "data.mdb").write_bytes(b"not an index")
    store = SsdStore(path, SMALL, CAPACITY)
    assert store.stats().errors == {"index_set_aside": 1}
    store.close(SECONDS)
    assert check_store(path).is_clean


SLOW_SCAN = """
import sys, time
sys.path[:] = sys.argv[2:]
from stratakv.tiers.ssd.folder import scan
def wait(rows):
    time.sleep(0.15)
    real(rows)
real, scan._BATCH = scan.RowStream.write_pending, 1
scan.RowStream.write_pending = wait
sys.exit(scan.main(sys.argv[1:]))
"""
HUNG_SCAN = "import time; time.sleep(600)"


def test_t13_a_slow_scan_throws_nothing_away(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the limit was damage: the whole store was gone."""
    keys = make_keys(200)
    store = SsdStore(path, SMALL, CAPACITY)
    assert all(put(store, keys))
    store.close(SECONDS)
    monkeypatch.setattr(guard, "_SCAN", tmp_path / "scan.py")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "stratakv").symlink_to(Path(opening.__file__).parents[3])
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    (tmp_path / "scan.py").write_text(HUNG_SCAN, encoding="utf-8")
    with pytest.raises(TierDown, match=r"stood still for 0\.2 seconds"):
        SsdStore(path, SMALL, CAPACITY, scan_timeout_seconds=0.2)
    (tmp_path / "scan.py").write_text(SLOW_SCAN, encoding="utf-8")
    # Twice as long in all as may pass from one batch to the next.
    monkeypatch.setattr(guard, "_SLOWEST_ROWS_PER_SECOND", 20)
    store = SsdStore(path, SMALL, CAPACITY, scan_timeout_seconds=5.0)
    assert None not in fetch(store, keys)
    assert store.stats().errors == {}
    store.close(SECONDS)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM])
def test_t13_a_shortage_keeps_the_block(
    open_store: Callable[..., SsdStore], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    keys = make_keys(3)
    store = open_store()
    assert all(put(store, keys))
    real = AioContext.events

    def short(context: AioContext, at_least: int) -> list[tuple[int, int]]:
        return [(number, -code) for number, _ in real(context, at_least)]

    with monkeypatch.context() as patch:
        patch.setattr(AioContext, "events", short)
        assert ends(store.load(keys, make_buffers(3, SMALL))) == [None] * 3
    stats = store.stats()
    assert stats.errors[errno.errorcode[code]] == 3
    assert (stats.misses, stats.corrupt_records_dropped) == (3, 0)
    assert store.lookup(keys) == [Answer.HIT] * 3
    assert None not in fetch(store, keys)
    code = errno.EIO
    with monkeypatch.context() as patch:
        patch.setattr(AioContext, "events", short)
        assert ends(store.load(keys, make_buffers(3, SMALL))) == [None] * 3
    assert store.lookup(keys) == [Answer.MISS] * 3
    assert store.stats().corrupt_records_dropped == 3


def test_t13_another_format_is_a_cold_start(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new version refused to start on the store of the one before."""
    keys = make_keys(3)
    store = SsdStore(path, SMALL, CAPACITY)
    assert all(put(store, keys))
    store.close(SECONDS)
    monkeypatch.setattr(opening, "FORMAT_VERSION", index_file.FORMAT_VERSION + 1)
    for namespace in (b"another model", b""):
        if namespace:
            with pytest.raises(TierConfigError, match="use another path or delete") as caught:
                SsdStore(path, SMALL, CAPACITY, namespace=namespace)
            assert not isinstance(caught.value, TierDown)
    caplog.clear()
    store = SsdStore(path, SMALL, CAPACITY)
    assert store.lookup(keys) == [Answer.MISS] * 3
    assert all(put(store, keys))
    store.close(SECONDS)
    assert len(caplog.messages) == 1
    rows = IndexFile(path / "index", 0)
    assert len(list(rows.iter_rows())) == 3
    rows.close()
