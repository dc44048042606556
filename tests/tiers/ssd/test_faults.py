# SPDX-License-Identifier: Apache-2.0
"""Faults of the disk and of the index are counted answers, never exceptions or hangs."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.disk.disk_queue import AioQueue, BlockingQueue
from stratakv.tiers.ssd.disk.slot_file import SlotFile
from stratakv.tiers.ssd.index.index_file import IndexFile

from ...threads import check_threads
from ..blocks import SMALL, make_keys
from ..store_contract import SECONDS, fetch, put

CAPACITY = 4 * 1024**2


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SsdStore]:
    made = SsdStore(tmp_path / "ssd", SMALL, CAPACITY)
    yield made
    made.close(SECONDS)


def failing(code: int) -> Callable[..., int]:
    def fail(*_arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_read_error_costs_the_bad_record_only(
    store: SsdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(10)
    put(store, keys)
    bad = store._state.index.pin(keys[4:5])[0]
    assert bad is not None
    real = SlotFile.start_read

    def read(
        self: SlotFile, disk: object, number: int, slot: int, payloads: list[memoryview], *rest: Any
    ) -> None:
        if slot <= bad.slot < slot + len(payloads):
            raise OSError(errno.EIO, "Input/output error")
        real(self, disk, number, slot, payloads, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(SlotFile, "start_read", read)
        assert [found is None for found in fetch(store, keys)] == [i == 4 for i in range(10)]
    assert store.stats().errors == {"EIO": 1}
    assert store.lookup(keys[4:5]) == [Answer.MISS]
    assert put(store, keys[4:5]) == [True]
    assert None not in fetch(store, keys)


@pytest.mark.parametrize("step", ["start_write", "sync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_write_error_keeps_nothing_and_heals(
    store: SsdStore, monkeypatch: pytest.MonkeyPatch, step: str, code: int
) -> None:
    keys = make_keys(20)
    with monkeypatch.context() as patch:
        patch.setattr(SlotFile, step, failing(code))
        assert put(store, keys[:10]) == [False] * 10
        assert store.lookup(keys[:10]) == [Answer.MISS] * 10
    stats = store.stats()
    assert stats.errors == {errno.errorcode[code]: 1}
    assert (stats.dropped_stores, stats.stored_blocks) == (10, 0)
    assert put(store, keys) == [True] * 20
    assert None not in fetch(store, keys)


def test_a_failed_commit_keeps_nothing_and_heals(
    store: SsdStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(10)

    def full(*_arguments: object) -> None:
        raise lmdb.MapFullError("as asked")

    with monkeypatch.context() as patch:
        patch.setattr(IndexFile, "put", full)
        assert put(store, keys) == [False] * 10
    assert store.stats().errors == {"MapFullError": 1}
    assert put(store, keys) == [True] * 10
    store.close(SECONDS)
    store = SsdStore(tmp_path / "ssd", SMALL, CAPACITY)
    assert None not in fetch(store, keys)
    store.close(SECONDS)


def test_slots_whose_rows_could_not_be_removed_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SsdStore(tmp_path / "small", SMALL, 780_000)
    slots = store._state.index.num_slots
    assert 4 < slots < 16  # too small to free ahead
    keys = make_keys(3 * slots)
    put(store, keys[:slots])

    def broken(*_arguments: object) -> None:
        raise lmdb.DiskError("as asked")

    with monkeypatch.context() as patch:
        patch.setattr(IndexFile, "delete", broken)
        assert put(store, keys[slots : slots + 2]) == [False] * 2
        assert store.drop(keys[:1]) == 1
    assert store.stats().errors["DiskError"] >= 1
    assert put(store, keys[2 * slots :]) == [True] * slots
    assert None not in fetch(store, keys[2 * slots :])
    store.close(SECONDS)


def test_an_unforeseen_error_ends_the_calls_and_not_the_threads(
    store: SsdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(4)

    def bug(*_arguments: object) -> None:
        raise RuntimeError("as asked")

    with monkeypatch.context() as patch:
        patch.setattr(SlotFile, "start_write", bug)
        assert put(store, keys) == [False] * 4
    assert put(store, keys) == [True] * 4
    with monkeypatch.context() as patch:
        patch.setattr(SlotFile, "start_read", bug)
        assert fetch(store, keys) == [None] * 4
    assert store.stats().errors == {"RuntimeError": 5}
    assert put(store, keys) == [True] * 4
    assert None not in fetch(store, keys)


def test_a_thread_whose_queue_fails_ends_what_is_with_the_disk(
    store: SsdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(10)
    left = [RuntimeError("as asked")]
    for queue in (AioQueue, BlockingQueue):

        def finished(self: Any, real: Callable[..., Any] = queue.wait_completions) -> Any:
            if left:
                raise left.pop()
            return real(self)

        monkeypatch.setattr(queue, "wait_completions", finished)
    assert put(store, keys) == [False] * 10
    assert put(store, keys) == [True] * 10
    left.append(RuntimeError("again"))
    assert fetch(store, keys) == [None] * 10
    assert put(store, keys) == [True] * 10
    assert None not in fetch(store, keys)


@pytest.mark.parametrize("number", [0, 2, 6, 8, 9])
def test_where_a_thread_cannot_be_started_nothing_is_left(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four readers, four writers, and the two that decide."""
    before, real = frozenset(threading.enumerate()), threading.Thread.start
    started: list[str] = []

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("stratakv-ssd"):
            if len(started) == number:
                raise RuntimeError("can't start new thread")
            started.append(thread.name)
        real(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            SsdStore(tmp_path / "ssd", SMALL, CAPACITY)
    assert len(started) == number
    check_threads(before)
    SsdStore(tmp_path / "ssd", SMALL, CAPACITY).close(SECONDS)  # which another one may not hold


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """RLIMIT_FSIZE in a child: opening is refused with the cure; a running store answers False."""
    code = (
        "import resource, signal, sys, mmap, hashlib\n"
        "from stratakv.tiers.block import BlockLayout, pack_key\n"
        "from stratakv.tiers.ssd import SsdStore\n"
        "from stratakv.tiers.errors import TierConfigError\n"
        "layout = BlockLayout(1, 16, 1, 32, 'float32')\n"
        "key = pack_key(hashlib.sha256(b'x').digest())\n"
        "buffer = memoryview(mmap.mmap(-1, 4096))\n"
        "limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, 2**40))\n"
        "limit(2**16)\n"
        "try: SsdStore(sys.argv[1], layout, 10**7)\n"
        "except TierConfigError as error: print(error)\n"
        "limit(2**40)\n"
        "store = SsdStore(sys.argv[1], layout, 10**7)\n"
        "limit(0)\n"
        "print(store.store([key], [buffer]).result(10), store.stats().errors)\n"
        "limit(2**40)\n"
        "print(store.store([key], [buffer]).result(10))\n"
        "store.close(10)\n"
    )
    if resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY:
        pytest.skip("the size of files is limited here already")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "ssd")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refused, failed, healed = done.stdout.splitlines()
    assert "File too large" in refused
    assert "use another path" in refused
    assert failed == "[<Stored.REFUSED: 'refused'>] {'EFBIG': 1}"
    assert healed == "[<Stored.KEPT: 'kept'>]"
