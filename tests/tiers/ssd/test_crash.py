# SPDX-License-Identifier: Apache-2.0
"""kill -9 at any moment: what was acknowledged is there afterwards, and every block is right.

A kill alone cannot show a missing sync, because the page cache survives it; `test_power_cut.py`
can. The order of syncs and commits is tested by itself. The long form (5,000 kills) is
`pytest tests/tiers/ssd/test_crash.py --scale long`; all long forms of the tiers are
`pytest tests/tiers --scale long`.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from stratakv.tiers.mac_key import MacKey
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.disk import slot_file
from stratakv.tiers.ssd.index import index_file

from ..blocks import SMALL, make_keys
from ..store_contract import SECONDS, fetch, put
from .ledger import Ledger, Verdict, check_sound, wait_for_word
from .nursery import Nursery

CAPACITY = 4 * 1024**2
KILLS = {"ci": 12, "long": 5000}
SEALED_KILLS = {"ci": 4, "long": 500}  # which differ in what a checksum is, and in no order
KEY = bytes(range(32))


@pytest.mark.slow
def test_what_was_acknowledged_survives_a_kill(
    memory_path: Path, nursery: Nursery, scale: str, seed: int
) -> None:
    """One store through all the kills, while it is opened, filled, turned over and closed."""
    kill_and_judge(memory_path, nursery, seed, KILLS[scale])


def test_sealed_blocks_survive_a_kill_as_well(
    memory_path: Path, nursery: Nursery, scale: str, seed: int
) -> None:
    kill_and_judge(memory_path, nursery, seed, SEALED_KILLS[scale], KEY)


def kill_and_judge(
    memory_path: Path, nursery: Nursery, seed: int, kills: int, key: bytes = b""
) -> None:
    path, rows, acknowledged, served = memory_path / "ssd", {}, 0, 0
    mac_key = MacKey(key) if key else None
    for trial in range(kills):
        rng = random.Random(f"{seed}/{trial}")
        log = memory_path / f"log-{trial}"
        churn_and_kill(nursery, path, log, rng.choice([0.05, 0.3]) * rng.random(), rng, key=key)
        ledger = Ledger(rows)
        ledger.read(log.read_bytes())
        check_sound(path, mac_key)
        verdict = Verdict(path, CAPACITY, mac_key)
        told = f"trial {trial}, seed {seed}"
        assert ledger.must_have <= verdict.served, told
        assert len(verdict.served) == verdict.stats.blocks, told  # no row without its record
        assert verdict.stats.rejected == verdict.stats.errors == {}, told
        rows = verdict.rows
        acknowledged += ledger.words.count("kept")
        served += len(verdict.served)
        log.unlink()
    assert acknowledged > kills and served > kills


def churn_and_kill(
    nursery: Nursery,
    path: Path,
    log: Path,
    seconds: float,
    rng: random.Random,
    *plants: str,
    key: bytes = b"",
) -> None:
    """`seconds` counts from where the child begins to open the store."""
    seed = rng.randrange(2**32)
    job = {"path": str(path), "log": str(log), "capacity": CAPACITY, "seed": seed}
    pid = nursery.start(kind="churn", plants=plants, durability="sync", mac_key=key.hex(), **job)
    wait_for_word(log, "open", nursery)
    time.sleep(seconds)
    nursery.kill(pid)


@pytest.mark.parametrize("plant", ["no_rows", "no_removal"])
def test_a_store_without_that_order_is_noticed(
    memory_path: Path, nursery: Nursery, rng: random.Random, plant: str
) -> None:
    """The test above has power: it sees rows that are not written, and slots that are written
    while a row still names them. The latter takes a kill between the two."""
    for trial in range(90):
        log, ledger = memory_path / f"log-{trial}", Ledger()
        churn_and_kill(nursery, memory_path / "ssd", log, 0.5, rng, plant)
        ledger.read(log.read_bytes())
        verdict = Verdict(memory_path / "ssd", CAPACITY)
        if plant == "no_rows":
            assert ledger.must_have and not verdict.served
            return
        if verdict.stats.rejected:
            assert verdict.stats.rejected.keys() == {"key"}
            return
    pytest.fail("90 kills did not show it")


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

    def wrote(
        _disk: object, _number: int, slot: int, payloads: list[memoryview], *_: object
    ) -> None:
        slots = set(range(slot, slot + len(payloads)))
        assert not slots & named, "a slot was written while a row on the disk named it"
        unsynced.update(slots)

    def put_rows(rows: list[index_file.Row], deleted: list[int] | tuple[()] = ()) -> None:
        assert not {row.slot for row in rows} & unsynced, "a row came before its record"
        named.update(row.slot for row in rows)
        named.difference_update(deleted)

    spy(slot_file.SlotFile, "start_write", wrote)
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
    assert {"start_write", "sync", "put", "delete"} <= set(events)


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
