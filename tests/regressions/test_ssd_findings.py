# SPDX-License-Identifier: Apache-2.0
"""What an audit found in the SSD store, shown on real stores: threads that failed (T3), full and
read-only disks (T5), blocks that came back (T7), and the small ones (T13)."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.check import check_store
from stratakv.tiers.errors import TierConfigError, TierDown
from stratakv.tiers.remote.lane import RemoteLate
from stratakv.tiers.remote.room import Room
from stratakv.tiers.remote.rooms import Rooms
from stratakv.tiers.remote.sockets import ConnectionLost
from stratakv.tiers.remote.status import NotReady
from stratakv.tiers.remote.tenants import Quota
from stratakv.tiers.remote.transfers import Transfers
from stratakv.tiers.remote.wire import State
from stratakv.tiers.ssd import SsdStore, guard, index_file, opening, slot_file
from stratakv.tiers.ssd.index_file import IndexFile
from stratakv.tiers.ssd.io_lane import IoLane
from stratakv.tiers.ssd.linux_aio import AioContext
from stratakv.tiers.ssd.row_writer import RowWriter

from ..tiers.blocks import SMALL, filled_buffers, make_buffers, make_keys, payload_of
from ..tiers.remote.rig import LAYOUT, SECRET, tag_of
from ..tiers.ssd.loop_disk import COMMAND_SECONDS, unmount
from ..tiers.ssd.stores import capacity_for
from ..tiers.store_contract import SECONDS, fetch, put, wait_until

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
    assert ends(store.load(keys[:1], make_buffers(1, SMALL))) == [Answer.MISS]
    assert ends(store.load(keys, make_buffers(40, SMALL))).count(Answer.HIT) >= 39
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


@pytest.mark.parametrize("name", ["turn", "take", "_finish"])
def test_t03_an_io_thread_that_fails_ends_what_it_has_in_hand(
    open_store: Callable[..., SsdStore], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    keys = make_keys(60)
    store = open_store(io_threads=1)
    assert all(put(store, keys))
    real, failures = getattr(IoLane, name), [MemoryError("as asked")]

    def fail(lane: IoLane, *arguments: Any) -> Any:
        result = real(lane, *arguments) if name == "take" else None
        if failures:
            raise failures.pop()
        return real(lane, *arguments) if name != "take" else result

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


def make_room(path: Path, cpu_blocks: int = 16) -> tuple[Rooms, Room]:
    quota = Quota(cpu_blocks * LAYOUT.slot_bytes, 4 * 2**20)
    rooms = Rooms({"tenant": quota}, SECRET, path, max_slots=1000)
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return rooms, rooms.attach("tenant", LAYOUT)
        except NotReady:
            assert time.monotonic() < deadline
        time.sleep(0.002)


def keep(room: Room, keys: Sequence[bytes]) -> list[State]:
    intake = room.begin_store(keys)
    for key, slot in zip(keys, intake.slots, strict=True):
        if slot is not None:
            room.buffer(slot)[:] = payload_of(key, LAYOUT)
    tags = [tag_of(key, memoryview(payload_of(key, LAYOUT))) for key in keys]
    return room.end_store(intake, tags)


def test_t03_the_keeper_of_a_room_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it no read from the disk ever ends."""
    caplog.set_level(logging.CRITICAL)
    keys = make_keys(40)
    rooms, room = make_room(tmp_path)
    for start in range(0, 40, 4):
        assert keep(room, keys[start : start + 4]) == [State.KEPT] * 4
        wait_until(lambda: not room._hierarchy._write_backs.in_flight)
    assert room.lookup(keys[:2]) == [State.HIT] * 2
    failures = [MemoryError("as asked")] * 3
    real = room._hierarchy.poll

    def poll() -> bool:
        if failures and threading.current_thread().name == "stratakv-room":
            raise failures.pop()
        return real()

    monkeypatch.setattr(room._hierarchy, "poll", poll)
    room._woken.set()
    wait_until(lambda: not failures)
    loan = room.begin_load(keys[:2])
    room.wait(loan, time.monotonic() + SECONDS)
    assert None not in loan.slots
    room.end_load(loan)
    assert room.stats()["cpu"].errors == {"keeper": 3}
    assert rooms.close(SECONDS)


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
    rooms, room = make_room(disk.path / "stores")
    assert keep(room, keys) == [State.KEPT] * 8
    assert rooms.close(SECONDS)
    disk.remount("ro")
    rooms, room = make_room(disk.path / "stores")
    assert room.lookup(keys) == [State.MISS] * 8
    fresh = make_keys(4, "fresh")
    assert keep(room, fresh) == [State.KEPT] * 4
    assert room.lookup(fresh) == [State.HIT] * 4
    assert room.stats()["ssd"].errors["down"]
    disk.remount("rw")
    wait_until(lambda: room.lookup(keys) == [State.HIT] * 8)
    loan = room.begin_load(keys)
    room.wait(loan, time.monotonic() + SECONDS)
    assert None not in loan.slots
    room.end_load(loan)
    assert rooms.close(SECONDS)


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


