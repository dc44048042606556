# SPDX-License-Identifier: Apache-2.0
"""Damaged records are never served: each one is a miss, is counted, and is forgotten.

The damage is done to the slot file of a closed store. Where a record lies is read from the index,
so every flip hits a record in use; then every record is loaded, and every record that was not
touched must still be a hit with its own bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from stratakv.tiers.base import Answer, Stored
from stratakv.tiers.block import ALIGNMENT, BlockLayout
from stratakv.tiers.mac_key import MacKey
from stratakv.tiers.record import HEADER_BYTES, Defect
from stratakv.tiers.ssd import SsdStore, record_writer
from stratakv.tiers.ssd.index import index_file
from stratakv.tiers.tag import Tagger

from ..blocks import ODD, SMALL, filled_buffers, make_buffers, make_keys, payload_of
from ..store_contract import SECONDS, fetch, put
from .stores import Open, capacity_for

CAPACITY = 16 * 1024**2
# Bytes of a record that mean something, by what they mean, and the defects they may be called.
FIELDS: dict[str, tuple[range, set[Defect]]] = {
    "magic": (range(8), {Defect.MAGIC}),
    "version": (range(8, 16), {Defect.VERSION}),
    "length": (range(16, 24), {Defect.LENGTH}),
    "generation": (range(24, 32), {Defect.GENERATION}),
    "layout": (range(32, 48), {Defect.LAYOUT}),
    "key": (range(48, 88), {Defect.KEY}),
    "decoded length": (range(88, 96), {Defect.LENGTH}),
    "tag": (range(96, 112), {Defect.CHECKSUM}),
    "checksum": (range(112, HEADER_BYTES), {Defect.CHECKSUM}),
    "payload": (range(ALIGNMENT, ALIGNMENT + SMALL.page_bytes), {Defect.CHECKSUM}),
}


class Victim:
    """A closed store with known blocks, whose slot file a test may damage."""

    def __init__(
        self, path: Path, layout: BlockLayout, count: int, mac_key: MacKey | None = None
    ) -> None:
        self.path, self.layout, self._mac_key = path, layout, mac_key
        self.keys = make_keys(count)
        self.record_bytes = ALIGNMENT + layout.slot_bytes
        store = self.open()
        assert all(put(store, self.keys))
        store.close(SECONDS)
        self.slots = self.read_slots()

    def read_slots(self) -> dict[bytes, int]:
        index = index_file.IndexFile(self.path / "index", 0)
        slots = {row.key: row.slot for row in index.iter_rows()}
        index.close()
        return slots

    def open(self) -> SsdStore:
        return SsdStore(self.path, self.layout, CAPACITY, mac_key=self._mac_key)

    def edit(self, key: bytes, change: Callable[[bytearray], None]) -> None:
        """Change the bytes of one record in place."""
        with (self.path / "blocks").open("r+b") as file:
            file.seek(self.slots[key] * self.record_bytes)
            record = bytearray(file.read(self.record_bytes))
            change(record)
            file.seek(self.slots[key] * self.record_bytes)
            file.write(record)

    def check(self, damaged: set[bytes], allowed: set[Defect]) -> None:
        """Load everything: the damaged are refused, counted and forgotten, the others are whole."""
        store = self.open()
        assert store.lookup(self.keys) == [Answer.HIT] * len(self.keys)
        found = fetch(store, self.keys)
        assert {
            k for k, payload in zip(self.keys, found, strict=True) if payload is None
        } == damaged
        rejected = store.stats().rejected
        assert sum(rejected.values()) == len(damaged)
        assert store.stats().corrupt_records_dropped == len(damaged)
        assert set(rejected) <= {defect.value for defect in allowed}
        refused = sorted(damaged)
        assert store.lookup(refused) == [Answer.MISS] * len(refused)
        # It can be stored again, and the damage does not come back with the next start.
        again = refused[: len(refused) // 2]
        assert all(put(store, again))
        store.close(SECONDS)
        store = self.open()
        answers = dict(zip(refused, store.lookup(refused), strict=True))
        assert {k for k, answer in answers.items() if answer is Answer.HIT} == set(again)
        assert None not in fetch(store, again)
        assert store.stats().rejected == {}
        store.close(SECONDS)


def _flip(rng: random.Random, within: range) -> Callable[[bytearray], None]:
    def change(record: bytearray) -> None:
        record[rng.choice(within)] ^= 1 << rng.randrange(8)

    return change


@pytest.mark.parametrize("mac_key", [None, MacKey(bytes(32))], ids=["plain", "sealed"])
@pytest.mark.parametrize("field", FIELDS)
def test_flipped_bits(
    tmp_path: Path, rng: random.Random, scale: str, field: str, mac_key: MacKey | None
) -> None:
    """10 fields * 60 records in CI: 600 damaged records beside 150 whole ones; as many sealed."""
    within, allowed = FIELDS[field]
    for trial in range(1 if scale == "ci" else 200):
        victim = Victim(tmp_path / f"{trial}", SMALL, 75, mac_key)
        damaged = rng.sample(victim.keys, 60)
        for key in damaged:
            victim.edit(key, _flip(rng, within))
        victim.check(set(damaged), allowed)


def test_any_byte_of_a_record_with_a_partly_filled_page(tmp_path: Path, rng: random.Random) -> None:
    """The padding means nothing: a flip there changes no block, and is no damage."""
    victim = Victim(tmp_path / "a", ODD, 60)
    meaningful = [*range(HEADER_BYTES), *range(ALIGNMENT, ALIGNMENT + ODD.page_bytes)]
    damaged = victim.keys[:40]
    for key in damaged:
        victim.edit(key, lambda record: _flip_one(rng, record, rng.choice(meaningful)))
    padding = [*range(HEADER_BYTES, ALIGNMENT), ALIGNMENT + ODD.slot_bytes - 1]
    for key in victim.keys[40:50]:
        victim.edit(key, lambda record: _flip_one(rng, record, rng.choice(padding)))
    victim.check(set(damaged), set(Defect))


def _flip_one(rng: random.Random, record: bytearray, position: int) -> None:
    record[position] ^= 1 << rng.randrange(8)


def test_zeroed_and_overwritten_pages(tmp_path: Path, rng: random.Random) -> None:
    victim = Victim(tmp_path / "a", SMALL, 60)
    headers, payloads, both, noise = (victim.keys[i : i + 10] for i in (0, 10, 20, 30))

    def blank(start: int, end: int) -> Callable[[bytearray], None]:
        return lambda record: record.__setitem__(slice(start, end), bytes(end - start))

    for key in headers:
        victim.edit(key, blank(0, ALIGNMENT))
    for key in payloads:
        victim.edit(key, blank(ALIGNMENT, victim.record_bytes))
    for key in both:
        victim.edit(key, blank(0, victim.record_bytes))
    for key in noise:
        victim.edit(key, lambda record: record.__setitem__(slice(None), rng.randbytes(len(record))))
    damaged = {*headers, *payloads, *both, *noise}
    victim.check(damaged, {Defect.MAGIC, Defect.CHECKSUM})


def test_swapped_slots(tmp_path: Path) -> None:
    """Whole records in the wrong place: their checksums are right, their keys are not."""
    victim = Victim(tmp_path / "a", SMALL, 60)
    for one, other in zip(victim.keys[:20:2], victim.keys[1:20:2], strict=True):
        held: list[bytes] = []
        victim.edit(one, lambda record, held=held: held.append(bytes(record)))  # type: ignore[misc]
        victim.edit(other, lambda record, held=held: _swap(record, held))  # type: ignore[misc]
        victim.edit(one, lambda record, held=held: _swap(record, held))  # type: ignore[misc]
    victim.check(set(victim.keys[:20]), {Defect.KEY})


def _swap(record: bytearray, held: list[bytes]) -> None:
    mine = bytes(record)
    record[:] = held.pop()
    held.append(mine)


def test_a_record_of_an_earlier_generation(tmp_path: Path) -> None:
    """A write that the disk lost: the slot still holds an older, whole record of the same key."""
    victim = Victim(tmp_path / "a", SMALL, 10)
    key = victim.keys[3]
    old: list[bytes] = []
    victim.edit(key, lambda record: old.append(bytes(record)))
    store = victim.open()
    store.drop([key])
    assert put(store, [key]) == [True]
    store.close(SECONDS)
    victim.slots = victim.read_slots()
    victim.edit(key, lambda record: record.__setitem__(slice(None), old[0]))
    victim.check({key}, {Defect.GENERATION})


def test_a_truncated_slot_file(tmp_path: Path) -> None:
    victim = Victim(tmp_path / "a", SMALL, 60)
    kept_slots = 37
    with (victim.path / "blocks").open("r+b") as file:
        file.truncate(kept_slots * victim.record_bytes + 5000)  # inside the next payload
    # Opening gives the file its size again, so that what was lost reads as zeros.
    victim.check(
        {key for key, slot in victim.slots.items() if slot >= kept_slots},
        {Defect.MAGIC, Defect.CHECKSUM},
    )


def test_a_slot_file_truncated_while_open(tmp_path: Path) -> None:
    """The end of the file comes in the middle of a run: what is before it is still served."""
    victim = Victim(tmp_path / "a", SMALL, 60)
    store = victim.open()
    kept_slots = 37
    with (victim.path / "blocks").open("r+b") as file:
        file.truncate(kept_slots * victim.record_bytes + ALIGNMENT)
    found = dict(zip(victim.keys, fetch(store, victim.keys), strict=True))
    lost = {key for key, slot in victim.slots.items() if slot >= kept_slots}
    assert {key for key, payload in found.items() if payload is None} == lost
    assert store.stats().rejected == {Defect.SHORT.value: len(lost)}
    store.close(SECONDS)


def test_a_missing_slot_file_is_a_cold_cache(tmp_path: Path) -> None:
    victim = Victim(tmp_path / "a", SMALL, 20)
    (victim.path / "blocks").unlink()
    victim.check(set(victim.keys), {Defect.MAGIC})


def test_a_buffer_changed_while_it_is_written_is_refused_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that breaks its promise damages its own block only, and is found out."""
    from stratakv.tiers.ssd.disk.slot_file import SlotFile

    store = SsdStore(tmp_path / "a", SMALL, CAPACITY)
    keys = make_keys(2)
    buffers = filled_buffers(keys, SMALL)
    real = SlotFile.start_write

    def change_first(self: SlotFile, *arguments: object) -> None:
        buffers[0][100] ^= 1
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SlotFile, "start_write", change_first)
    assert store.store(keys, buffers).result(SECONDS) == [Stored.KEPT] * 2
    into = make_buffers(2, SMALL)
    found = store.load(keys, into).result(SECONDS)
    assert found[0] is None and found[1] is not None
    assert bytes(into[1]) == payload_of(keys[1], SMALL)
    assert store.stats().rejected == {Defect.CHECKSUM.value: 1}
    store.close(SECONDS)


