# SPDX-License-Identifier: Apache-2.0
"""When a block is acknowledged, and what overlapping batches may and may not do to each other."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb
import pytest

from stratakv.tiers.base import Answer, Stored
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.ssd import SsdStore, writer
from stratakv.tiers.ssd.disk.slot_file import SlotFile
from stratakv.tiers.ssd.index import row_writer
from stratakv.tiers.ssd.index.index_file import IndexFile

from ..blocks import SMALL, filled_buffers, make_keys
from ..store_contract import SECONDS, check_store, fetch, put, wait_until
from .stores import BIG, Open


def rows_on_disk(path: Path) -> set[bytes]:
    """The keys that another opening of the index would find."""
    environment = lmdb.open(str(path / "index"), max_dbs=2, readonly=True, lock=False)
    try:
        slots = environment.open_db(b"slots", create=False)
        with environment.begin(db=slots) as transaction:
            return {value[:40] for _, value in transaction.cursor()}
    finally:
        environment.close()


def noting(events: list[str], name: str, real: Callable[..., object]) -> Callable[..., object]:
    def noted(*arguments: object) -> object:
        result = real(*arguments)
        events.append(name)
        return result

    return noted


def test_an_unknown_durability_is_refused(open_store: Open) -> None:
    with pytest.raises(TierConfigError, match="durability is sync or async, not 'never'"):
        open_store(durability="never")


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_the_contract_holds_for_both(open_store: Open, durability: str) -> None:
    check_store(open_store(layout=BIG, durability=durability))


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_when_a_block_is_acknowledged(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """sync: after record, sync and row. async: after the record; sync and row follow."""
    monkeypatch.setattr(row_writer, "SYNC_SECONDS", 0.01)
    may_sync = threading.Event()
    if durability == "sync":
        may_sync.set()
    sync = SlotFile.sync

    def sync_later(*arguments: object) -> object:
        assert may_sync.wait(SECONDS)
        return sync(*arguments)

    events: list[str] = []
    monkeypatch.setattr(SlotFile, "start_write", noting(events, "write", SlotFile.start_write))
    monkeypatch.setattr(SlotFile, "sync", noting(events, "sync", sync_later))
    store = open_store(durability=durability)
    monkeypatch.setattr(IndexFile, "put", noting(events, "row", IndexFile.put))
    keys = make_keys(5)
    put(store, keys)
    acknowledged = list(events)
    assert None not in fetch(store, keys)
    assert acknowledged == (["write", "sync", "row"] if durability == "sync" else ["write"])
    may_sync.set()
    wait_until(lambda: events[:3] == ["write", "sync", "row"])


def test_async_blocks_are_there_after_a_close(open_store: Open, tmp_path: Path) -> None:
    store = open_store(durability="async")
    keys = make_keys(30)
    for start in range(0, 30, 6):
        put(store, keys[start : start + 6])
    store.drop(keys[:2])
    store.close(SECONDS)
    assert rows_on_disk(tmp_path / "ssd") == set(keys[2:])
    assert None not in fetch(open_store(), keys[2:])


def test_an_async_store_that_is_full_turns_over(open_store: Open, tmp_path: Path) -> None:
    """Slots of blocks without a row go round too, and no row is written for what has left."""
    store = open_store(slots=24, durability="async")
    keys = make_keys(300)
    for start in range(0, 300, 10):
        assert put(store, keys[start : start + 10]) == [True] * 10
        assert None not in fetch(store, keys[start : start + 10])
    known = {
        key for key, answer in zip(keys, store.lookup(keys), strict=True) if answer is Answer.HIT
    }
    store.close(SECONDS)
    rows = rows_on_disk(tmp_path / "ssd")
    assert rows <= known and len(rows) >= len(known) - 1, "one may be evicted ahead"
    store = open_store(slots=24)
    assert None not in fetch(store, sorted(rows))
    assert store.stats().rejected == {}


@pytest.mark.parametrize("fault", ["sync", "commit"])
def test_async_blocks_whose_sync_or_commit_fails_are_forgotten(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    monkeypatch.setattr(row_writer, "SYNC_SECONDS", 0.1)
    store = open_store(durability="async")
    keys = make_keys(6)

    def fail(*_arguments: object) -> None:
        raise OSError(errno.EIO, "as asked") if fault == "sync" else lmdb.DiskError("as asked")

    with monkeypatch.context() as patch:
        patch.setattr(*((SlotFile, "sync") if fault == "sync" else (IndexFile, "put")), fail)
        assert put(store, keys) == [True] * 6
        wait_until(lambda: store.lookup(keys) == [Answer.MISS] * 6)
    assert store.stats().errors == {"EIO" if fault == "sync" else "DiskError": 1}
    assert put(store, keys) == [True] * 6
    store.close(SECONDS)
    assert rows_on_disk(tmp_path / "ssd") == set(keys)
    assert None not in fetch(open_store(), keys)


def writes(arguments: Sequence[Any], buffer: memoryview) -> bool:
    """Whether `SlotFile.start_write` with these arguments is for this block: threads come in any
    order."""
    _disk, _number, _slot, payloads, _scratch = arguments
    return bytes(payloads[0]) == bytes(buffer)


class TwoBatches:
    """Two batches that are being written at once; the second one's write returns when told to."""

    def __init__(self, store: SsdStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys = make_keys(2, "two")
        self._begun, self._let_go = threading.Event(), threading.Event()
        buffers = filled_buffers(self.keys, SMALL)
        real = SlotFile.start_write

        def write(slot_file: SlotFile, *arguments: Any) -> None:
            self._wait(is_first=writes(arguments, buffers[0]))
            real(slot_file, *arguments)

        monkeypatch.setattr(SlotFile, "start_write", write)
        self.first = store.store(self.keys[:1], buffers[:1])
        self.second = store.store(self.keys[1:], buffers[1:])

    def let_go(self) -> None:
        self._let_go.set()

    def _wait(self, *, is_first: bool) -> None:
        if is_first:
            assert self._begun.wait(SECONDS), "the second batch was not begun"
        else:
            self._begun.set()
            self._let_go.wait(SECONDS)


def test_a_batch_is_acknowledged_while_the_next_one_is_written(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BATCH_BLOCKS", 1)
    store = open_store()
    two = TwoBatches(store, monkeypatch)
    assert two.first.result(SECONDS) == [Stored.KEPT]
    assert not two.second.done()
    two.let_go()
    assert two.second.result(SECONDS) == [Stored.KEPT]
    assert None not in fetch(store, two.keys)


class HeldSync:
    """One block is stored, and its sync waits for `let_go`."""

    def __init__(self, store: SsdStore, monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
        self._begun, self._let_go = threading.Event(), threading.Event()
        real = SlotFile.sync

        def sync(slot_file: SlotFile) -> None:
            self._begun.set()
            assert self._let_go.wait(SECONDS)
            real(slot_file)
            events.append("synced")

        monkeypatch.setattr(SlotFile, "sync", sync)
        self.key = make_keys(1, "synced")
        self.stored = store.store(self.key, filled_buffers(self.key, SMALL))
        assert self._begun.wait(SECONDS)

    def let_go(self) -> None:
        self._let_go.set()


def test_a_batch_is_written_while_another_one_is_synced(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only one that was handed in before the sync began."""
    store = open_store()
    held = HeldSync(store, monkeypatch, [])
    keys = make_keys(2)
    later = store.store(keys, filled_buffers(keys, SMALL))
    flying = store._writer._flying
    wait_until(lambda: [not batch.blocks_left for batch in list(flying)] == [True, True])
    assert not held.stored.done()
    assert not later.done()
    held.let_go()
    assert held.stored.result(SECONDS) == [Stored.KEPT]
    assert later.result(SECONDS) == [Stored.KEPT] * 2
    assert None not in fetch(store, held.key + keys)


def test_no_row_is_removed_while_a_batch_is_synced_and_committed(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread at a time uses the index: a batch without free slots waits for the other one."""
    store = open_store(slots=8)
    assert all(put(store, make_keys(8, "old")))
    events: list[str] = []
    held = HeldSync(store, monkeypatch, events)
    monkeypatch.setattr(IndexFile, "put", noting(events, "row", IndexFile.put))
    monkeypatch.setattr(IndexFile, "delete", noting(events, "removed", IndexFile.delete))
    keys = make_keys(4)
    later = store.store(keys, filled_buffers(keys, SMALL))
    with store._state.lock:
        assert len(store._writer.queue.waiting) == 4
        assert not store._writer._can_begin()
    held.let_go()
    assert held.stored.result(SECONDS) == [Stored.KEPT]
    assert later.result(SECONDS) == [Stored.KEPT] * 4
    assert events == ["synced", "row", "removed", "synced", "row"]
    assert None not in fetch(store, held.key + keys)


def test_a_bug_at_the_end_while_the_disk_holds_a_sync(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that waits for the other one waits no longer than it may."""
    monkeypatch.setattr(writer, "GRACE_SECONDS", 0.05)
    store = open_store()
    held = HeldSync(store, monkeypatch, [])

    def bug(*_arguments: object) -> bool:
        raise RuntimeError("as asked")

    monkeypatch.setattr(writer.Writer, "_can_begin", bug)
    store.close(0.05)
    first, second = store._writer._thread, store._writer._ender
    first.join(SECONDS / 2)
    assert (first.is_alive(), second.is_alive()) == (False, True)
    assert store._has_open_files, "the second thread uses them"
    held.let_go()
    assert held.stored.result(SECONDS) == [Stored.KEPT]
    second.join(SECONDS)
    store.close(SECONDS)
    assert not store._has_open_files


def store_three_batches(
    store: SsdStore, monkeypatch: pytest.MonkeyPatch, keys: list[bytes]
) -> list[bool]:
    """Store three blocks, a batch each, of which the first is the last to be written."""
    monkeypatch.setattr(store._writer, "_batch_blocks", 1)
    flying, real, buffers = store._writer._flying, SlotFile.start_write, filled_buffers(keys, SMALL)

    def write(self: SlotFile, *arguments: Any) -> None:
        if writes(arguments, buffers[0]):
            wait_until(lambda: [not batch.blocks_left for batch in flying] == [False, True, True])
        real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(SlotFile, "start_write", write)
        return store.store(keys, buffers).result(SECONDS)


def test_batches_that_are_written_are_ended_together(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    keys = make_keys(3)
    events: list[str] = []
    monkeypatch.setattr(SlotFile, "sync", noting(events, "sync", SlotFile.sync))
    monkeypatch.setattr(IndexFile, "put", noting(events, "row", IndexFile.put))
    assert store_three_batches(store, monkeypatch, keys) == [Stored.KEPT] * 3
    assert events == ["sync", "row"]
    assert [row.key for row in store._state.index.iter_by_use()] == keys, (
        "the oldest is evicted first"
    )
    store.close(SECONDS)
    store = open_store()
    assert [row.key for row in store._state.index.iter_by_use()] == keys
    assert None not in fetch(store, keys)


@pytest.mark.parametrize("fault", ["sync", "commit"])
def test_batches_that_are_ended_together_fail_together(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    store = open_store(slots=3)
    keys = make_keys(3)

    def fail(*_arguments: object) -> None:
        raise OSError(errno.EIO, "as asked") if fault == "sync" else lmdb.DiskError("as asked")

    with monkeypatch.context() as patch:
        patch.setattr(*((SlotFile, "sync") if fault == "sync" else (IndexFile, "put")), fail)
        assert store_three_batches(store, monkeypatch, keys) == [Stored.REFUSED] * 3
    assert store.lookup(keys) == [Answer.MISS] * 3
    assert put(store, make_keys(3, "after")) == [True] * 3, "their slots are free again"
    store.close(SECONDS)
    assert open_store(slots=3).lookup(keys) == [Answer.MISS] * 3


def test_a_failed_sync_takes_what_was_being_written_meanwhile(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports it once: the second batch's own sync would say that all is well."""
    monkeypatch.setattr(writer, "BATCH_BLOCKS", 1)
    store = open_store()
    failures = iter([OSError(errno.EIO, "as asked")])
    real = SlotFile.sync

    def sync(self: SlotFile) -> None:
        for failure in failures:
            raise failure
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(SlotFile, "sync", sync)
        two = TwoBatches(store, patch)
        assert two.first.result(SECONDS) == [Stored.REFUSED]
        two.let_go()
        assert two.second.result(SECONDS) == [Stored.REFUSED]
    assert store.lookup(two.keys) == [Answer.MISS] * 2
    assert store.stats().errors == {"EIO": 1}
    assert put(store, two.keys) == [True] * 2


def test_a_slot_whose_row_may_be_on_the_disk_is_not_written_before_it_is_removed(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that fails may have taken place all the same."""
    store = open_store()
    keys = make_keys(3)
    real, events = IndexFile.put, []

    def put_and_fail(self: IndexFile, *arguments: object) -> None:
        real(self, *arguments)  # type: ignore[arg-type]
        raise lmdb.DiskError("as asked")

    with monkeypatch.context() as patch:
        patch.setattr(IndexFile, "put", put_and_fail)
        assert put(store, keys) == [False] * 3
    monkeypatch.setattr(IndexFile, "delete", noting(events, "removed", IndexFile.delete))
    wait_until(lambda: not store._state.index.has_leaving)
    store.close(SECONDS)
    assert open_store().lookup(keys) == [Answer.MISS] * 3


def test_a_due_sync_does_not_wait_for_a_slow_write(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the thread does not spin meanwhile."""
    monkeypatch.setattr(row_writer, "SYNC_SECONDS", 0.1)
    monkeypatch.setattr(writer, "BATCH_BLOCKS", 1)
    store = open_store(durability="async")
    steps: list[str] = []
    events: list[str] = []
    monkeypatch.setattr(
        writer.Writer, "_advance_batches", noting(steps, "step", writer.Writer._advance_batches)
    )
    monkeypatch.setattr(IndexFile, "put", noting(events, "row", IndexFile.put))
    two = TwoBatches(store, monkeypatch)
    assert two.first.result(SECONDS) == [Stored.KEPT]
    wait_until(lambda: events == ["row"])
    before = len(steps)
    time.sleep(0.2)
    assert len(steps) - before < 5
    two.let_go()
    assert two.second.result(SECONDS) == [Stored.KEPT]


def test_a_batch_that_finds_no_room_waits_for_the_one_under_way(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All slots are in a batch that is being written; its blocks can be evicted only after it."""
    store = open_store(slots=8)
    keys = make_keys(16)
    gate, begun, real = threading.Event(), threading.Event(), SlotFile.start_write

    def write(self: SlotFile, *arguments: object) -> None:
        begun.set()
        gate.wait(SECONDS)
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SlotFile, "start_write", write)
    first = store.store(keys[:8], filled_buffers(keys[:8], SMALL))
    assert begun.wait(SECONDS)
    second = store.store(keys[8:], filled_buffers(keys[8:], SMALL))
    gate.set()
    assert first.result(SECONDS) == second.result(SECONDS) == [Stored.KEPT] * 8
    assert None not in fetch(store, keys[8:])