def test_t07_what_was_being_written_is_forgotten_too(
    open_store: Callable[..., SsdStore], path: Path
) -> None:
    """In the queue, with the disk, or before its commit."""
    keys = make_keys(150)
    store = open_store()
    futures = [store.store([key], filled_buffers([key], SMALL)) for key in keys]
    store.drop(keys[:75])
    assert store.wait_forgotten(SECONDS)
    for future in futures[75:]:
        assert ends(future) == [True]
    rows = {row.key for row in store._opened.index_file.rows()}
    assert not rows & set(keys[:75])
    more = make_keys(100, "more")
    futures = [store.store([key], filled_buffers([key], SMALL)) for key in more]
    store.clear()
    assert store.wait_forgotten(SECONDS)
    cleared_up_to = opening.read_note(path).cleared_up_to
    for future in futures:
        ends(future)
    wait_until(lambda: not store._state.index.has_leaving)
    assert store.lookup(keys + more) == [Answer.MISS] * 250
    assert all(row.generation <= cleared_up_to for row in store._opened.index_file.rows())


def test_t07_a_disk_that_fails_is_told(
    open_store: Callable[..., SsdStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
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
    rooms, room = make_room(tmp_path)
    for start in range(0, 40, 4):
        keep(room, keys[start : start + 4])
        wait_until(lambda: not room._hierarchy._write_backs.in_flight)
    [store] = room._stores
    assert isinstance(store, SsdStore)
    assert store.stats().blocks
    assert room.drop(keys[:10]) == 10
    rows = list(store._opened.index_file.rows())
    known = {row.key for row in rows}
    assert known and not known & set(room._salt.stored(keys[:10]))
    room.clear()
    note = opening.read_note(next(tmp_path.glob("*/identity")).parent)
    assert note.cleared_up_to >= max(row.generation for row in rows)
    assert rooms.close(SECONDS)


# T13: the small ones.


class Connection:
    """Stands for one that `move` loses."""

    is_makeshift = False
    corrupt_blocks = 0

    def close(self) -> None:
        """Nothing is open."""


class Link:
    address = "grpc://nowhere:1"

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def count(self, reason: str) -> None:
        self.reasons.append(reason)

    def lost(self) -> None:
        """Nobody is told."""

    def connect(self, _deadline: float) -> Connection:
        return Connection()


def test_t13_a_late_transfer_says_so() -> None:
    """It ended as UnboundLocalError."""
    link = Link()

    def move(_connection: Any, _keys: Any, _buffers: Any, deadline: float) -> list[State]:
        time.sleep(max(0.0, deadline - time.monotonic()))
        raise ConnectionLost("the other end went away")

    transfers = Transfers(link, "load", move, size=1, seconds=0.02, most_bytes=100)  # type: ignore[arg-type]
    with pytest.raises(RemoteLate, match="the other end went away"):
        transfers.submit([b"k"], [memoryview(bytearray(1))]).result(SECONDS)
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
from stratakv.tiers.ssd import scan
def wait(rows):
    time.sleep(0.15)
    real(rows)
real, scan._BATCH = scan.RowStream.flush, 1
scan.RowStream.flush = wait
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
    (tmp_path / "path" / "stratakv").symlink_to(Path(opening.__file__).parents[2])
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
        assert ends(store.load(keys, make_buffers(3, SMALL))) == [Answer.MISS] * 3
    stats = store.stats()
    assert stats.errors[errno.errorcode[code]] == 3
    assert (stats.misses, stats.corrupt_records_dropped) == (3, 0)
    assert store.lookup(keys) == [Answer.HIT] * 3
    assert None not in fetch(store, keys)
    code = errno.EIO
    with monkeypatch.context() as patch:
        patch.setattr(AioContext, "events", short)
        assert ends(store.load(keys, make_buffers(3, SMALL))) == [Answer.MISS] * 3
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
    assert len(list(rows.rows())) == 3
    rows.close()
