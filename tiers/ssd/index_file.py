# SPDX-License-Identifier: Apache-2.0
"""The index on disk: an LMDB environment that says which slot holds which block.

It is the durable copy of the index in memory, read once at the start and written in batches. A
row's key is the slot, not the block: the number of rows is then bounded by the number of slots,
two rows cannot claim one slot, and a batch of neighbouring slots changes one page of the tree
instead of one page for each block.

    store    name → value       what the store was made for, see `Identity`
    slots    slot u32 big-endian → block key (40) | generation u64 | last use u64

Knows nothing of payloads. Used by one thread at a time; `guard.py` must have looked at the files
before, because LMDB on a damaged file can end the process.
"""

from __future__ import annotations

import os
import secrets
import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb

DATA_FILE = "data.mdb"
FORMAT_VERSION = 1

_SLOT = struct.Struct(">I")
_VALUE = struct.Struct("<40sQQ")
_ZEROS = bytes(1024**2)
_NUMBER = struct.Struct("<Q")


class Row(NamedTuple):
    """One block on the disk. `last_use` only orders rows; it is no time."""

    slot: int
    key: bytes
    generation: int
    last_use: int


class Identity(NamedTuple):
    """What the store was made for. Another layout, namespace or format has another store."""

    format_version: int
    layout_id: bytes
    namespace: bytes
    layout_text: str  # for people, in messages


class IndexFile:
    """Rows and identity in `folder`. Every call that changes something is one durable commit.

    Every call may raise lmdb.Error.
    """

    def __init__(self, folder: Path, map_bytes: int) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._data = folder / DATA_FILE
        self._env = lmdb.open(
            str(folder),
            # Never smaller than the file, which a shrinking store has to read before it shrinks.
            map_size=max(map_bytes, _size(self._data)),
            max_dbs=2,
            mode=0o600,
            lock=False,  # one process holds the store's own lock, and nothing reads beside a write
            writemap=False,  # a wild pointer must not reach the file
            readahead=False,
        )
        try:
            self._store = self._env.open_db(b"store")
            self._slots = self._env.open_db(b"slots")
        except BaseException:
            self._env.close()
            raise

    def reserve(self, map_bytes: int) -> None:
        """Write the file's whole room once, so that a full disk cannot break a commit later, and
        so that a commit does not wait for the file system's journal. May raise OSError."""
        descriptor = os.open(self._data, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            start = os.fstat(descriptor).st_size
            for offset in range(start, map_bytes, len(_ZEROS)):
                os.pwrite(descriptor, _ZEROS[: map_bytes - offset], offset)
            if start < map_bytes:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def file_bytes(self) -> int:
        return _size(self._data)

    def identity(self) -> Identity | None:
        """None where the index is new."""
        with self._env.begin() as txn:
            version = txn.get(b"format", db=self._store)
            if version is None:
                return None
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

    def next_epoch(self) -> int:
        """A number below 2**32 that no earlier call on this index returned. A new index begins
        anywhere, so that it does not repeat the numbers of one that was lost."""
        with self._env.begin(write=True, db=self._store) as txn:
            before = txn.get(b"epoch")
            last = secrets.randbits(31) if before is None else int(_NUMBER.unpack(before)[0])
            epoch = last + 1
            txn.put(b"epoch", _NUMBER.pack(epoch))
        return epoch

    def rows(self) -> Iterator[Row]:
        """All rows in the order of their slots. Rows of a wrong length are left out."""
        with self._env.begin(db=self._slots) as txn, txn.cursor() as cursor:
            for slot, value in cursor:
                if len(slot) == _SLOT.size and len(value) == _VALUE.size:
                    yield Row(_SLOT.unpack(slot)[0], *_VALUE.unpack(value))

    def put(self, rows: Iterable[Row], deleted: Sequence[int] = ()) -> None:
        """Write rows over what their slots had, and remove the rows of other slots."""
        items = [
            (_SLOT.pack(row.slot), _VALUE.pack(row.key, row.generation, row.last_use))
            for row in sorted(rows)
        ]
        with self._env.begin(write=True, db=self._slots) as txn, txn.cursor() as cursor:
            cursor.putmulti(items)
            for slot in sorted(deleted):
                txn.delete(_SLOT.pack(slot))

    def delete(self, slots: Sequence[int]) -> None:
        """Remove the rows of these slots; missing ones are ignored."""
        with self._env.begin(write=True, db=self._slots) as txn:
            for slot in sorted(slots):
                txn.delete(_SLOT.pack(slot))

    def close(self) -> None:
        self._env.close()


def rebuild(folder: Path, map_bytes: int, identity: Identity, rows: Iterable[Row]) -> None:
    """Replace the index in `folder` by a new one of `map_bytes` that holds `rows`.

    LMDB files never shrink, so a smaller store needs a new one. A crash in between leaves either
    index, or none, and then the store starts empty.
    """
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    index = IndexFile(fresh, map_bytes)
    try:
        index.reserve(map_bytes)
        index.write_identity(identity)
        index.put(rows)
    finally:
        index.close()
    shutil.rmtree(folder)
    fresh.rename(folder)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