@pytest.mark.parametrize("way", ["library", "twin", "constant"])
@pytest.mark.parametrize("layout", [SMALL, ODD], ids=["pages", "odd"])
def test_of_proven_blocks_the_damaged_ones_are_not_kept(
    tmp_path: Path, layout: BlockLayout, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a run of them; also where the library cannot hash them, or must not write there."""
    if way == "twin":
        monkeypatch.setattr(record_writer, "has_digests", lambda: False)
    store = SsdStore(tmp_path / "a", layout, capacity_for(40, layout))
    keys, damaged = make_keys(40), {1, 17, 39}
    tagger = Tagger(layout.layout_id(), layout.page_bytes)
    proofs = [tagger.prove(key, payload_of(key, layout)) for key in keys]
    buffers = filled_buffers(keys, layout)
    for place in damaged:
        buffers[place][100] ^= 1
    given = [buffer.toreadonly() for buffer in buffers] if way == "constant" else buffers
    outcomes = store.store(keys, given, proofs).result(SECONDS)
    assert {i for i, each in enumerate(outcomes) if each is Stored.DAMAGED} == damaged
    into = make_buffers(40, layout)
    found = store.load(keys, into).result(SECONDS)
    assert found == [None if i in damaged else proof for i, proof in enumerate(proofs)]
    for place in set(range(40)) - damaged:
        assert bytes(into[place][: layout.page_bytes]) == payload_of(keys[place], layout)
    store.close(SECONDS)


def test_what_the_library_laid_down_is_not_written_again(open_store: Open) -> None:
    """A run of proven blocks, then one as long in the same pages that brings no proofs."""
    store = open_store(io_threads=1)
    keys = make_keys(8)
    buffers = filled_buffers(keys, SMALL)
    tagger = Tagger(SMALL.layout_id(), SMALL.page_bytes)
    proofs = [tagger.prove(key, payload_of(key, SMALL)) for key in keys[:4]]
    for half, given in ((slice(4), proofs), (slice(4, 8), None)):
        stored = store.store(keys[half], buffers[half], given)
        assert stored.result(SECONDS) == [Stored.KEPT] * 4
    assert None not in fetch(store, keys)
