# SPDX-License-Identifier: Apache-2.0
"""The SSD store with a codec: the same blocks in fewer bytes, and what is damaged is not served."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stratakv.tiers.base import Answer, Stored
from stratakv.tiers.block import ALIGNMENT, BlockLayout
from stratakv.tiers.codecs.base import Codec
from stratakv.tiers.codecs.lossless import LosslessCodec
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.record import HEADER_BYTES, Defect, RecordHeader, encode_header
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.disk.slot_file import SlotFile
from stratakv.tiers.ssd.index.index_file import IndexFile, Row
from stratakv.tiers.ssd.store_check import check_store

from ..blocks import make_buffers, make_keys
from ..store_contract import SECONDS
from ..store_contract import check_store as check_contract
from .stores import capacity_for

# 16 KiB; and 12.5 KiB, whose last page is partly filled.
LAYOUT = BlockLayout(2, 16, 2, 64, "bfloat16")
ODD = BlockLayout(2, 16, 2, 50, "bfloat16")
SLOTS = 64
Make = Callable[..., SsdStore]


class Halving(Codec):
    """Keeps the high byte of each number. Stands for any codec that loses something."""

    name = "halving"
    number = 77
    is_lossless = False

    @classmethod
    def validate_layout(cls, layout: BlockLayout) -> None:
        pass

    def encode(self, payload: memoryview, out: memoryview) -> int | None:
        size = len(payload) // 2
        out[:size] = bytes(payload)[1::2]
        return size

    def decode(self, encoded: memoryview, payload: memoryview) -> None:
        if len(encoded) * 2 != len(payload):
            raise ValueError("not a half")
        payload[:] = bytes(byte for high in encoded for byte in (0, high))


class Wild(Halving):
    """Decodes nothing of what it has written."""

    def decode(self, encoded: memoryview, payload: memoryview) -> None:
        raise ValueError("not mine")


@pytest.fixture
def open_ssd(tmp_path: Path) -> Callable[..., SsdStore]:
    opened: list[SsdStore] = []

    def make(codec: str | Codec | None = "lossless", layout: BlockLayout = LAYOUT) -> SsdStore:
        made = LosslessCodec(layout) if codec == "lossless" else codec
        assert not isinstance(made, str)
        store = SsdStore(tmp_path / "ssd", layout, capacity_for(SLOTS, layout), codec=made)
        opened.append(store)
        return store

    yield make  # type: ignore[misc]
    for store in opened:
        store.close(SECONDS)


def block(key: bytes, layout: BlockLayout = LAYOUT, share: float = 0.9) -> bytes:
    """Numbers of three exponents for a part of the keys, noise for the others."""
    rng = random.Random(key)
    data = bytearray(rng.randbytes(layout.page_bytes))
    if rng.random() < share:
        data[1::2] = bytes(rng.choice((61, 62, 190)) for _ in range(layout.page_bytes // 2))
    return bytes(data)


def put(store: SsdStore, keys: list[bytes], share: float = 0.9) -> None:
    buffers = make_buffers(len(keys), store.layout)
    for key, buffer in zip(keys, buffers, strict=True):
        buffer[:] = b"\xa5" * len(buffer)
        buffer[: store.layout.page_bytes] = block(key, store.layout, share)
    assert set(store.store(keys, buffers).result(SECONDS)) == {Stored.KEPT}


def served(store: SsdStore, keys: list[bytes], share: float = 0.9) -> set[bytes]:
    """The keys that are hits; each with its own bytes and nothing behind them."""
    size = store.layout.page_bytes
    buffers = make_buffers(len(keys), store.layout)
    for buffer in buffers:
        buffer[size:] = b"\x5a" * (len(buffer) - size)
    proofs = store.load(keys, buffers).result(SECONDS)
    hits = set()
    for key, proof, buffer in zip(keys, proofs, buffers, strict=True):
        assert bytes(buffer[size:]) == b"\x5a" * (len(buffer) - size)
        if proof is not None:
            assert bytes(buffer[:size]) == block(key, store.layout, share)
            hits.add(key)
    return hits


def rows_of(path: Path) -> dict[bytes, Row]:
    index = IndexFile(path / "index", 0)
    rows = {row.key: row for row in index.iter_rows()}
    index.close()
    return rows


@pytest.mark.parametrize("layout", [LAYOUT, ODD])
def test_a_store_with_a_codec_keeps_the_contract(open_ssd: Make, layout: BlockLayout) -> None:
    check_contract(open_ssd(layout=layout))


@pytest.mark.parametrize("layout", [LAYOUT, ODD])
def test_fewer_bytes_move(
    open_ssd: Make, tmp_path: Path, layout: BlockLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoded blocks and those that would not become smaller, side by side."""
    sizes: list[int] = []
    real = SlotFile.start_write_encoded

    def write(
        self: SlotFile, disk: object, number: int, slot: int, size: int, scratch: object
    ) -> None:
        sizes.append(size)
        real(self, disk, number, slot, size, scratch)  # type: ignore[arg-type]

    monkeypatch.setattr(SlotFile, "start_write_encoded", write)
    keys = make_keys(SLOTS)
    smooth = {key for key in keys if set(block(key, layout)[1::2]) <= {61, 62, 190}}
    assert 0 < len(smooth) < SLOTS
    store = open_ssd(layout=layout)
    put(store, keys)
    assert served(store, keys) == set(keys)
    stats = store.stats()
    assert stats.stored_bytes == stats.loaded_bytes == SLOTS * layout.page_bytes
    saved = sum((layout.slot_bytes - size) // ALIGNMENT * ALIGNMENT for size in sizes)
    assert stats.stored_bytes_saved == stats.loaded_bytes_saved == saved
    assert len(sizes) == len(smooth)
    assert max(sizes) <= layout.slot_bytes - ALIGNMENT
    store.close(SECONDS)
    rows = rows_of(tmp_path / "ssd")
    assert sorted(row.encoded_bytes for row in rows.values() if row.encoded_bytes) == sorted(sizes)
    assert {key for key, row in rows.items() if row.encoded_bytes} == smooth
    result = check_store(tmp_path / "ssd")
    assert result.is_clean and result.whole == SLOTS


def test_it_may_be_opened_with_and_without_the_codec(open_ssd: Make, tmp_path: Path) -> None:
    keys = make_keys(SLOTS)
    for turn, codec in enumerate(("lossless", None, "lossless", None)):
        store = open_ssd(codec)
        known = keys[: turn * 10]
        assert served(store, known) == set(known)
        put(store, keys[turn * 10 : turn * 10 + 10], share=0.9)
        assert served(store, known) == set(known)
        store.close(SECONDS)
    encoded = {key for key, row in rows_of(tmp_path / "ssd").items() if row.encoded_bytes}
    assert 12 < len(encoded) <= 20
    assert encoded <= {*keys[:10], *keys[20:30]}
    assert check_store(tmp_path / "ssd").is_clean


def test_slots_go_round_between_long_and_short_records(open_ssd: Make, tmp_path: Path) -> None:
    """What a longer record left behind a shorter one is never taken for anything."""
    for turn in range(3):
        store = open_ssd("lossless" if turn % 2 else None)
        for half in range(4):
            keys = make_keys(SLOTS // 2, f"{turn}/{half}")
            put(store, keys)
            assert served(store, keys) == set(keys)
        store.close(SECONDS)
    result = check_store(tmp_path / "ssd")
    assert result.is_clean
    assert result.rows + result.orphans == SLOTS, "every slot was used"


def test_last_uses_keep_the_length(open_ssd: Make) -> None:
    """Rows that are written again, for a use and for a smaller store, say all they said."""
    keys = make_keys(20)
    store = open_ssd()
    put(store, keys)
    store.touch(keys)
    store.close(SECONDS)
    store = open_ssd()
    assert served(store, keys) == set(keys)


def test_without_the_package_encoded_blocks_are_misses(
    open_ssd: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(20)
    store = open_ssd()
    put(store, keys, share=1.0)
    store.close(SECONDS)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.delitem(sys.modules, "stratakv.tiers.codecs.lossless")
    store = open_ssd(None)
    assert served(store, keys, share=1.0) == set()
    assert store.stats().rejected == {Defect.VERSION.value: 20}
    put(store, keys, share=1.0)
    assert served(store, keys, share=1.0) == set(keys)


class Victim:
    """A closed store of encoded blocks, whose slot file a test may damage."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.keys = path, make_keys(count)
        store = self.open()
        put(store, self.keys, share=1.0)
        store.close(SECONDS)
        self.rows = rows_of(path)
        assert all(row.encoded_bytes for row in self.rows.values())

    def open(self) -> SsdStore:
        capacity = capacity_for(SLOTS, LAYOUT)
        return SsdStore(self.path, LAYOUT, capacity, codec=LosslessCodec(LAYOUT))

    def edit(self, key: bytes, change: Callable[[bytearray], None]) -> None:
        size = ALIGNMENT + LAYOUT.slot_bytes
        with (self.path / "blocks").open("r+b") as file:
            file.seek(self.rows[key].slot * size)
            record = bytearray(file.read(size))
            change(record)
            file.seek(self.rows[key].slot * size)
            file.write(record)

    def check(self, damaged: set[bytes], allowed: set[Defect]) -> None:
        """The damaged are found by a check, refused, counted and forgotten; the others whole."""
        result = check_store(self.path)
        assert sum(result.counts.values()) == len(damaged)
        assert result.whole == len(self.keys) - len(damaged)
        store = self.open()
        assert served(store, self.keys, share=1.0) == set(self.keys) - damaged
        stats = store.stats()
        assert sum(stats.rejected.values()) == len(damaged)
        assert set(stats.rejected) <= {defect.value for defect in allowed}
        assert not stats.errors
        assert store.lookup(sorted(damaged)) == [Answer.MISS] * len(damaged)
        store.close(SECONDS)


FIELDS: dict[str, tuple[range, set[Defect]]] = {
    "magic": (range(8), {Defect.MAGIC}),
    "version": (range(8, 12), {Defect.VERSION}),
    "codec": (range(12, 16), {Defect.VERSION}),
    "length": (range(16, 24), {Defect.LENGTH}),
    "generation": (range(24, 32), {Defect.GENERATION}),
    "layout": (range(32, 48), {Defect.LAYOUT}),
    "key": (range(48, 88), {Defect.KEY}),
    "decoded length": (range(88, 96), {Defect.LENGTH}),
    "reserved": (range(96, 112), {Defect.CHECKSUM}),
    "checksum": (range(112, HEADER_BYTES), {Defect.CHECKSUM}),
    "payload": (range(ALIGNMENT, ALIGNMENT + 4000), {Defect.CHECKSUM}),
}


@pytest.mark.parametrize("field", FIELDS)
def test_flipped_bits(tmp_path: Path, rng: random.Random, scale: str, field: str) -> None:
    within, allowed = FIELDS[field]
    for trial in range(1 if scale == "ci" else 100):
        victim = Victim(tmp_path / f"{trial}", 40)
        damaged = set(rng.sample(victim.keys, 30))
        for key in damaged:
            position, bit = rng.choice(within), 1 << rng.randrange(8)
            victim.edit(key, lambda r, p=position, b=bit: r.__setitem__(p, r[p] ^ b))  # type: ignore[misc]
        victim.check(damaged, allowed)


def test_every_part_of_the_payload_counts_and_nothing_behind_it(
    tmp_path: Path, rng: random.Random
) -> None:
    victim = Victim(tmp_path / "a", 40)
    damaged = set(victim.keys[:20])
    for number, key in enumerate(victim.keys):
        end = ALIGNMENT + victim.rows[key].encoded_bytes
        position = rng.randrange(ALIGNMENT, end) if key in damaged else end + number - 20
        if key == victim.keys[0]:
            position = end - 1
        victim.edit(key, lambda r, p=position: r.__setitem__(p, r[p] ^ 0x10))  # type: ignore[misc]
    victim.check(damaged, {Defect.CHECKSUM})


def test_rows_that_say_another_length(tmp_path: Path) -> None:
    victim = Victim(tmp_path / "a", 12)
    lengths = [0, 1, ALIGNMENT, LAYOUT.page_bytes, LAYOUT.slot_bytes, 2**32, 2**64 - 1]
    damaged = dict(zip(victim.keys, lengths, strict=False))
    index = IndexFile(victim.path / "index", 0)
    index.put([victim.rows[key]._replace(encoded_bytes=size) for key, size in damaged.items()])
    index.close()
    # A row without a length is held against a record without a codec.
    victim.check(set(damaged), {Defect.LENGTH, Defect.VERSION})


def test_whole_records_that_no_encoder_wrote(tmp_path: Path, rng: random.Random) -> None:
    """The checksum is right, so that only the codec can tell; the rows name their lengths."""
    victim = Victim(tmp_path / "a", 30)
    forged = victim.keys[:20]
    for key in forged:
        row = victim.rows[key]
        payload = rng.randbytes(row.encoded_bytes)
        header = RecordHeader(
            key, LAYOUT.layout_id(), len(payload), row.generation, 1, LAYOUT.page_bytes
        )
        written = encode_header(header, payload)

        def forge(record: bytearray, head: bytes = written, body: bytes = payload) -> None:
            record[:HEADER_BYTES] = head
            record[ALIGNMENT : ALIGNMENT + len(body)] = body

        victim.edit(key, forge)
    assert check_store(victim.path).is_clean, "a check verifies checksums and decodes nothing"
    store = victim.open()
    assert served(store, victim.keys, share=1.0) == set(victim.keys[20:])
    assert store.stats().rejected == {Defect.ENCODING.value: 20}
    store.close(SECONDS)


def test_a_slot_file_truncated_while_open(tmp_path: Path) -> None:
    victim = Victim(tmp_path / "a", 40)
    store = victim.open()
    kept = 25
    with (victim.path / "blocks").open("r+b") as file:
        file.truncate(kept * (ALIGNMENT + LAYOUT.slot_bytes) + ALIGNMENT)
    lost = {key for key, row in victim.rows.items() if row.slot >= kept}
    assert served(store, victim.keys, share=1.0) == set(victim.keys) - lost
    assert store.stats().rejected == {Defect.SHORT.value: len(lost)}
    store.close(SECONDS)


@pytest.mark.parametrize("also_lost", [(), ("identity",)])
def test_a_lost_index_is_made_again(tmp_path: Path, also_lost: tuple[str, ...]) -> None:
    """Records say how long they are; also how large a slot is, where nothing else is left."""
    victim = Victim(tmp_path / "a", 30)
    shutil.rmtree(victim.path / "index")
    for name in also_lost:
        (victim.path / name).unlink()
    result = check_store(victim.path, fix=True)
    assert result.orphans == 30
    store = victim.open()
    # Without the identity file nobody knows whose records they are, so none is taken.
    expected = set() if also_lost else set(victim.keys)
    assert served(store, victim.keys, share=1.0) == expected
    store.close(SECONDS)
    assert check_store(victim.path).is_clean


def test_a_lossy_codec_has_a_store_of_its_own(open_ssd: Make) -> None:
    keys = make_keys(20)
    store = open_ssd(Halving(LAYOUT))
    put(store, keys)
    buffers = make_buffers(20, LAYOUT)
    assert None not in store.load(keys, buffers).result(SECONDS)
    for key, buffer in zip(keys, buffers, strict=True):
        assert bytes(buffer)[1::2] == block(key)[1::2]
        assert not any(bytes(buffer)[0::2])
    store.close(SECONDS)
    refusal = "for the codec halving, and this engine has no codec that changes numbers; use"
    for other in (None, "lossless"):
        with pytest.raises(TierConfigError, match=refusal):
            open_ssd(other)
    store = open_ssd(Halving(LAYOUT))
    assert None not in store.load(keys, buffers).result(SECONDS)
    store.close(SECONDS)
    # A codec that no longer reads what it wrote costs misses.
    store = open_ssd(Wild(LAYOUT))
    assert store.load(keys, buffers).result(SECONDS) == [None] * 20
    assert store.stats().rejected == {Defect.ENCODING.value: 20}


def test_a_plain_store_is_not_for_a_lossy_codec(open_ssd: Make) -> None:
    open_ssd().close(SECONDS)
    with pytest.raises(TierConfigError, match=r"no codec that changes .* has the codec halving;"):
        open_ssd(Halving(LAYOUT))


def test_a_codec_of_another_layout_is_refused(open_ssd: Make) -> None:
    with pytest.raises(TierConfigError, match=r"codec lossless was made for .*head_dim=50"):
        open_ssd(LosslessCodec(ODD))
