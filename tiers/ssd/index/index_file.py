# SPDX-License-Identifier: Apache-2.0
"""IndexFile: the index on disk, an LMDB environment with the block in each slot.

The file is the durable copy of the index in memory. The file is read once, at the start, and
written in batches. A row's key is the slot number, not the block's key. So the number of slots
bounds the number of rows, two rows cannot claim one slot, and a batch of neighbouring slots changes
one page of the tree instead of one page for each block.

    store    name → value       the identity of the store, see `Identity`
    slots    slot u32 big-endian → block key (40) | generation u64 | last use u64
                                   | encoded bytes u64, 0 for a block without a codec

Only one thread at a time may use the index. `folder/guard.py` must check the file before it is
opened, because LMDB can kill the process on a damaged file."""

from __future__ import annotations

import os
import secrets
import shutil
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from ...block import KEY_BYTES

DATA_FILE = "data.mdb"
FORMAT_VERSION = 3  # format 2 had records without tags
SLOT_BYTES = 4
VALUE_BYTES = 64

_SLOT = struct.Struct(">I")
_VALUE = struct.Struct(f"<{KEY_BYTES}sQQQ")
_KEY_OF_VALUE = struct.Struct(f"{KEY_BYTES}s{VALUE_BYTES - KEY_BYTES}x")
_ZEROS = bytes(1024**2)
_NUMBER = struct.Struct("<Q")
EPOCH_SHIFT = 32  # of a generation: epoch in the upper half, count of writes in the lower
_LARGEST_EPOCH = 2**32 - 2  # the upper half of a generation must hold the next epoch
_ROWS_PER_COMMIT = 65536  # rows per commit of a rebuilt index


class IndexDamaged(Exception):
    """The index is damaged; the message describes the damage."""


class Row(NamedTuple):
    """The row of a block on the disk. `last_use` is a counter that orders rows, not a time.
    `encoded_bytes` is the length of the encoded block, 0 without a codec."""

    slot: int
    key: bytes
    generation: int
    last_use: int
    encoded_bytes: int = 0


class Columns(NamedTuple):
    """Many rows as columns: one sequence for each field."""

    slots: array[int]
    keys: list[bytes]
    generations: array[int]
    last_uses: array[int]
    encoded_bytes: array[int]


class RowBatch(NamedTuple):
    """Many rows in the order of their slots, in the byte format of the disk."""

    slots: bytes
    values: bytes

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> RowBatch:
        """Make a batch of `rows`, which must be in the order of their slots."""
        packed = [(_SLOT.pack(row.slot), _VALUE.pack(*row[1:])) for row in rows]
        return cls(b"".join(slot for slot, _ in packed), b"".join(value for _, value in packed))

    def unpack_rows(self) -> Iterator[Row]:
        for (slot,), value in zip(
            _SLOT.iter_unpack(self.slots), _VALUE.iter_unpack(self.values), strict=True
        ):
            yield Row(slot, *value)

    def columns(self, num_slots: int) -> Columns:
        """Return rows of slots below `num_slots` as columns; a million `Row` objects are slow."""
        slots, words = array("I", self.slots), array("Q", self.values)
        (slots if sys.byteorder == "little" else words).byteswap()
        count = bisect_left(slots, num_slots)
        stop = count * _VALUE.size
        keys = [key for (key,) in _KEY_OF_VALUE.iter_unpack(memoryview(self.values)[:stop])]
        in_row = _VALUE.size // words.itemsize
        before = KEY_BYTES // words.itemsize
        words = words[: count * in_row]
        fields = (words[before + field :: in_row] for field in range(in_row - before))
        return Columns(slots[:count], keys, *fields)


class Identity(NamedTuple):
    """Format, layout and namespace of a store. A store can be used only if all three match."""

    format_version: int
    layout_id: bytes
    namespace: bytes
    layout_text: str  # the layout as text, for messages

    def is_same(self, other: Identity) -> bool:
        return self[:3] == other[:3]


