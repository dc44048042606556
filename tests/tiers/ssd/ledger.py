# SPDX-License-Identifier: Apache-2.0
"""What a store must still have after a crash, told from the log of a child (see `churn.py`).

A block must be there if it was acknowledged and nothing that ends it was announced since: its row
going, the block dropped. Nothing is said of blocks that were not acknowledged; but whatever a store
has must have the right bytes.
"""

from __future__ import annotations

import time
from pathlib import Path

from stratakv.tiers.mac_key import MacKey
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.store_check import check_store

from ..blocks import ODD
from ..store_contract import SECONDS, fetch, put
from .nursery import Nursery
from .stores import store_keys

NO_ROW = -1  # acknowledged by a store that is not durable, and not committed yet


class Ledger:
    """Blocks that must be there, by the slots they are in."""

    def __init__(self, rows: dict[int, bytes] | None = None) -> None:
        self._slot_of = {key: slot for slot, key in (rows or {}).items()}  # as last announced
        self._kept = dict(self._slot_of)
        self.words: list[str] = []  # what the log said, without the items

    @property
    def must_have(self) -> set[bytes]:
        return set(self._kept)

    def within(self, num_slots: int) -> set[bytes]:
        """What must be there after the store was made smaller."""
        return {key for key, slot in self._kept.items() if slot < num_slots}

    def read(self, log: bytes, *, acknowledging: bool = True) -> None:
        """Take in complete lines. What was acknowledged after a power cut began does not count,
        what left counts."""
        for line in log[: log.rfind(b"\n") + 1].decode().splitlines():
            word, *items = line.split(" ")
            self.words.append(word)
            if word == "rows":
                for slot, key in (item.split(":") for item in items):
                    self._slot_of[bytes.fromhex(key)] = int(slot)
            elif word == "gone":
                gone = set(map(int, items))
                self._kept = {key: slot for key, slot in self._kept.items() if slot not in gone}
            elif word == "drop":
                for key in map(bytes.fromhex, items):
                    self._kept.pop(key, None)
            elif word == "kept" and acknowledging:
                for key in map(bytes.fromhex, items):
                    self._kept[key] = self._slot_of.get(key, NO_ROW)


class Verdict:
    """What a store that was opened after a crash has. Every block it serves has been compared
    with what was stored (`fetch` does), and it took new ones."""

    def __init__(self, path: Path, capacity: int, mac_key: MacKey | None = None) -> None:
        store = SsdStore(path, ODD, capacity, mac_key=mac_key)
        try:
            rows = list(store._opened.index_file.iter_rows())
            self.rows = {row.slot: row.key for row in rows}
            known = store_keys(store)
            found = fetch(store, known)
            self.served = {k for k, payload in zip(known, found, strict=True) if payload}
            self.stats = store.stats()
            assert self.stats.blocks <= self.stats.capacity_blocks
            assert put(store, known[:1]) == [True] * len(known[:1])
        finally:
            store.close(SECONDS)


def check_sound(path: Path, mac_key: MacKey | None = None) -> None:
    """What a crash has left needs no repair: every row names a whole record."""
    if (path / "lock").exists():  # else the crash came before there was a store
        result = check_store(path, mac_key=mac_key)
        assert result.is_clean, result.problems


def wait_for_word(log: Path, word: str, nursery: Nursery, seconds: float = 30.0) -> None:
    """Until a child has said it."""
    deadline = time.monotonic() + seconds
    sought = f"\n{word}".encode()
    while not log.exists() or sought not in b"\n" + log.read_bytes():
        assert time.monotonic() < deadline, f"no {word!r}: {nursery.errors()}"
        time.sleep(0.001)
