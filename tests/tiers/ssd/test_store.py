# SPDX-License-Identifier: Apache-2.0
"""The SSD store on a real disk: its contract, restarts, eviction, and many threads."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from stratakv.tiers.base import Answer, Stored
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.errors import InvalidBlock, TierBusy
from stratakv.tiers.ssd.disk.slot_file import SlotFile
from stratakv.tiers.ssd.index import index_file

from ..blocks import ODD, SMALL, filled_buffers, make_buffers, make_keys, payload_of
from ..store_contract import SECONDS, check_store, fetch, put, wait_until
from .stores import BIG, Open, store_keys


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
    assert store.store(keys, payloads).result(SECONDS) == [Stored.KEPT] * 4
    targets = [memoryview(bytearray(SMALL.page_bytes + 1))[1:] for _ in keys]
    assert None not in store.load(keys, targets).result(SECONDS)
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
        patch.setattr(SlotFile, "start_read", fail)
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


def test_last_uses_are_written_when_idle_and_not_for_every_read(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratakv.tiers.ssd.writer.IDLE_SECONDS", 0.5)
    written: list[list[bytes]] = []
    real = index_file.IndexFile.put

    def note(self: index_file.IndexFile, rows: list[index_file.Row], *rest: object) -> None:
        written.append([row.key for row in rows])
        real(self, rows, *rest)  # type: ignore[arg-type]

    store = open_store()
    keys = make_keys(20)
    put(store, keys)
    monkeypatch.setattr(index_file.IndexFile, "put", note)
    for key in keys:
        fetch(store, [key])
    wait_until(lambda: written != [])
    assert len(written) <= len(keys) // 2
    store.close(SECONDS)
    assert [key for batch in written for key in batch] == keys


def test_a_full_store_takes_one_commit_for_a_small_batch(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says who was used once, not with each of them."""
    monkeypatch.setattr("stratakv.tiers.ssd.index.row_writer.USES_SECONDS", 1e6)
    monkeypatch.setattr("stratakv.tiers.ssd.writer.IDLE_SECONDS", 1e6)
    store = open_store(slots=64)
    keys = make_keys(100)
    for start in range(0, 72, 4):
        put(store, keys[start : start + 4])
    written, removals = [], []
    real = index_file.IndexFile.put

    def note(self: index_file.IndexFile, rows: list[index_file.Row], *rest: object) -> None:
        written.append([row.key for row in rows])
        real(self, rows, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(index_file.IndexFile, "put", note)
        patch.setattr(index_file.IndexFile, "delete", lambda _, slots: removals.append(slots))
        for start in range(72, 100, 4):
            fetch(store, keys[68:70])
            put(store, keys[start : start + 4])
    assert removals == []
    assert [len(rows) for rows in written] == [4] * 7
    assert None not in fetch(store, keys[68:70])


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
    assert store.load(keys, make_buffers(400, SMALL)).result(SECONDS).count(None) < 400
    assert store.stats().rejected == {}


def test_what_was_cleared_stays_away_after_a_restart(open_store: Open) -> None:
    store = open_store()
    keys = make_keys(40)
    put(store, keys)
    store.clear()
    put(store, keys[:3])
    store.close(SECONDS)
    assert open_store().lookup(keys) == [Answer.HIT] * 3 + [Answer.MISS] * 37


def test_what_no_caller_should_give_is_refused(open_store: Open) -> None:
    store = open_store()
    with pytest.raises(InvalidBlock, match="key of 40 bytes"):
        store.store([b"short"], make_buffers(1, SMALL))
    with pytest.raises(InvalidBlock, match="read-only"):
        store.load(make_keys(1), [memoryview(bytes(SMALL.page_bytes))])
    with pytest.raises(InvalidBlock, match="a proof or None: 2, not 1"):
        store.store(make_keys(2), filled_buffers(make_keys(2), SMALL), [None])
    assert store.lookup(make_keys(2)) == [Answer.MISS] * 2


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
        new = {row.generation for row in index.iter_rows()} - seen
        index.close()
        assert len(new) == 4
        seen |= new