class IndexFile:
    """The index on disk in `folder`: rows and identity. Changes are durable when a call returns.
    Every call may raise lmdb.Error."""

    def __init__(self, folder: Path, map_bytes: int) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._data = folder / DATA_FILE
        self._map_bytes = map_bytes
        self._is_refused = False
        self._open_env()

    def reserve(self, map_bytes: int) -> None:
        """Extend the file with zeros to `map_bytes`. Later commits then neither fail on a full disk
        nor wait for the file system's journal. May raise OSError."""
        descriptor = os.open(self._data, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            start = os.fstat(descriptor).st_size
            for offset in range(start, map_bytes, len(_ZEROS)):
                os.pwrite(descriptor, _ZEROS[: map_bytes - offset], offset)
            if start < map_bytes:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def identity(self) -> Identity | None:
        """Read the identity. Return None for a new index. Raises IndexDamaged."""
        with self._env.begin() as txn:
            version = txn.get(b"format", db=self._store)
            if version is None:
                return None
            if len(version) != _NUMBER.size:
                raise IndexDamaged(f"the number of its format has {len(version)} bytes")
            return Identity(
                _NUMBER.unpack(version)[0],
                txn.get(b"layout_id", b"", db=self._store),
                txn.get(b"namespace", b"", db=self._store),
                txn.get(b"layout", b"", db=self._store).decode(errors="replace"),
            )

    def write_identity(self, identity: Identity) -> None:
        with self._env.begin(write=True, db=self._store) as txn:
            txn.put(b"format", _NUMBER.pack(identity.format_version))
            txn.put(b"layout_id", identity.layout_id)
            txn.put(b"namespace", identity.namespace)
            txn.put(b"layout", identity.layout_text.encode())

    def next_epoch(self, last: int | None) -> int:
        """Return an epoch, a number below 2**32 that no earlier opening of the store had, and store
        it. `last` is the last epoch from the identity file; if None, the last epoch is that of the
        index. If both are missing, the epoch is random, so that it very probably differs from all
        epochs of a lost index."""
        with self._env.begin(write=True, db=self._store) as txn:
            stored = txn.get(b"epoch", b"")
            if last is None and len(stored) == _NUMBER.size:
                last = int(_NUMBER.unpack(stored)[0])
            if last is None or last > _LARGEST_EPOCH:
                last = secrets.randbits(31)
            txn.put(b"epoch", _NUMBER.pack(last + 1))
        return last + 1

    def iter_rows(self) -> Iterator[Row]:
        """Yield all rows in the order of their slots. Rows of a wrong length are left out."""
        with self._env.begin(db=self._slots) as txn, txn.cursor() as cursor:
            for slot, value in cursor:
                if len(slot) == _SLOT.size and len(value) == _VALUE.size:
                    yield Row(_SLOT.unpack(slot)[0], *_VALUE.unpack(value))

    def put(self, rows: Iterable[Row], deleted: Sequence[int] = ()) -> None:
        """Write rows, replacing the old rows of their slots. Remove the rows of `deleted` slots."""
        slot_of, value_of = _SLOT.pack, _VALUE.pack
        items = [
            (slot_of(slot), value_of(key, generation, last_use, encoded_bytes))
            for slot, key, generation, last_use, encoded_bytes in sorted(rows)
        ]
        with self._change_rows() as txn, txn.cursor() as cursor:
            cursor.putmulti(items)
            _delete(txn, deleted)

    def delete(self, slots: Sequence[int]) -> None:
        """Remove the rows of `slots`; missing rows are ignored."""
        with self._change_rows() as txn:
            _delete(txn, slots)

    def delete_from(self, slot: int) -> None:
        """Remove the rows of `slot` and of all later slots, the last slot first. Very many rows
        take several commits, because LMDB bounds the pages that one commit may change."""
        first, left = _SLOT.pack(slot), True
        while left:
            with self._change_rows() as txn, txn.cursor() as cursor:
                for _ in range(_ROWS_PER_COMMIT):
                    left = bool(cursor.last()) and cursor.key() >= first
                    if not left:
                        break
                    cursor.delete()

    def close(self) -> None:
        self._env.close()

    def _open_env(self) -> None:
        self._env = lmdb.open(
            str(self._folder),
            # Never smaller than the file, all of which a shrinking store reads first.
            map_size=max(self._map_bytes, _size(self._data)),
            max_dbs=2,
            mode=0o600,
            lock=False,  # the store's lock admits one process; reads and writes do not overlap
            writemap=False,  # so that a wild pointer cannot change the file
            readahead=False,
        )
        try:
            self._store = self._env.open_db(b"store")
            self._slots = self._env.open_db(b"slots")
        except BaseException:
            self._env.close()
            raise

    def _change_rows(self) -> Any:
        """Begin a write transaction on the rows. After some disk errors LMDB refuses all
        transactions until the file is reopened. The next call reopens the file, so that the index
        works again as soon as the disk works."""
        if self._is_refused:
            self._env.close()
            self._open_env()
            self._is_refused = False
        try:
            return self._env.begin(write=True, db=self._slots)
        except lmdb.PanicError:
            self._is_refused = True
            raise


def _delete(txn: Any, slots: Iterable[int]) -> None:
    """Delete rows in the order of their slots, so that each page of the tree is changed once."""
    delete = txn.delete
    for name in map(_SLOT.pack, sorted(slots)):
        delete(name)


def rebuild(folder: Path, map_bytes: int, identity: Identity, rows: Iterable[Row]) -> None:
    """Replace the index in `folder` by a new one of `map_bytes` that holds `rows`. LMDB files never
    shrink, so a smaller store needs a new file. A crash leaves either the old or the new index. The
    old index is removed only after the new index has all rows and its identity."""
    fresh = fresh_folder(folder)
    shutil.rmtree(fresh, ignore_errors=True)
    index = IndexFile(fresh, map_bytes)
    try:
        index.reserve(map_bytes)
        waiting = iter(rows)
        while some := list(islice(waiting, _ROWS_PER_COMMIT)):
            index.put(some)
        index.write_identity(identity)
    finally:
        index.close()
    sync_folder(fresh)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    sync_folder(folder.parent)


def finish_rebuild(folder: Path) -> None:
    """Finish `rebuild` after a crash: use the new index if the old is gone, else remove the new."""
    fresh = fresh_folder(folder)
    if not fresh.exists():
        return
    if (folder / DATA_FILE).exists():
        shutil.rmtree(fresh)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk (fsync). May raise OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fresh_folder(folder: Path) -> Path:
    """Return the folder in which `rebuild` makes the new index for `folder`."""
    return folder.with_name(folder.name + ".new")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
