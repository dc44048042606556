# SPDX-License-Identifier: Apache-2.0
"""What a host is told of chunks, over a store that ends what the test lets it end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stratakv.connector.chunks import build, mover
from stratakv.connector.chunks.chunk_settings import chunk_host
from stratakv.connector.chunks.tiers import ChunkTiers
from stratakv.tiers import assemble
from stratakv.tiers.contract import make_keys
from stratakv.tiers.settings.values import ConfigError

from ...tiers.rig import LAYOUT, WAIT_SECONDS, HeldStore, content, keys

NUM_SLOTS = 256  # of the smallest slab


@pytest.fixture
def store() -> HeldStore:
    return HeldStore()


@pytest.fixture
def tiers(
    store: HeldStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ChunkTiers]:
    monkeypatch.setattr(assemble, "open_stores", lambda *_, **__: [store])
    given = {"cpu_bytes": "1MiB", "ssd_path": str(tmp_path), "read_seconds": 60}
    settings = chunk_host("a host").read(given)
    made = build.open_chunk_tiers(settings, LAYOUT.page_bytes, b"test", "a host", "folder")
    assert made._slab.num_slots == NUM_SLOTS
    yield made
    store.hold_stores = store.hold_loads = False
    store.release()
    made.close(WAIT_SECONDS)


def put(tiers: ChunkTiers, numbers: range) -> list[bool]:
    names = keys(*numbers)
    return tiers.store(names, [[memoryview(content(k))] for k in names]).result(WAIT_SECONDS)


def get(tiers: ChunkTiers, numbers: range) -> list[bool]:
    names = keys(*numbers)
    targets = [bytearray(LAYOUT.page_bytes) for _ in names]
    answers = tiers.load(names, [[memoryview(each)] for each in targets]).result(WAIT_SECONDS)
    for name, target, came in zip(names, targets, answers, strict=True):
        assert not came or bytes(target) == content(name)
    return answers


def test_what_was_said_to_be_kept_is_there_however_much_is_loaded(
    tiers: ChunkTiers, store: HeldStore
) -> None:
    """Of 64 chunks below LMCache 4 were misses once: loads had evicted them before their write."""
    half = NUM_SLOTS // 2
    below = [range(first, first + half) for first in (1000, 1000 + half)]
    for numbers in below:
        assert all(put(tiers, numbers))
    assert tiers.lookup(keys(*below[0], *below[1])).result(WAIT_SECONDS).count(False) == 0
    store.hold_stores = True
    assert all(put(tiers, range(half)))
    for numbers in below:
        assert all(get(tiers, numbers))
    assert all(tiers.lookup(keys(*range(half))).result(WAIT_SECONDS))
    assert tiers.stats()["cpu"].dropped_stores == 0


@pytest.mark.parametrize("part", ["_hierarchy.poll", "_hierarchy.end_load", "_slab.proofs"])
def test_every_job_ends_when_the_thread_fails(
    tiers: ChunkTiers, store: HeldStore, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    assert all(put(tiers, range(4)))
    owner, name = part.split(".")
    with tiers.lock:
        monkeypatch.setattr(getattr(tiers, owner), name, _fails)
        if name == "poll":
            monkeypatch.setattr(tiers._hierarchy, "end_load", _fails)
    assert not any(get(tiers, range(4)))
    wait_for(lambda: tiers.is_broken)
    assert not any(put(tiers, range(4)))
    assert not any(tiers.lookup(keys(0)).result(WAIT_SECONDS))
    monkeypatch.undo()


def test_a_load_that_threads_share_is_compared_whole(
    tiers: ChunkTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "SHARE_BYTES", LAYOUT.page_bytes)
    bring, names = ChunkTiers._bring_some, set()

    def noted(self: ChunkTiers, arrived: Any) -> list[bytes]:
        names.add(threading.current_thread().name)
        return bring(self, arrived)

    monkeypatch.setattr(ChunkTiers, "_bring_some", noted)
    assert all(put(tiers, range(9)))
    with tiers.lock:
        slab = tiers._slab
        for slot in slab.pin(keys(2, 5), touch=False):
            slab.buffer(slot)[7] ^= 1
        slab.unpin(keys(2, 5))
    assert get(tiers, range(9)) == [number not in (2, 5) for number in range(9)]
    assert len(names) == mover.COPY_THREADS
    assert tiers.damaged == 2


def test_nobody_writes_into_the_hosts_memory_after_a_load_has_failed(
    tiers: ChunkTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "SHARE_BYTES", LAYOUT.page_bytes)
    assert all(put(tiers, range(8)))
    bring, driver = ChunkTiers._bring_some, tiers._thread
    failed, go_on = threading.Event(), threading.Event()

    def bring_some(self: ChunkTiers, arrived: Any) -> list[bytes]:
        if threading.current_thread() is driver:
            failed.set()
            _fails()
        go_on.wait(WAIT_SECONDS)
        return bring(self, arrived)

    monkeypatch.setattr(ChunkTiers, "_bring_some", bring_some)
    targets = [bytearray(LAYOUT.page_bytes) for _ in range(8)]
    asked = tiers.load(keys(*range(8)), [[memoryview(each)] for each in targets])
    assert failed.wait(WAIT_SECONDS)
    with pytest.raises(TimeoutError):
        asked.result(0.2)
    go_on.set()
    assert not any(asked.result(WAIT_SECONDS))
    then = [bytes(each) for each in targets]
    assert any(map(any, then)), "the other thread wrote nothing at all"
    tiers._helpers.shutdown(wait=True)
    assert [bytes(each) for each in targets] == then


def _fails(*_: Any) -> Any:
    raise RuntimeError("on purpose")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_disks_of_which_one_cannot_be_made(tmp_path: Path) -> None:
    """It is waited for and the other serves; where it is required, or none can be made, it is
    named."""
    names = make_keys(64)
    both = f"{tmp_path}/a,/proc/stratakv"

    def opened(path: str, **more: Any) -> ChunkTiers:
        given = {"cpu_bytes": "1MiB", "ssd_path": path, "ssd_bytes": "32MiB", **more}
        settings = chunk_host("a host").read(given)
        return build.open_chunk_tiers(settings, LAYOUT.page_bytes, b"test", "a host", "folder")

    for refused in ({"path": both, "require_tiers": True}, {"path": "/proc/stratakv"}):
        with pytest.raises(ConfigError, match="/proc/stratakv cannot be made"):
            opened(**refused)
    made = opened(both)
    try:
        chunks = [[memoryview(content(name))] for name in names]
        assert all(made.store(names, chunks).result(WAIT_SECONDS))
    finally:
        made.close(WAIT_SECONDS)
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["folder"]
    again = opened(both)
    try:
        there = again.lookup(names).result(WAIT_SECONDS)
    finally:
        again.close(WAIT_SECONDS)
    assert 0 < there.count(True) < 64


def test_the_share_of_a_disk_holds_a_chunk(tmp_path: Path) -> None:
    named = ",".join(str(tmp_path / str(number)) for number in range(16))
    given = {"cpu_bytes": "16MiB", "ssd_path": named, "ssd_bytes": "16MiB"}
    settings = chunk_host("a host").read(given)
    with pytest.raises(ConfigError, match="on each of 16 disks; make it more"):
        build.open_chunk_tiers(settings, 1 << 20, b"test", "a host", "folder")
