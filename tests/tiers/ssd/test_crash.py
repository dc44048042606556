# SPDX-License-Identifier: Apache-2.0
"""kill -9 while writing: everything that was acknowledged is there afterwards, and whole.

A kill alone cannot show a missing sync, because the page cache survives it; the order of syncs and
commits is therefore tested by itself.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.ssd import SsdStore, index_file, slot_file

from ..blocks import ODD, SMALL, make_keys
from ..store_contract import SECONDS, fetch, put

CAPACITY = 4 * 1024**2

# Stores batch after batch into a store that soon is full, and says which are acknowledged.
WRITER = """
import hashlib, mmap, random, sys
from stratakv.tiers.block import BlockLayout, pack_key
from stratakv.tiers.ssd import SsdStore
LAYOUT = BlockLayout(1, 16, 1, 48, "float32")
store = SsdStore(sys.argv[1], LAYOUT, int(sys.argv[2]))
memory = memoryview(mmap.mmap(-1, 12 * LAYOUT.slot_bytes))
size = LAYOUT.slot_bytes
buffers = [memory[i * size : (i + 1) * size] for i in range(12)]
for batch in range(10_000):
    names = range(batch * 12, batch * 12 + 12)
    keys = [pack_key(hashlib.sha256(f"{sys.argv[3]}/{i}".encode()).digest()) for i in names]
    for key, buffer in zip(keys, buffers):
        buffer[:LAYOUT.page_bytes] = random.Random(key).randbytes(LAYOUT.page_bytes)
    store.drop(keys[:2])
    assert all(store.store(keys, buffers).result(30))
    print(batch, flush=True)
"""


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path, scale: str, seed: int) -> None:
    path, acknowledged_last = tmp_path / "ssd", 0
    for trial in range(4 if scale == "ci" else 500):
        delay = 0.02 + (seed * (trial + 1) % 97) / 500
        batches = write_and_kill(path, str(trial), delay)
        acknowledged_last += batches
        keys = make_keys(12 * batches, str(trial))
        store = SsdStore(path, ODD, CAPACITY)
        held = min(len(keys), store.stats().blocks, 12 * 8)
        if held:
            # The last ones cannot have been evicted by the little that came after them.
            assert store.lookup(keys[-held:]).count(Answer.MISS) == 0
        everything = store._state.index.keys()
        assert None not in fetch(store, everything)
        assert store.stats().rejected == store.stats().errors == {}
        store.close(SECONDS)
    assert acknowledged_last > 0


def write_and_kill(path: Path, salt: str, delay: float) -> int:
    """The number of acknowledged batches of a child killed `delay` seconds after its first one."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(CAPACITY), salt],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        first = child.stdout.readline()
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        output = first + child.stdout.read()
    finally:
        child.kill()
        child.wait(30)
    assert child.returncode == -signal.SIGKILL
    return len([line for line in output.splitlines(keepends=True) if line.endswith("\n")])


def test_rows_leave_before_slots_are_written_and_come_after_the_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that a power cut depends on: at no time may a row on the disk name a slot that is
    being written, nor one whose record is not on the disk yet."""
    named: set[int] = set()
    unsynced: set[int] = set()
    events: list[str] = []

    def spy(owner: type, name: str, note: object) -> None:
        real = getattr(owner, name)

        def wrapped(self: object, *arguments: object) -> object:
            result = real(self, *arguments)
            assert callable(note)
            note(*arguments)
            events.append(name)
            return result

        monkeypatch.setattr(owner, name, wrapped)

    def wrote(slot: int, payloads: list[memoryview], _scratch: object) -> None:
        slots = set(range(slot, slot + len(payloads)))
        assert not slots & named, "a slot was written while a row on the disk named it"
        unsynced.update(slots)

    def put_rows(rows: list[index_file.Row], deleted: list[int] | tuple[()] = ()) -> None:
        assert not {row.slot for row in rows} & unsynced, "a row came before its record"
        named.update(row.slot for row in rows)
        named.difference_update(deleted)

    spy(slot_file.SlotFile, "write", wrote)
    spy(slot_file.SlotFile, "sync", unsynced.clear)
    spy(index_file.IndexFile, "put", put_rows)
    spy(index_file.IndexFile, "delete", named.difference_update)
    store = SsdStore(tmp_path / "ssd", SMALL, 2 * 1024**2)
    for batch in range(40):
        keys = make_keys(20, str(batch))
        assert all(put(store, keys))
        fetch(store, keys[:3])
        store.drop(keys[5:7])
    store.close(SECONDS)
    assert {"write", "sync", "put", "delete"} <= set(events)


def test_every_commit_is_synced(tmp_path: Path) -> None:
    """The settings of the environment, which only a power cut would show."""
    index = index_file.IndexFile(tmp_path / "index", 2**20)
    try:
        flags = index._env.flags()
        assert flags["sync"] is True
        assert flags["metasync"] is True
        assert flags["writemap"] is False
        assert flags["map_async"] is False
    finally:
        index.close()
