# SPDX-License-Identifier: Apache-2.0
"""A store that is down when it is to be opened: nobody waits, and it is used once it is up."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stratakv.tiers.assemble import open_or_wait, open_ssd
from stratakv.tiers.base import Answer, Stored, StoreTier
from stratakv.tiers.contract import check_store_contract
from stratakv.tiers.errors import TierConfigError, TierDown
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.hierarchy.hierarchy_options import HierarchyOptions
from stratakv.tiers.reopening_store import ReopeningStore
from stratakv.tiers.ssd.store import SsdStore
from stratakv.tiers.testing.memory_store import MemoryStore
from stratakv.tiers.tier_settings import SsdSettings

from ..simulation.small_slab import small_slab
from .blocks import ODD
from .rig import LAYOUT, content, keys
from .store_contract import wait_until

MIB = 1024**2


class Place:
    """Opens a store in memory, when it is up."""

    def __init__(self, store: StoreTier) -> None:
        self.store = store
        self.error: Exception | None = TierDown("nothing is mounted there")
        self.times = 0
        self.opening = threading.Event()
        self.may_open = threading.Event()
        self.may_open.set()

    def open(self, create: bool) -> StoreTier:
        self.times += 1
        self.opening.set()
        assert self.may_open.wait(10.0)
        if self.error is not None:
            raise self.error
        return self.store


@pytest.fixture
def place() -> Place:
    return Place(MemoryStore(LAYOUT, 10**6, name="net"))


def standby(place: Place) -> ReopeningStore:
    return ReopeningStore(
        "net", place.store.layout, place.open, first_pause_seconds=0.005, longest_pause_seconds=0.02
    )


def put_in(store: StoreTier, *numbers: int) -> None:
    names = keys(*numbers)
    buffers = [memoryview(bytearray(content(name))) for name in names]
    assert store.store(names, buffers).result(5) == [Stored.KEPT] * len(names)


def test_what_is_up_is_opened_as_it_is(place: Place) -> None:
    place.error = None
    assert open_or_wait("net", LAYOUT, place.open) is place.store


def test_while_it_is_down_it_is_empty_and_takes_nothing(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    store = open_or_wait("net", LAYOUT, place.open)
    assert caplog.messages == [
        "serving without the net tier until it can be opened: nothing is mounted there"
    ]
    buffer = memoryview(bytearray(LAYOUT.page_bytes))
    assert store.lookup(keys(1, 2)) == [Answer.MISS] * 2
    assert store.load(keys(1), [buffer]).result(0) == [None]
    assert store.store(keys(1), [buffer]).result(0) == [Stored.REFUSED]
    store.touch(keys(1))
    store.observe(keys(1), 1.0)
    assert not store.learns
    assert store.drop(keys(1)) == 0
    assert store.prefetch_lookup(keys(1)) is None and store.trial_read(0.0) is None
    assert store.lease(keys(1), 60.0) is None
    assert store.stats().errors == {"down": 1}
    store.close(1.0)


def test_once_it_is_up_it_is_what_was_opened(place: Place) -> None:
    put_in(place.store, 1)
    store = standby(place)
    wait_until(lambda: place.times >= 5)
    place.error = None
    wait_until(lambda: store.lookup(keys(1)) == [Answer.HIT])
    times = place.times
    put_in(store, 2)
    assert place.store.lookup(keys(1, 2)) == [Answer.HIT] * 2
    assert store.stats().errors["down"] == times
    assert store.drop(keys(1)) == 1
    store.clear()
    assert place.store.lookup(keys(2)) == [Answer.MISS]
    store.close(1.0)
    assert place.times == times


def test_a_store_is_told_of_prompts_and_of_leases_once_it_is_up(tmp_path: Path) -> None:
    path, layout = tmp_path / "ssd", LAYOUT
    place = Place(SsdStore(path, layout, 16 * MIB, policy="adaptive"))
    store = standby(place)
    assert not store.learns
    place.error = None
    wait_until(lambda: store.learns)
    chain = keys(1, 2)
    store.observe(chain, 1.0)
    put_in(store, 1, 2)
    lease = store.lease(keys(1, 3), 60.0)
    assert lease is not None and lease.result(5) == [True, False]
    policy = place.store._state.index._policy  # type: ignore[attr-defined]
    assert set(policy._history.blocks) == set(chain)
    store.close(5.0)


def test_it_keeps_the_promise_of_a_store() -> None:
    place = Place(MemoryStore(ODD, 100 * ODD.page_bytes, name="net"))
    place.error = None
    store = standby(place)
    wait_until(lambda: store.stats().capacity_bytes)
    check_store_contract(store)


def test_pauses_grow_to_a_bound(place: Place) -> None:
    store = ReopeningStore(
        "net", LAYOUT, place.open, first_pause_seconds=0.01, longest_pause_seconds=30.0
    )
    wait_until(lambda: place.times >= 5)
    assert place.times < 10
    store.close(5.0)


def test_what_can_never_work_ends_the_trying(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for error in (TierConfigError("it is of another model"), RuntimeError("a bug")):
        place.error, times = error, place.times
        store = standby(place)
        store._thread.join(5.0)
        assert not store._thread.is_alive() and place.times == times + 1
        assert store.lookup(keys(1)) == [Answer.MISS]
        store.close(1.0)
    assert "the net tier stays closed: it is of another model" in caplog.text


def test_what_was_forgotten_meanwhile_does_not_come_back(place: Place) -> None:
    put_in(place.store, 1)
    store = standby(place)
    store.clear()
    place.error = None
    wait_until(lambda: store.stats().capacity_bytes)
    assert store.lookup(keys(1)) == [Answer.MISS]
    store.close(1.0)


def test_closed_while_it_is_opening_it_closes_what_it_opened(place: Place) -> None:
    place.error = None
    place.may_open.clear()
    store = standby(place)
    assert place.opening.wait(5.0)
    store.close(0.05)
    place.may_open.set()
    store._thread.join(5.0)
    with pytest.raises(Exception, match="closed"):
        place.store.store([], [])


def test_a_hierarchy_goes_on_without_it_and_uses_it_later(place: Place) -> None:
    store = standby(place)
    hierarchy = Hierarchy(
        small_slab(LAYOUT, 16),
        [store],
        wakeup=lambda: None,
        options=HierarchyOptions(watermark=1.0),
    )

    def put(*numbers: int) -> None:
        for number in numbers:
            hierarchy.end_store(hierarchy.begin_store(keys(number)), ok=True)
            hierarchy.poll()

    put(*range(100))
    traffic = hierarchy.traffic()["net"]
    assert (traffic.breaker, traffic.write_breaker) == ("closed", "closed")
    place.error = None
    wait_until(lambda: store.stats().capacity_bytes)
    put(*range(100, 200))
    assert hierarchy.flush(5.0)
    assert place.store.stats().blocks
    assert hierarchy.close(5.0)


@pytest.fixture
def mend(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """`tmp_path/disk` cannot be written to until this is called."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid():
        disk.chmod(0o500)
        yield lambda: disk.chmod(0o700)
        return
    command = ["mount", "-t", "tmpfs", "-o", "ro,size=64m", "none", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("root may not mount here, and may write everywhere")
    remount = ["mount", "-o", "remount,rw", str(disk)]
    yield lambda: subprocess.run(remount, check=True) and None
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_disk_that_becomes_writable_is_used(tmp_path: Path, mend: Callable[[], None]) -> None:
    def open_it(create: bool) -> SsdStore:
        return SsdStore(tmp_path / "disk" / "ssd", LAYOUT, 16 * MIB, create=create)

    with pytest.raises(TierDown, match="cannot write to"):
        open_it(True)
    store = ReopeningStore(
        "ssd", LAYOUT, open_it, first_pause_seconds=0.02, longest_pause_seconds=0.05
    )
    wait_until(lambda: store.stats().errors["down"] > 2)
    mend()
    wait_until(lambda: store.stats().capacity_bytes)
    put_in(store, 1, 2)
    assert store.lookup(keys(1, 2)) == [Answer.HIT] * 2
    store.close(5.0)


def test_a_store_that_counts_its_blocks_is_used_while_it_has_none(place: Place) -> None:
    class Counting(MemoryStore):
        def __len__(self) -> int:
            return 0

    inner = Counting(LAYOUT, 10**6, name="net")
    store = ReopeningStore("net", LAYOUT, place.open, inner)
    put_in(store, 1)
    assert store.opened is inner and store.is_up
    assert store.lookup(keys(1)) == [Answer.HIT]
    store.close(1.0)


def test_nothing_stays_open_where_what_follows_an_opening_fails(tmp_path: Path) -> None:
    def fail(_folder: Path) -> None:
        raise ValueError("planted")

    ssd = SsdSettings(path=tmp_path / "ssd", capacity_bytes=16 * MIB)
    with pytest.raises(ValueError, match="planted"):
        open_ssd(LAYOUT, ssd, namespace=b"n", after_opening=fail)
    SsdStore(tmp_path / "ssd", LAYOUT, 16 * MIB, namespace=b"n").close(5.0)  # its lock is free
