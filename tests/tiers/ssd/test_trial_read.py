# SPDX-License-Identifier: Apache-2.0
"""The trial read: what it reads, what it leaves as it was, and a disk that is late or broken."""

from __future__ import annotations

import errno
import threading
import time

import pytest

from stratakv.tiers.ssd import store as store_module
from stratakv.tiers.ssd.disk.disk_queue import DiskQueue, Result
from stratakv.tiers.ssd.disk.slot_file import SlotFile

from ..blocks import make_keys
from ..store_contract import put
from .stores import BIG, Open


def test_all_that_is_there_is_read_once_and_nothing_notices(open_store: Open) -> None:
    store = open_store(layout=BIG)
    keys = make_keys(30)
    assert all(put(store, keys))
    before, order = store.stats(), store._state.index.coldest_slots(30)
    sample = store.trial_read(10.0)
    assert sample is not None
    assert sample.num_bytes == 30 * BIG.page_bytes
    assert 0.0 < sample.seconds < 10.0
    assert store.stats() == before
    assert store._state.index.coldest_slots(30) == order


def test_no_more_than_its_bytes_are_read(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "TRIAL_BYTES", 3 * BIG.slot_bytes)
    store = open_store(layout=BIG)
    assert all(put(store, make_keys(10)))
    sample = store.trial_read(10.0)
    assert sample is not None and sample.num_bytes == 3 * BIG.page_bytes


def test_an_empty_or_closed_store_tells_nothing(open_store: Open) -> None:
    store = open_store(layout=BIG)
    assert store.trial_read(1.0) is None
    put(store, make_keys(2))
    store.close(10.0)
    assert store.trial_read(1.0) is None


def test_a_disk_that_fails_tells_nothing(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(layout=BIG)
    put(store, make_keys(5))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(SlotFile, "start_read", fail)
    assert store.trial_read(1.0) is None
    assert store.stats().errors == {}


def test_a_disk_that_hangs_is_waited_for_no_longer_than_allowed(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(layout=BIG)
    put(store, make_keys(40))
    release, answered = threading.Event(), threading.Lock()
    real = SlotFile.open_queue
    monkeypatch.setattr(
        SlotFile, "open_queue", lambda self, most: _OneAnswer(real(self, most), answered, release)
    )
    began = time.monotonic()
    sample = store.trial_read(0.5)
    took = time.monotonic() - began
    release.set()
    assert 0.5 <= took < 20.0
    assert sample is not None and sample.seconds >= 0.5, "what had come by then, and how long"
    assert sample.num_bytes < 40 * BIG.page_bytes


class _OneAnswer:
    """A disk that gives one answer to whichever thread is first, and the others once released."""

    is_blocking = False

    def __init__(self, disk: DiskQueue, answered: threading.Lock, release: threading.Event) -> None:
        self._disk, self._answered, self._release = disk, answered, release
        self._held: list[tuple[int, Result]] = []
        self.start, self.submit, self.close = disk.start, disk.submit, disk.close

    def wait_completions(self) -> list[tuple[int, Result]]:
        held = self._held or self._disk.wait_completions()
        if self._answered.acquire(blocking=False):
            first, *self._held = held
            return [first]
        self._release.wait(30.0)
        self._held = []
        return held
