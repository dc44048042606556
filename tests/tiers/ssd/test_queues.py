# SPDX-License-Identifier: Apache-2.0
"""Calls under way in the SSD store: full queues, blocks that go while they come, closing."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stratakv.tiers.base import Answer, Stored
from stratakv.tiers.block import ALIGNMENT
from stratakv.tiers.errors import TierBusy, TierClosed
from stratakv.tiers.ssd import SsdStore, writer
from stratakv.tiers.ssd.disk.slot_file import SlotFile
from stratakv.tiers.ssd.index.index_file import IndexFile
from stratakv.tiers.ssd.record_writer import WriteQueue
from stratakv.tiers.ssd.state import Job
from stratakv.tiers.ssd.store_check import check_store

from ..blocks import SMALL, filled_buffers, make_buffers, make_keys, payload_of
from ..store_contract import SECONDS, fetch, put, wait_until
from .stores import Open, capacity_for


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
    assert future.result(SECONDS) == [Stored.KEPT] * 6
    assert put(store, keys[6:]) == [True] * 6


def test_a_full_store_takes_one_commit_for_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are free by the commit before, also where a batch is more than an eighth."""
    commits: list[str] = []

    def counted(name: str, call: Any) -> Any:
        return lambda *given: (commits.append(name), call(*given))[1]

    monkeypatch.setattr(IndexFile, "put", counted("put", IndexFile.put))
    monkeypatch.setattr(IndexFile, "delete", counted("delete", IndexFile.delete))
    store = SsdStore(tmp_path, SMALL, capacity_for(1024))
    keys = make_keys(1024 + 2 * 165)
    for start in range(0, len(keys), 165):
        assert all(put(store, keys[start : start + 165]))
    assert store.stats().evicted_blocks >= len(keys) - 1024
    assert commits == ["put"] * len(range(0, len(keys), 165))
    store.close(SECONDS)


