# SPDX-License-Identifier: Apache-2.0
"""The SSD store on a real disk: its contract, restarts, eviction, bounds and settings."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.block import ALIGNMENT, BlockLayout
from stratakv.tiers.errors import InvalidBlock, TierBusy, TierClosed, TierConfigError
from stratakv.tiers.ssd import SsdStore, index_file
from stratakv.tiers.ssd.slot_file import SlotFile
from stratakv.tiers.ssd.space import plan_space

from ..blocks import ODD, SMALL, filled_buffers, make_buffers, make_keys, payload_of
from ..store_contract import SECONDS, check_store, fetch, put, wait_until

BIG = BlockLayout(num_layers=4, block_size=16, num_kv_heads=2, head_dim=64, kv_dtype="float32")
Open = Callable[..., SsdStore]


def capacity_for(slots: int, layout: BlockLayout = SMALL) -> int:
    """The smallest capacity that gives so many slots."""
    low, high = 1, 2**40
    while low < high:
        middle = (low + high) // 2
        try:
            enough = plan_space(layout, middle).num_slots >= slots
        except TierConfigError:
            enough = False
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


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


@pytest.mark.parametrize("layout", [SMALL, ODD, BIG], ids=["page", "odd", "64KiB"])
def test_contract(open_store: Open, layout: BlockLayout) -> None:
    check_store(open_store(layout=layout))


def test_contract_without_direct_io(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open = os.open

    def refuse(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    check_store(open_store(layout=ODD))
    assert caplog.text.count("without direct I/O") == 1


def test_buffers_that_are_not_aligned_work_too(open_store: Open) -> None:
    store = open_store()
    keys = make_keys(4)
    payloads = [memoryview(b"x" + payload_of(key, SMALL))[1:] for key in keys]
    assert store.store(keys, payloads).result(SECONDS) == [True] * 4
    targets = [memoryview(bytearray(SMALL.page_bytes + 1))[1:] for _ in keys]
    assert store.load(keys, targets).result(SECONDS) == [Answer.HIT] * 4
    assert targets == payloads


def test_survives_a_restart_without_reading_payloads(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    keys = make_keys(40)
    assert all(put(store, keys))
    store.drop(keys[:5])
    store.close(SECONDS)

    def fail(*_arguments: object) -> int:
        raise AssertionError("a payload was read")

    with monkeypatch.context() as patch:
        patch.setattr(SlotFile, "read", fail)
        store = open_store()
        assert store.lookup(keys) == [Answer.MISS] * 5 + [Answer.HIT] * 35
    assert None not in fetch(store, keys[5:])
    assert store.stats().rejected == {}


def test_evicts_the_least_recently_used_also_after_a_restart(open_store: Open) -> None:
    store = open_store(slots=12)
    keys = make_keys(24)
    put(store, keys[:12])
    fetch(store, keys[6:12])
    store.close(SECONDS)
    store = open_store(slots=12)
    assert all(put(store, keys[12:16]))
    # Used before the restart: 6 to 11. Of 0 to 5 the tail of the chain goes first.
    gone = [i for i, answer in enumerate(store.lookup(keys[:12])) if answer is Answer.MISS]
    assert gone == [2, 3, 4, 5]
    assert store.stats().evicted_blocks == 4
    assert store.stats().blocks == 12
    assert None not in fetch(store, keys[6:16])


def test_a_chain_loses_its_tail_first(open_store: Open) -> None:
    store = open_store(slots=8)
    chain = make_keys(8)
    put(store, chain)
    for key in make_keys(3, "other"):
        put(store, [key])
    assert store.lookup(chain) == [Answer.HIT] * 5 + [Answer.MISS] * 3


def test_a_batch_larger_than_the_store_keeps_its_head(open_store: Open) -> None:
    store = open_store(slots=8)
    keys = make_keys(20)
    assert put(store, keys) == [True] * 8 + [False] * 12
    assert None not in fetch(store, keys[:8])


def test_a_full_store_frees_a_little_ahead_and_stays_right(
    open_store: Open, rng: random.Random
) -> None:
    store = open_store(slots=64)
    keys = make_keys(400)
    for start in range(0, 400, 8):
        assert all(put(store, keys[start : start + 8]))
        fetch(store, rng.sample(keys[: start + 8], 4))
    assert 60 <= store.stats().blocks <= 64
    assert Answer.HIT in store.load(keys, make_buffers(400, SMALL)).result(SECONDS)
    assert store.stats().rejected == {}


def test_space_on_the_disk_stays_within_the_capacity(open_store: Open, tmp_path: Path) -> None:
    for slots, layout in ((9, BIG), (200, SMALL), (300, ODD)):
        path = tmp_path / f"bound-{slots}"
        store = open_store(slots=slots, layout=layout, path=path)
        for start in range(0, 3 * slots, 50):
            put(store, make_keys(50, f"{start}"))
        assert on_disk(path) <= store.stats().capacity_bytes
        assert store.stats().used_bytes <= store.stats().capacity_bytes
        # Most of it is blocks; what is not, is what the index may ever need.
        assert store.stats().blocks >= slots * 15 // 16
        store.close(SECONDS)
        assert on_disk(path) <= store.stats().capacity_bytes


def on_disk(path: Path) -> int:
    """Bytes that the file system has given to everything below and including `path`."""
    return sum(each.lstat().st_blocks * 512 for each in [path, *path.rglob("*")])


def test_files_are_private(open_store: Open, tmp_path: Path) -> None:
    put(open_store(), make_keys(2))
    for each in [tmp_path / "ssd", *(tmp_path / "ssd").rglob("*")]:
        mode = stat.S_IMODE(each.stat().st_mode)
        assert mode == (0o700 if each.is_dir() else 0o600), each


@pytest.mark.parametrize("slots", [16, 40, 200])
def test_another_capacity_keeps_what_fits(open_store: Open, tmp_path: Path, slots: int) -> None:
    keys = make_keys(40)
    store = open_store(slots=40)
    put(store, keys)
    store.close(SECONDS)
    store = open_store(slots=slots)
    hits = store.lookup(keys).count(Answer.HIT)
    assert hits == min(slots, 40)
    found = fetch(store, keys)
    assert len(found) - found.count(None) == hits
    assert on_disk(tmp_path / "ssd") <= store.stats().capacity_bytes
    put(store, make_keys(slots, "more"))
    store.close(SECONDS)
    store = open_store(slots=slots)
    assert None not in fetch(store, store_keys(store))
    assert len(store_keys(store)) >= slots * 15 // 16


def store_keys(store: SsdStore) -> list[bytes]:
    return store._state.index.keys()


def test_a_small_loss_of_slots_rewrites_no_index(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(40)
    store = open_store(slots=40)
    put(store, keys)
    store.close(SECONDS)
    monkeypatch.setattr("stratakv.tiers.ssd.opening.rebuild", None)
    store = open_store(slots=38)
    assert store.lookup(keys).count(Answer.HIT) == 38


def test_a_full_write_queue_is_busy_and_takes_nothing(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(queue_bytes=4 * SMALL.page_bytes)
    gate, real = threading.Event(), SlotFile.sync
    monkeypatch.setattr(SlotFile, "sync", lambda self: (gate.wait(SECONDS), real(self))[1])
    keys = make_keys(12)
    future = store.store(keys[:6], filled_buffers(keys[:6], SMALL))  # taken: it was empty
    with pytest.raises(TierBusy, match="6 writes"):
        store.store(keys[6:7], filled_buffers(keys[6:7], SMALL))
    assert store.lookup(keys) == [Answer.PENDING] * 6 + [Answer.MISS] * 6
    gate.set()
    assert future.result(SECONDS) == [True] * 6
    assert put(store, keys[6:]) == [True] * 6


def test_a_full_read_queue_is_busy(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(queue_bytes=4 * SMALL.page_bytes, io_threads=1)
    keys = make_keys(4)
    put(store, keys)
    gate = hold_reads(monkeypatch)
    future = store.load(keys, make_buffers(4, SMALL))
    with pytest.raises(TierBusy, match="4 reads"):
        store.load(keys[:1], make_buffers(1, SMALL))
    gate.set()
    assert future.result(SECONDS) == [Answer.HIT] * 4
    assert None not in fetch(store, keys)


def hold_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Reads wait, before they reach the file, until the event is set."""
    gate, real = threading.Event(), SlotFile.read

    def wait(self: SlotFile, *arguments: object) -> int:
        gate.wait(SECONDS)
        return real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SlotFile, "read", wait)
    return gate


