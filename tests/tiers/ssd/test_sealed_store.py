# SPDX-License-Identifier: Apache-2.0
"""A store with a MAC key: what somebody may do who can write its directory and has not got the key.

The attacker of these tests knows everything but the key: format, layout, block keys, generations,
where each record lies and how its plain checksum is made. It may rewrite every file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stratakv.tiers.base import Answer, Stored
from stratakv.tiers.block import ALIGNMENT
from stratakv.tiers.codecs.lossless import LosslessCodec
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.mac_key import MacKey
from stratakv.tiers.record import HEADER_BYTES, Defect, RecordHeader, decode_header, encode_header
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.folder.identity_note import FullNamespace, read_note, unpack
from stratakv.tiers.ssd.index.index_file import IndexFile, Row
from stratakv.tiers.ssd.store_check import check_store

from .. import store_contract
from ..blocks import ODD, SMALL, make_buffers, make_keys, payload_of
from ..store_contract import SECONDS, fetch, put
from .stores import BIG, Open, capacity_for

KEY, OTHER_KEY = MacKey(bytes(range(32))), MacKey(bytes(32))
SLOTS = 40
RECORD = ALIGNMENT + SMALL.slot_bytes
KEYS = make_keys(30)
FORGED = b"forged! " * (SMALL.page_bytes // 8)


def _open(path: Path, mac_key: MacKey | None = KEY, **options: object) -> SsdStore:
    return SsdStore(path, SMALL, capacity_for(SLOTS), mac_key=mac_key, **options)  # type: ignore[arg-type]


def _make(path: Path, mac_key: MacKey | None = KEY, **options: object) -> Path:
    """A closed store with all keys."""
    store = _open(path, mac_key, **options)
    assert all(put(store, KEYS))
    store.close(SECONDS)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return _make(tmp_path / "ssd")


def _rows(path: Path) -> dict[bytes, Row]:
    index = IndexFile(path / "index", 0)
    rows = {row.key: row for row in index.iter_rows()}
    index.close()
    return rows


def _put_row(path: Path, row: Row) -> None:
    index = IndexFile(path / "index", 0)
    index.put([row])
    index.close()


def _read(path: Path, slot: int) -> bytes:
    with (path / "blocks").open("rb") as file:
        file.seek(slot * RECORD)
        return file.read(RECORD)


def _write(path: Path, slot: int, record: bytes) -> None:
    with (path / "blocks").open("r+b") as file:
        file.seek(slot * RECORD)
        file.write(record)


def _forge(path: Path, key: bytes, sealed_with: MacKey | None = None) -> None:
    """Another block's bytes under a header in which everything is right, made without the key."""
    slot = _rows(path)[key].slot
    header = decode_header(_read(path, slot))
    assert header is not None and header.key == key
    if sealed_with is not None:
        header = replace(header, seal=sealed_with.seal(b""))
    raw = encode_header(header, FORGED)
    _write(path, slot, raw + bytes(ALIGNMENT - HEADER_BYTES) + FORGED)


def _refused(path: Path, damaged: set[bytes], defect: Defect = Defect.CHECKSUM) -> None:
    """The keys are misses, once and for all; all others have their own bytes (see `fetch`)."""
    store = _open(path)
    assert store.lookup(KEYS) == [Answer.HIT] * len(KEYS)
    found = dict(zip(KEYS, fetch(store, KEYS), strict=True))
    assert {key for key, payload in found.items() if payload is None} == damaged
    assert store.stats().rejected == {defect.value: len(damaged)}
    assert store.lookup(sorted(damaged)) == [Answer.MISS] * len(damaged)
    assert all(put(store, sorted(damaged)))
    store.close(SECONDS)
    store = _open(path)
    assert None not in fetch(store, KEYS)
    store.close(SECONDS)


@pytest.mark.parametrize("layout", [ODD, BIG], ids=["odd", "64KiB"])
def test_contract(open_store: Open, layout: object) -> None:
    store_contract.check_store(open_store(layout=layout, mac_key=KEY))


def test_blocks_survive_a_restart_under_their_key(path: Path) -> None:
    store = _open(path)
    assert None not in fetch(store, KEYS)
    assert store.stats().rejected == {}
    store.close(SECONDS)
    for row in _rows(path).values():
        record = _read(path, row.slot)
        header = decode_header(record)
        assert header is not None
        sealed = replace(header, seal=KEY.seal(b""))
        assert record[:HEADER_BYTES] == encode_header(sealed, record[ALIGNMENT:])
        assert record[112:HEADER_BYTES] != encode_header(header, record[ALIGNMENT:])[112:]


