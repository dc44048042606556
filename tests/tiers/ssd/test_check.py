# SPDX-License-Identifier: Apache-2.0
"""`check_store`: finds what is wrong with a store on the disk, and mends it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.block import ALIGNMENT
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.record import HEADER_BYTES, RecordHeader, encode_header
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.folder.reconcile import RecordFile
from stratakv.tiers.ssd.index import index_file
from stratakv.tiers.ssd.index.index_file import IndexFile, Row
from stratakv.tiers.ssd.store_check import check_store

from ..blocks import ODD, SMALL, make_keys, payload_of
from ..store_contract import SECONDS, fetch, put
from .stores import capacity_for

SLOTS = 40
RECORD = ALIGNMENT + SMALL.slot_bytes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store of forty slots with thirty blocks."""
    store = SsdStore(tmp_path / "ssd", SMALL, capacity_for(SLOTS))
    assert all(put(store, make_keys(30)))
    store.close(SECONDS)
    return tmp_path / "ssd"


def rows_of(path: Path) -> dict[bytes, Row]:
    index = IndexFile(path / "index", 0)
    rows = {row.key: row for row in index.iter_rows()}
    index.close()
    return rows


def put_rows(path: Path, rows: Sequence[Row]) -> None:
    index = IndexFile(path / "index", 0)
    index.put(rows)
    index.close()


def write_record(path: Path, slot: int, key: bytes, generation: int) -> None:
    payload = payload_of(key, SMALL)
    header = encode_header(RecordHeader(key, SMALL.layout_id(), len(payload), generation), payload)
    with (path / "blocks").open("r+b") as file:
        file.seek(slot * RECORD)
        file.write(header + bytes(ALIGNMENT - HEADER_BYTES) + payload)


def served(path: Path, keys: list[bytes]) -> list[bytes]:
    """The keys that a store there serves, each with its own bytes."""
    store = SsdStore(path, SMALL, capacity_for(SLOTS))
    found = fetch(store, keys)
    assert store.stats().errors == store.stats().rejected == {}
    store.close(SECONDS)
    return [key for key, payload in zip(keys, found, strict=True) if payload is not None]


def everything(path: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in path.rglob("*") if each.name != "lock"
            and each.is_file()}  # fmt: skip


def test_a_sound_store_is_clean_and_left_as_it_is(path: Path) -> None:
    before = everything(path)
    result = check_store(path)
    assert result.is_clean and result.problems == result.notes == []
    assert (result.slots, result.rows, result.whole, result.orphans) == (SLOTS, 30, 30, 0)
    assert result.bytes_read == SLOTS * RECORD
    assert everything(path) == before


def test_a_store_that_was_full_is_clean_and_has_orphans(tmp_path: Path) -> None:
    store = SsdStore(tmp_path, ODD, capacity_for(SLOTS, ODD))
    for batch in range(8):
        put(store, make_keys(20, str(batch)))
    held = store.stats().blocks
    store.close(SECONDS)
    result = check_store(tmp_path)
    assert result.is_clean
    assert result.whole == result.rows == held
    assert result.orphans == SLOTS - held > 0


def test_a_new_store_is_clean(tmp_path: Path) -> None:
    SsdStore(tmp_path, SMALL, capacity_for(3)).close(SECONDS)
    assert check_store(tmp_path, fix=True).is_clean