def test_a_slot_being_read_is_not_reused(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(slots=4)
    keys = make_keys(12)
    put(store, keys[:4])
    gate = hold_reads(monkeypatch)
    buffers = make_buffers(2, SMALL)
    reading = store.load(keys[:2], buffers)
    assert store.drop(keys[:1]) == 1  # forgotten while it is read
    for start in range(4, 12, 4):
        assert put(store, keys[start : start + 4]).count(True) == 2
    assert store.lookup(keys[:2]) == [Answer.MISS, Answer.HIT]
    gate.set()
    assert reading.result(SECONDS) == [Answer.HIT] * 2
    assert [bytes(buffer) for buffer in buffers] == [payload_of(key, SMALL) for key in keys[:2]]
    assert put(store, make_keys(4, "after")) == [True] * 4
    assert store.stats().rejected == {}


def test_a_block_dropped_on_its_way_in_is_not_kept(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    keys = make_keys(3)
    gate, real = threading.Event(), SlotFile.sync
    entered = threading.Event()

    def wait(self: SlotFile) -> None:
        entered.set()
        gate.wait(SECONDS)
        real(self)

    monkeypatch.setattr(SlotFile, "sync", wait)
    writing = store.store(keys[:2], filled_buffers(keys[:2], SMALL))
    assert entered.wait(SECONDS)
    queued = store.store(keys[2:], filled_buffers(keys[2:], SMALL))
    assert store.drop(keys[1:]) == 2
    assert store.drop(keys[1:]) == 0
    again = store.store(keys[1:2], filled_buffers(keys[1:2], SMALL))
    gate.set()
    assert writing.result(SECONDS) == [True, False]
    assert queued.result(SECONDS) == [False]
    assert again.result(SECONDS) == [True]
    assert store.lookup(keys) == [Answer.HIT, Answer.HIT, Answer.MISS]
    store.close(SECONDS)
    assert open_store().lookup(keys) == [Answer.HIT, Answer.HIT, Answer.MISS]


def test_what_was_cleared_stays_away_after_a_restart(open_store: Open) -> None:
    store = open_store()
    keys = make_keys(40)
    put(store, keys)
    store.clear()
    put(store, keys[:3])
    store.close(SECONDS)
    assert open_store().lookup(keys) == [Answer.HIT] * 3 + [Answer.MISS] * 37


def test_close_writes_what_is_queued(open_store: Open) -> None:
    store = open_store()
    keys = make_keys(30)
    futures = [store.store([key], filled_buffers([key], SMALL)) for key in keys]
    store.close(SECONDS)
    assert [future.result(0) for future in futures] == [[True]] * 30
    assert None not in fetch(open_store(), keys)


def test_close_abandons_what_the_time_does_not_allow(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    keys = make_keys(3)
    gate, real = threading.Event(), SlotFile.sync
    entered = threading.Event()

    def wait(self: SlotFile) -> None:
        entered.set()
        gate.wait(SECONDS)
        real(self)

    monkeypatch.setattr(SlotFile, "sync", wait)
    first = store.store(keys[:1], filled_buffers(keys[:1], SMALL))
    assert entered.wait(SECONDS)
    second = store.store(keys[1:], filled_buffers(keys[1:], SMALL))
    threading.Timer(0.3, gate.set).start()
    store.close(0.1)
    assert first.result(SECONDS) == [True]
    with pytest.raises(TierClosed):
        second.result(SECONDS)
    assert open_store().lookup(keys) == [Answer.HIT, Answer.MISS, Answer.MISS]


def test_no_view_of_a_buffer_outlives_its_call(open_store: Open) -> None:
    store = open_store()
    keys = make_keys(3)
    memory = bytearray(3 * ALIGNMENT)
    views = [memoryview(memory)[i * ALIGNMENT :][:ALIGNMENT] for i in range(3)]
    store.store(keys, views).result(SECONDS)
    store.load(keys, views).result(SECONDS)
    del views

    def is_free() -> bool:
        try:
            memory.append(0)
        except BufferError:
            return False
        return True

    wait_until(is_free)


def test_a_second_process_is_refused_with_the_owner(open_store: Open, tmp_path: Path) -> None:
    open_store()
    code = (
        "import sys; from stratakv.tiers.ssd import SsdStore\n"
        "from stratakv.tiers.block import BlockLayout\n"
        "try: SsdStore(sys.argv[1], BlockLayout(1, 16, 1, 32, 'float32'), 10**7)\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "ssd")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"in use by process {os.getpid()};" in done.stdout
    with pytest.raises(TierConfigError, match=f"in use by process {os.getpid()}"):
        open_store()


def test_another_layout_namespace_or_format_is_refused(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(3)
    store = open_store(namespace=b"\x01\x02")
    put(store, keys)
    store.close(SECONDS)
    with pytest.raises(TierConfigError, match=r"heads of 32, .* has .* heads of 48, .*delete"):
        open_store(layout=ODD, namespace=b"\x01\x02")
    with pytest.raises(TierConfigError, match=r"namespace 0102, .* has namespace \(none\);"):
        open_store()
    with monkeypatch.context() as patch:
        patch.setattr("stratakv.tiers.ssd.opening.FORMAT_VERSION", 2)
        with pytest.raises(TierConfigError, match=r"for format 1, and this engine has format 2;"):
            open_store(namespace=b"\x01\x02")
    # Nothing was changed by the refusals.
    assert None not in fetch(open_store(namespace=b"\x01\x02"), keys)


def test_a_path_or_size_that_cannot_work_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    for path in (file, file / "below"):
        with pytest.raises(TierConfigError, match=r"needs a directory and .* is in the way"):
            SsdStore(path, SMALL, 10**7)
    with pytest.raises(TierConfigError, match=r"cannot write to /proc/stratakv .*permissions"):
        SsdStore("/proc/stratakv", SMALL, 10**7)
    smallest = capacity_for(1)
    with pytest.raises(TierConfigError, match=f"at least {smallest} bytes .*, not {smallest - 1}"):
        SsdStore(tmp_path / "a", SMALL, smallest - 1)
    with pytest.raises(TierConfigError, match=r"bytes are free; lower its size by \d+ bytes"):
        SsdStore(tmp_path / "b", SMALL, 2**60)
    with pytest.raises(TierConfigError, match="I/O thread"):
        SsdStore(tmp_path / "c", SMALL, 10**7, io_threads=0)
    SsdStore(tmp_path / "d", SMALL, smallest).close(SECONDS)


def test_a_refused_opening_leaves_nothing_open(open_store: Open) -> None:
    open_store(slots=8).close(SECONDS)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(TierConfigError):
            open_store(layout=ODD)
    assert len(os.listdir("/proc/self/fd")) == before
    open_store(slots=8)


def test_what_no_caller_should_give_is_refused(open_store: Open) -> None:
    store = open_store()
    with pytest.raises(InvalidBlock, match="key of 40 bytes"):
        store.store([b"short"], make_buffers(1, SMALL))
    with pytest.raises(InvalidBlock, match="read-only"):
        store.load(make_keys(1), [memoryview(bytes(SMALL.page_bytes))])


def test_many_threads_and_a_full_store_serve_nothing_wrong(open_store: Open) -> None:
    store = open_store(slots=48, layout=ODD)
    keys = make_keys(150)
    faults: list[BaseException] = []

    def work(name: int) -> None:
        rng = random.Random(name)
        try:
            for _ in range(60):
                some = rng.sample(keys, 6)
                futures: list[Future[list[bool]]] = []
                try:
                    futures.append(store.store(some, filled_buffers(some, ODD)))
                    fetch(store, rng.sample(keys, 8))
                except TierBusy:
                    pass
                if rng.random() < 0.2:
                    store.drop(rng.sample(keys, 3))
                for future in futures:
                    future.result(SECONDS)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert faults == []
    assert store.stats().rejected == store.stats().errors == {}
    store.close(SECONDS)
    store = open_store(slots=48, layout=ODD)
    held = store_keys(store)
    assert None not in fetch(store, held)
    assert len({entry.slot for entry in store._state.index.pin(held) if entry}) == len(held)


def test_opening_twice_never_repeats_a_generation(open_store: Open, tmp_path: Path) -> None:
    seen: set[int] = set()
    for round_number in range(3):
        store = open_store(slots=8)
        put(store, make_keys(4, f"{round_number}"))
        store.close(SECONDS)
        index = index_file.IndexFile(tmp_path / "ssd" / "index", 0)
        new = {row.generation for row in index.rows()} - seen
        index.close()
        assert len(new) == 4
        seen |= new