def test_a_forged_block_is_refused(path: Path, tmp_path: Path) -> None:
    _forge(path, KEYS[3])
    _forge(path, KEYS[4], OTHER_KEY)
    _refused(path, {KEYS[3], KEYS[4]})
    # The forgery has power: a store without a key serves it.
    _make(tmp_path / "plain", None)
    _forge(tmp_path / "plain", KEYS[3])
    store = _open(tmp_path / "plain", None)
    into = make_buffers(1, SMALL)
    assert None not in store.load([KEYS[3]], into).result(SECONDS)
    assert bytes(into[0][: SMALL.page_bytes]) == FORGED
    store.close(SECONDS)


def test_a_record_of_another_store_with_the_same_key_is_refused(path: Path, tmp_path: Path) -> None:
    """A record of another model whose blocks have the same keys; the row is made to fit."""
    other = _make(tmp_path / "other", namespace=b"another model")
    theirs, ours = _rows(other)[KEYS[5]], _rows(path)[KEYS[5]]
    _write(path, ours.slot, _read(other, theirs.slot))
    _put_row(path, ours._replace(generation=theirs.generation))
    _refused(path, {KEYS[5]})


def test_a_row_cannot_give_a_record_another_name(path: Path) -> None:
    """Who writes the index can take blocks away, and no more."""
    rows = _rows(path)
    one, two = rows[KEYS[6]], rows[KEYS[7]]
    _put_row(path, two._replace(key=KEYS[6], slot=one.slot, generation=one.generation + 1))
    _refused(path, {KEYS[6]}, Defect.GENERATION)


def test_an_older_record_of_the_same_key_is_the_same_block(path: Path) -> None:
    """The store accepts an older record: the key of a block determines its bytes."""
    old_row = _rows(path)[KEYS[8]]
    old = _read(path, old_row.slot)
    store = _open(path)
    store.drop([KEYS[8]])
    assert put(store, [KEYS[8]]) == [True]
    store.close(SECONDS)
    row = _rows(path)[KEYS[8]]
    assert row.generation > old_row.generation
    _write(path, row.slot, old)
    _put_row(path, row._replace(generation=old_row.generation))
    store = _open(path)
    into = make_buffers(1, SMALL)
    assert None not in store.load([KEYS[8]], into).result(SECONDS)
    assert bytes(into[0][: SMALL.page_bytes]) == payload_of(KEYS[8], SMALL)
    store.close(SECONDS)