def test_a_store_in_use_or_none_at_all_is_refused(path: Path, tmp_path: Path) -> None:
    store = SsdStore(path, SMALL, capacity_for(SLOTS))
    with pytest.raises(TierConfigError, match=f"in use by process {os.getpid()}"):
        check_store(path)
    store.close(SECONDS)
    for nothing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(TierConfigError, match="holds no SSD tier"):
            check_store(nothing)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    ("offset", "kind"),
    [(0, "magic"), (8, "version"), (16, "length"), (24, "generation"), (40, "layout"), (50, "key"),
     (90, "checksum"), (120, "checksum"), (ALIGNMENT + 7, "checksum")],
)  # fmt: skip
def test_damaged_records_lose_their_rows_only(path: Path, offset: int, kind: str) -> None:
    keys = make_keys(30)
    slots = [rows_of(path)[key].slot for key in keys[5:8]]
    with (path / "blocks").open("r+b") as file:
        for slot in slots:
            file.seek(slot * RECORD + offset)
            byte = file.read(1)[0]
            file.seek(slot * RECORD + offset)
            file.write(bytes([byte ^ 0x10]))
    before = everything(path)
    result = check_store(path, max_problems=2)
    assert result.counts == {kind: 3} and len(result.problems) == 2
    assert {problem.slot for problem in result.problems} <= set(slots)
    assert everything(path) == before
    assert check_store(path, fix=True).removed_rows == 3
    assert (path / "blocks").read_bytes() == before[str(path / "blocks")]
    assert check_store(path).is_clean
    assert served(path, keys) == keys[:5] + keys[8:]


def test_rows_beyond_the_end_of_the_slot_file(path: Path) -> None:
    """Two whole records are left; half of the third one is a problem of the file itself."""
    os.truncate(path / "blocks", 2 * RECORD + 5000)
    result = check_store(path, fix=True)
    assert result.counts == {"range": 28, "size": 1}
    assert result.removed_rows == 28
    assert len(served(path, make_keys(30))) == 2
    assert check_store(path).is_clean


def test_a_missing_slot_file(path: Path) -> None:
    (path / "blocks").unlink()
    result = check_store(path, fix=True)
    assert result.counts == {"range": 30, "size": 1}
    assert served(path, make_keys(30)) == []


def test_of_two_rows_for_a_key_the_older_one_goes(path: Path) -> None:
    key = make_keys(1)[0]
    row = rows_of(path)[key]
    write_record(path, 35, key, row.generation + 1)
    put_rows(path, [Row(35, key, row.generation + 1, row.last_use)])
    result = check_store(path, fix=True)
    assert result.counts == {"twice": 1} and result.removed_rows == 1
    assert check_store(path).is_clean
    assert rows_of(path)[key].slot == 35
    assert served(path, make_keys(30)) == make_keys(30)