def test_a_full_read_queue_is_busy(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(queue_bytes=4 * SMALL.page_bytes, io_threads=1)
    keys = make_keys(4)
    put(store, keys)
    gate = hold_reads(monkeypatch)
    future = store.load(keys, make_buffers(4, SMALL))
    with pytest.raises(TierBusy, match="4 reads"):
        store.load(keys[:1], make_buffers(1, SMALL))
    gate.set()
    assert None not in future.result(SECONDS)
    assert None not in fetch(store, keys)


def hold_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Reads wait, before they reach the file, until the event is set."""
    gate, real = threading.Event(), SlotFile.start_read

    def wait(self: SlotFile, *arguments: object) -> None:
        gate.wait(SECONDS)
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SlotFile, "start_read", wait)
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
    assert None not in reading.result(SECONDS)
    assert [bytes(buffer) for buffer in buffers] == [payload_of(key, SMALL) for key in keys[:2]]
    assert put(store, make_keys(4, "after")) == [True] * 4
    assert store.stats().rejected == {}


def test_a_block_dropped_on_its_way_in_is_not_kept(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BATCHES_IN_FLIGHT", 1)  # or the second one would be begun, too
    store = open_store()
    keys, gone = make_keys(3), make_keys(1, "gone")
    gate, real = threading.Event(), SlotFile.sync
    entered = threading.Event()

    def wait(self: SlotFile) -> None:
        entered.set()
        gate.wait(SECONDS)
        real(self)

    monkeypatch.setattr(SlotFile, "sync", wait)
    under_way = [*keys[:2], *gone]
    writing = store.store(under_way, filled_buffers(under_way, SMALL))
    assert entered.wait(SECONDS)
    queued = store.store(keys[2:], filled_buffers(keys[2:], SMALL))
    assert store.drop([*keys[1:], *gone]) == 3
    assert store.drop(keys[1:]) == 0
    again = store.store(keys[1:2], filled_buffers(keys[1:2], SMALL))
    gate.set()
    assert writing.result(SECONDS) == [Stored.KEPT, Stored.REFUSED, Stored.REFUSED]
    assert queued.result(SECONDS) == [Stored.REFUSED]
    assert again.result(SECONDS) == [Stored.KEPT]
    for _ in range(2):
        assert store.lookup(keys) == [Answer.HIT, Answer.HIT, Answer.MISS]
        assert store.lookup(gone) == [Answer.MISS]
        store.close(SECONDS)
        store = open_store()


def test_a_block_that_was_dropped_and_stored_again_is_written_once_more() -> None:
    """The end of its first write is not that of the second one, for which a third call waits."""
    queue, [key] = WriteQueue(), make_keys(1)
    jobs: list[Job[Stored]] = [Job([Stored.KEPT]) for _ in range(3)]
    block = (key, *filled_buffers([key], SMALL), None, 0)
    for job in jobs:
        job.waiting_for = 1
    queue.add([block], jobs[0])
    assert queue.cancel(key)
    queue.add([block], jobs[1])
    first, second = queue.pop_writes(2)
    assert queue.settle([first], {id(first)}) == ([jobs[0]], 1)
    assert key in queue
    queue.add([block], jobs[2])
    assert not queue.waiting
    assert queue.settle([second], {id(second)}) == (jobs[1:], 0)
    assert key not in queue and not queue.num_blocks


def test_only_so_many_batches_are_under_way(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BATCH_BLOCKS", 1)
    store = open_store()
    keys = make_keys(writer.BATCHES_IN_FLIGHT + 2)
    gate, real = threading.Event(), SlotFile.start_write

    def wait(self: SlotFile, *arguments: object) -> None:
        gate.wait(SECONDS)
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SlotFile, "start_write", wait)
    writing = store.store(keys, filled_buffers(keys, SMALL))
    wait_until(lambda: len(store._writer._flying) >= writer.BATCHES_IN_FLIGHT)
    with store._state.lock:
        assert len(store._writer.queue.waiting) == 2 and not store._writer._may_begin()
    gate.set()
    assert writing.result(SECONDS) == [Stored.KEPT] * len(keys)


def test_close_writes_what_is_queued(open_store: Open) -> None:
    store = open_store()
    keys = make_keys(30)
    futures = [store.store([key], filled_buffers([key], SMALL)) for key in keys]
    store.close(SECONDS)
    assert [future.result(0) for future in futures] == [[Stored.KEPT]] * 30
    assert None not in fetch(open_store(), keys)


def test_close_abandons_what_the_time_does_not_allow(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BATCHES_IN_FLIGHT", 1)  # or the second one would be begun, too
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
    assert first.result(SECONDS) == [Stored.KEPT]
    with pytest.raises(TierClosed):
        second.result(SECONDS)
    assert open_store().lookup(keys) == [Answer.HIT, Answer.MISS, Answer.MISS]


def test_what_waits_at_the_end_is_abandoned_though_the_disk_hangs(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a second close, which has more time, begins nothing that no thread would write. Files
    stay open while one thread is in the kernel, though the others have ended."""
    monkeypatch.setattr(writer, "BATCHES_IN_FLIGHT", 1)
    monkeypatch.setattr(writer, "GRACE_SECONDS", 0.05)
    store = open_store()
    keys = make_keys(3)
    gate, entered, real = threading.Event(), threading.Event(), SlotFile.sync

    def wait(self: SlotFile) -> None:
        entered.set()
        gate.wait(SECONDS)
        real(self)

    monkeypatch.setattr(SlotFile, "sync", wait)
    first = store.store(keys[:1], filled_buffers(keys[:1], SMALL))
    assert entered.wait(SECONDS)
    second = store.store(keys[1:], filled_buffers(keys[1:], SMALL))
    store.close(0.0)
    with pytest.raises(TierClosed):
        second.result(SECONDS / 2)
    wait_until(lambda: store._writer._records.close(0.0))
    store.close(0.0)
    assert not first.done() and store.has_open_files
    gate.set()
    store.close(SECONDS)
    assert first.result(0) == [Stored.KEPT]
    assert not store.has_open_files
    assert open_store().lookup(keys) == [Answer.HIT, Answer.MISS, Answer.MISS]


def test_a_batch_without_slots_is_abandoned_though_the_disk_hangs(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for slots that a batch under way has, and those behind it wait for it. When the
    disk comes back nothing is begun that no thread would write: the store ends."""
    monkeypatch.setattr(writer, "BATCH_BLOCKS", 2)
    monkeypatch.setattr(writer, "GRACE_SECONDS", 0.05)
    store = open_store(slots=2)
    gate, entered, real = threading.Event(), threading.Event(), SlotFile.start_write

    def wait(self: SlotFile, *arguments: object) -> None:
        entered.set()
        gate.wait(SECONDS)
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SlotFile, "start_write", wait)
    keys = make_keys(6)
    first, *others = [
        store.store(keys[i : i + 2], filled_buffers(keys[i : i + 2], SMALL)) for i in (0, 2, 4)
    ]
    assert entered.wait(SECONDS)
    wait_until(lambda: len(store._writer.queue.waiting) == 2)  # the second one was taken, and waits
    store.close(0.0)
    for other in others:
        with pytest.raises(TierClosed):
            other.result(SECONDS / 2)
    assert not first.done() and store.has_open_files
    gate.set()
    store.close(SECONDS)
    assert first.result(0) == [Stored.KEPT] * 2
    assert not store.has_open_files
    assert open_store(slots=2).lookup(keys) == [Answer.HIT] * 2 + [Answer.MISS] * 4


def test_no_batch_is_begun_behind_the_last_thread(open_store: Open) -> None:
    """As one whose slots took the disk longer than there was time to close."""
    store = open_store()
    keys = make_keys(1)
    assert store._writer._records.close(time.monotonic() + SECONDS)
    assert store.store(keys, filled_buffers(keys, SMALL)).result(SECONDS) == [Stored.REFUSED]
    assert store.stats().errors == {"TierClosed": 1}


@pytest.mark.parametrize("fault", ["sync", "commit"])
def test_a_block_dropped_on_its_way_in_leaves_no_record_though_its_batch_fails(
    open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Or an index that is made again from the records would bring it back."""
    store = open_store()
    keys = make_keys(3)
    owner, name = (SlotFile, "sync") if fault == "sync" else (IndexFile, "put")

    seen: list[object] = []

    def drop_and_fail(*_arguments: object) -> None:
        seen.append((store.drop(keys[:2]), *store.not_yet_forgotten()))
        raise OSError(errno.EIO, "as asked")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, drop_and_fail)
        stored = store.store(keys, filled_buffers(keys, SMALL))
        assert stored.result(SECONDS) == [Stored.REFUSED] * 3
    assert seen == [(2, keys[:2], False)], "what a commit that fails may bring to the disk"
    assert store.wait_forgotten(SECONDS)
    store.close(SECONDS)
    assert check_store(tmp_path / "ssd").orphans == 1  # the third one was not to be forgotten


def test_close_abandons_reads_that_have_not_begun_in_time(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(io_threads=1)
    keys = make_keys(4)
    put(store, keys)
    gate, begun, real = threading.Event(), threading.Event(), SlotFile.start_read

    def wait(self: SlotFile, *arguments: object) -> None:
        begun.set()
        gate.wait(SECONDS)
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SlotFile, "start_read", wait)
    first = store.load(keys[:1], make_buffers(1, SMALL))
    assert begun.wait(SECONDS)
    second = store.load(keys[1:], make_buffers(3, SMALL))
    closing = threading.Thread(target=store.close, args=(0.0,))
    closing.start()
    wait_until(lambda: store._reader.abandoned)
    gate.set()
    closing.join(SECONDS)
    assert None not in first.result(SECONDS)
    with pytest.raises(TierClosed):
        second.result(SECONDS)
    assert not any(store._state.index._pins)


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