def test_encoded_blocks_are_sealed_too(tmp_path: Path) -> None:
    """The seal covers what was encoded, and is looked at before it is decoded."""

    def open_it() -> SsdStore:
        return SsdStore(
            tmp_path, BIG, capacity_for(SLOTS, BIG), mac_key=KEY, codec=LosslessCodec(BIG)
        )

    block = bytes([1, 2, 0x80, 0x3F]) * (BIG.page_bytes // 4)
    store = open_it()
    buffers = make_buffers(2, BIG)
    for buffer in buffers:
        buffer[: BIG.page_bytes] = block
    assert store.store(KEYS[:2], buffers).result(SECONDS) == [Stored.KEPT] * 2
    store.close(SECONDS)
    row = _rows(tmp_path)[KEYS[0]]
    assert row.encoded_bytes
    with (tmp_path / "blocks").open("r+b") as file:
        file.seek(row.slot * (ALIGNMENT + BIG.slot_bytes))
        record = file.read(ALIGNMENT + row.encoded_bytes)
        header = decode_header(record)
        assert header is not None and header.codec
        file.seek(row.slot * (ALIGNMENT + BIG.slot_bytes))
        file.write(encode_header(header, record[ALIGNMENT:]))  # whole, but not sealed
    store = open_it()
    into = make_buffers(2, BIG)
    found = store.load(KEYS[:2], into).result(SECONDS)
    assert found[0] is None and found[1] is not None
    assert bytes(into[1][: BIG.page_bytes]) == block
    assert store.stats().rejected == {Defect.CHECKSUM.value: 1}
    store.close(SECONDS)
    assert check_store(tmp_path, mac_key=KEY).rows == 1


OURS, THEIRS = f"the MAC key {KEY.id.hex()}", f"the MAC key {OTHER_KEY.id.hex()}"


@pytest.mark.parametrize(
    ("made", "opened", "message"),
    [
        (KEY, OTHER_KEY, f"made for {OURS}, and this engine has {THEIRS}; give the key file it"),
        (KEY, None, f"made for {OURS}, and this engine has no MAC key; give the key file it"),
        (None, KEY, f"made for no MAC key, and this engine has {OURS}; .*delete that directory"),
    ],
)
def test_another_seal_is_refused(
    tmp_path: Path, made: MacKey | None, opened: MacKey | None, message: str
) -> None:
    path = _make(tmp_path / "ssd", made)
    with pytest.raises(TierConfigError, match=message):
        _open(path, opened)
    (path / "identity").unlink()  # the index says it as well
    with pytest.raises(TierConfigError, match=message):
        _open(path, opened)
    store = _open(path, made)  # and nothing was changed
    assert None not in fetch(store, KEYS)
    store.close(SECONDS)
    (path / "index" / "data.mdb").unlink()  # records alone are not taken over
    store = _open(path, opened)
    assert store.stats().blocks == 0
    store.close(SECONDS)
    assert check_store(path, mac_key=opened).is_clean


def test_identity_and_index_of_a_store_without_a_key_do_not_help(
    path: Path, tmp_path: Path
) -> None:
    """Nobody can talk an engine that has a key into plain checksums."""
    plain = _make(tmp_path / "plain", None)
    shutil.rmtree(path)
    shutil.copytree(plain, path)
    with pytest.raises(TierConfigError, match="made for no MAC key"):
        _open(path)
    # The index alone, beside an identity file that is right, is one that somebody damaged.
    _make(tmp_path / "right")
    shutil.copy(tmp_path / "right" / "identity", path / "identity")
    store = _open(path)
    assert store.stats().blocks == 0 and store.stats().errors == {"index_set_aside": 1}
    store.close(SECONDS)


def test_the_identity_names_the_key(path: Path) -> None:
    note = read_note(path)
    assert note is not None
    assert unpack(note.namespace) == FullNamespace(b"", "", KEY.id)
    for made_for in (
        FullNamespace(b"model"),
        FullNamespace(b"model", "fp8"),
        FullNamespace(b"", "fp8", b"\0\xff"),
        FullNamespace(b"\0\xff", "", KEY.id),
    ):
        assert unpack(made_for.pack()) == made_for


def _damage(path: Path, key: bytes) -> None:
    """One bit of a payload."""
    slot = _rows(path)[key].slot
    record = bytearray(_read(path, slot))
    record[ALIGNMENT + 100] ^= 1
    _write(path, slot, bytes(record))


@pytest.mark.parametrize("harm", [_damage, _forge])
def test_check_with_the_key_finds_what_is_wrong(
    path: Path, harm: Callable[[Path, bytes], None]
) -> None:
    result = check_store(path, mac_key=KEY)
    assert result.is_clean and result.payloads_verified and result.notes == []
    assert result.whole == result.rows == len(KEYS)
    harm(path, KEYS[9])
    result = check_store(path, mac_key=KEY, fix=True)
    assert result.counts == {"checksum": 1} and result.removed_rows == 1
    assert check_store(path, mac_key=KEY).is_clean


def test_check_without_the_key_says_so_and_checks_the_rest(path: Path) -> None:
    _damage(path, KEYS[9])
    result = check_store(path)
    assert result.is_clean and not result.payloads_verified and result.whole == len(KEYS)
    (note,) = result.notes
    assert note.startswith(f"payloads were not verified: the records are sealed with {OURS}; give")
    slot = _rows(path)[KEYS[10]].slot
    _write(path, slot, bytes(ALIGNMENT))
    assert check_store(path).counts == {"magic": 1}
    result = check_store(path, fix=True)
    assert result.removed_rows == 1
    assert check_store(path, mac_key=KEY).counts == {"checksum": 1}


@pytest.mark.parametrize(
    ("made", "given", "cure"), [(KEY, OTHER_KEY, "the file of that key"), (None, KEY, "none")]
)
def test_check_refuses_another_key(
    tmp_path: Path, made: MacKey | None, given: MacKey, cure: str
) -> None:
    path = _make(tmp_path / "ssd", made)
    told = OURS if made else "no MAC key"
    message = f"has records with {told} and the one given is {given.id.hex()}; give {cure}"
    with pytest.raises(TierConfigError, match=message):
        check_store(path, mac_key=given, fix=True)
    assert check_store(path, mac_key=made).is_clean


def test_a_lost_index_is_made_again_from_records_that_are_verified(path: Path) -> None:
    """A forgery in a free slot, of a later generation, does not take a block's place either."""
    header = RecordHeader(KEYS[0], SMALL.layout_id(), len(FORGED), 2**60)
    _write(
        path, SLOTS - 1, encode_header(header, FORGED) + bytes(ALIGNMENT - HEADER_BYTES) + FORGED
    )
    shutil.rmtree(path / "index")
    result = check_store(path, fix=True)
    assert result.rebuilt_rows == 0 and not (path / "index").exists()
    assert "cannot be verified without the key" in result.notes[-1]
    assert check_store(path, mac_key=KEY, fix=True).rebuilt_rows == len(KEYS)
    store = _open(path)
    assert None not in fetch(store, KEYS)
    store.close(SECONDS)


def test_without_index_and_identity_nobody_knows_whose_records_these_are(path: Path) -> None:
    shutil.rmtree(path / "index")
    (path / "identity").unlink()
    for key in (KEY, None):
        result = check_store(path, mac_key=key, fix=True)
        assert result.rows == result.orphans == result.rebuilt_rows == 0
    store = _open(path)
    assert store.stats().blocks == 0 and store.stats().errors == {}
    store.close(SECONDS)