def test_rows_that_the_disk_does_not_give(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = rows_of(path)[make_keys(4)[3]].slot
    real = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        for bad in (slot, 38):  # one with a row and one without
            if offset <= bad * RECORD < offset + len(buffers[0]):
                raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    result = check_store(path)
    assert result.counts == {"unreadable": 1} and result.problems[0].slot == slot
    assert result.notes == ["1 slots without a row cannot be read"]
    assert result.whole == 29


@pytest.mark.parametrize("damage", ["lost", "emptied", "zeroed", "unnamed"])
def test_a_lost_index_is_made_from_the_records(path: Path, damage: str) -> None:
    data, keys = path / "index" / "data.mdb", make_keys(30)
    old = rows_of(path)[keys[0]]
    write_record(path, 33, keys[0], old.generation - 1)  # older, and so not the one that counts
    write_record(path, 34, keys[1], rows_of(path)[keys[1]].generation + 1)
    if damage == "lost":
        shutil.rmtree(path / "index")
    elif damage == "emptied":
        data.unlink()
    elif damage == "zeroed":
        with data.open("r+b") as file:
            file.write(bytes(8192))
    else:
        shutil.rmtree(path / "index")
        IndexFile(path / "index", 2**20).close()
    result = check_store(path)
    assert result.counts == {"index": 1} and result.orphans == 32
    result = check_store(path, fix=True)
    assert result.rebuilt_rows == 30
    result = check_store(path)
    assert result.is_clean and result.orphans == 2
    rows = rows_of(path)
    assert rows[keys[0]] == old._replace(last_use=rows[keys[0]].last_use)
    assert rows[keys[1]].slot == 34
    assert served(path, keys) == keys


def test_no_index_is_made_of_records_that_may_be_of_another_model(path: Path) -> None:
    shutil.rmtree(path / "index")
    (path / "identity").write_bytes(b"damaged")
    result = check_store(path, fix=True)
    assert result.counts == {"index": 1} and result.rebuilt_rows == 0
    assert "nothing says whose records these are" in result.notes[-1]
    assert served(path, make_keys(30)) == []
    # The start took them out of the way, so that a later check cannot take them in either.
    shutil.rmtree(path / "index")
    assert check_store(path).orphans == 0


def test_records_of_another_layout_are_not_taken_in(path: Path) -> None:
    payload = bytes(SMALL.page_bytes)
    other = RecordHeader(make_keys(1, "x")[0], b"another layout..", len(payload), 2**40)
    with (path / "blocks").open("r+b") as file:
        file.seek(35 * RECORD)
        header = encode_header(other, payload)
        file.write(header + bytes(ALIGNMENT - HEADER_BYTES) + payload)
    shutil.rmtree(path / "index")
    assert check_store(path, fix=True).rebuilt_rows == 30


def test_an_identity_file_that_is_lost_is_no_problem(path: Path) -> None:
    (path / "identity").unlink()
    result = check_store(path, fix=True)
    assert result.is_clean and result.whole == 30
    assert result.notes == ["the identity file is missing or damaged; the next start writes it"]
    assert served(path, make_keys(30)) == make_keys(30)
    assert check_store(path).notes == []


def test_what_a_crash_of_a_rebuild_leaves(path: Path) -> None:
    """Before the old index is removed, and after."""
    shutil.copytree(path / "index", path / "index.new")
    assert "about to be replaced" in check_store(path).notes[0]
    shutil.rmtree(path / "index")
    result = check_store(path)
    assert result.is_clean and result.whole == 30
    assert check_store(path, fix=True).is_clean
    assert sorted(each.name for each in path.iterdir()) == ["blocks", "identity", "index", "lock"]
    assert served(path, make_keys(30)) == make_keys(30)


def test_an_index_of_another_store_is_named(path: Path, tmp_path: Path) -> None:
    other = SsdStore(tmp_path / "other", SMALL, capacity_for(SLOTS), namespace=b"x")
    other.close(SECONDS)
    shutil.rmtree(path / "index")
    shutil.copytree(tmp_path / "other" / "index", path / "index")
    assert check_store(path).counts == {"identity": 1}


def test_another_format_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the identity file says it, or only the index is left to say it."""
    ours = index_file.FORMAT_VERSION
    monkeypatch.setattr("stratakv.tiers.ssd.store_check.FORMAT_VERSION", ours + 1)
    for _ in range(2):
        refusal = f"has format {ours} and this version checks format {ours + 1}; use"
        with pytest.raises(TierConfigError, match=refusal):
            check_store(path)
        (path / "identity").unlink(missing_ok=True)


def test_more_on_the_disk_than_planned(path: Path) -> None:
    (path / "index.bad-1").mkdir()
    (path / "index.bad-1" / "data.mdb").write_bytes(bytes(2**20))
    result = check_store(path)
    assert result.counts == {"size": 1}
    assert result.notes == [f"{path}/index.bad-1 is an index that was damaged"]


def test_reads_are_in_flight_and_in_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratakv.tiers.ssd.folder.reconcile._CHUNK_BYTES", 3 * RECORD)
    file = RecordFile(path / "blocks")
    found = list(file.records(SMALL.page_bytes))
    file.close()
    assert [each.slot for each in found] == list(range(SLOTS))
    assert sum(each.header is not None for each in found) == 30


def test_a_check_after_a_start_finds_the_same_store(path: Path) -> None:
    keys = make_keys(30)
    assert served(path, keys) == keys
    store = SsdStore(path, SMALL, capacity_for(SLOTS))
    assert store.lookup(keys) == [Answer.HIT] * 30
    store.close(SECONDS)
    assert check_store(path).whole == 30
