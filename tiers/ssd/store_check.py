# SPDX-License-Identifier: Apache-2.0
"""Checks an SSD store that is not open: compares index rows with records, and repairs the store.

Every row must name a slot with an undamaged record that matches the row. An undamaged record that
no row names is an *orphan*, which is normal: an evicted block's record stays until its slot is used
again. With `fix`, wrong rows are removed, and a lost index is rebuilt from the record headers,
which have key, layout and generation. Of two records with one key, the record with the higher
generation is used, because it was written later. A rebuilt index may have evicted blocks again. A
rebuilt index has no cleared blocks, because the identity file has the generation of the last clear,
and no dropped blocks whose records `wait_forgotten` has erased. Without the identity file no index
is rebuilt, because only this file proves that the records belong to the store. No payload is ever
changed. Sealed records can be verified only with their key. Without the key, only headers are
checked and no index is rebuilt.

The check takes memory for each row, as the store does, and a fixed amount for payloads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import lmdb

from ..errors import TierConfigError
from ..mac_key import MacKey
from ..record import Seal
from .disk.space import HEADER_PAGE_BYTES, SpacePlan, plan_slots
from .folder import guard, other_formats
from .folder.directory import StoreDirectory
from .folder.identity_note import key_name, read_note, unpack
from .folder.open_store import read_identity
from .folder.reconcile import (
    IDENTITY,
    INDEX,
    SIZE,
    CheckResult,
    Found,
    Reconciler,
    RecordFile,
    record_bytes_of,
)
from .index.index_file import (
    DATA_FILE,
    FORMAT_VERSION,
    Identity,
    IndexDamaged,
    IndexFile,
    Row,
    RowBatch,
    finish_rebuild,
    fresh_folder,
    rebuild,
)


def check_store(
    path: str | os.PathLike[str],
    *,
    fix: bool = False,
    mac_key: MacKey | None = None,
    max_problems: int = 100,
    scan_timeout_seconds: float = 600.0,
) -> CheckResult:
    """Check all rows and records of the store at `path`. With `fix`, repair faults if possible.
    Takes the store's lock. Raises TierConfigError for a missing store, for a store that is in use
    or cannot be read or written, and for a `mac_key` that is not the store's key."""
    directory = StoreDirectory(Path(path), create=False)
    with closing(directory):
        result = CheckResult(directory.path, max_problems)
        check = _Check(directory, result, mac_key, scan_timeout_seconds)
        try:
            check.scan_store()
            if fix:
                check.mend()
        except (OSError, lmdb.Error) as error:
            raise TierConfigError(
                f"{directory.path} cannot be checked ({error}); mend that and check again"
            ) from error
    return check.result


class _Check:
    """A check of one store. The caller holds the store's lock."""

    def __init__(
        self,
        directory: StoreDirectory,
        result: CheckResult,
        mac_key: MacKey | None,
        scan_timeout_seconds: float,
    ) -> None:
        self.result = result
        self._mac_key = mac_key
        self._directory = directory
        self._scan_timeout_seconds = scan_timeout_seconds
        self._note = read_note(directory.path)
        self._identity = self._note.identity if self._note else None
        self._plan: SpacePlan | None = None  # None: the size of a record is unknown
        self._damage: IndexDamaged | None = None

    def scan_store(self) -> None:
        """Check all rows and records, and add the faults to `result`. Changes nothing."""
        if self._note is not None:
            self._refuse_other_format(self._note.identity)
        self._note_leftovers()
        batches = self._read_index()
        layout_id = self._identity.layout_id if self._identity else None
        self._reconciler = Reconciler(
            self.result,
            layout_id,
            has_index=batches is not None,
            cleared_up_to=self._note.cleared_up_to if self._note else 0,
        )
        slot_file = self._directory.slot_file
        seal = self._seal()
        if slot_file.exists():
            verifies = self.result.payloads_verified
            with closing(RecordFile(slot_file, seal, verifies=verifies)) as file:
                self._reconciler.run(_rows(batches), self._records(file))
        else:
            self._reconciler.run(_rows(batches), iter(()))
            if self.result.rows:
                self.result.add(SIZE, f"{slot_file} is missing")
        if self._damage is not None:
            self.result.add(INDEX, f"the index is damaged: {self._damage}")
        elif batches is None and self.result.orphans:
            self.result.add(INDEX, "the index is lost")

    def mend(self) -> None:
        """Remove wrong rows, or rebuild a lost or damaged index."""
        finish_rebuild(self._directory.index)
        if INDEX in self.result.counts:
            self._make_index()
            return
        bad_slots = self._reconciler.bad_slots
        if bad_slots:
            with closing(IndexFile(self._directory.index, 0)) as index:
                index.delete(bad_slots)
            self.result.removed_rows = len(bad_slots)

    def _make_index(self) -> None:
        if not self.result.payloads_verified:
            self.result.notes.append(
                "no index was made, because the records cannot be verified without the key; give "
                "its file and check again"
            )
            return
        index = self._directory.index
        if (index / DATA_FILE).exists():
            aside = guard.move_aside(index)
            self.result.notes.append(f"the index was moved to {aside}")
        if self._note is None or self._plan is None:
            self.result.notes.append(
                "no index was made, because nothing says whose records these are; the next start "
                "begins empty"
            )
            return
        rows = list(self._reconciler.rows_of_records())
        rebuild(index, self._plan.index_bytes, self._note.identity, rows)
        self.result.rebuilt_rows = len(rows)

    def _seal(self) -> Seal | None:
        """Return the seal of the store's records; None for records with plain checksums, or if the
        key or the identity is unknown. Raises TierConfigError for a key that is not the store's."""
        if self._identity is None:
            return None  # the identity is unknown
        made_for, given = unpack(self._identity.namespace), self._mac_key
        if given is None:
            if made_for.key_id:
                self.result.payloads_verified = False
                self.result.notes.append(
                    f"payloads were not verified: the records are sealed with "
                    f"{key_name(made_for.key_id)}; give its file to have them verified"
                )
            return None
        if given.id != made_for.key_id:
            raise TierConfigError(
                f"{self._directory.path} has records with {key_name(made_for.key_id)} and the one "
                f"given is {given.id.hex()}; give "
                f"{'the file of that key' if made_for.key_id else 'none'}"
            )
        return made_for.seal(given)

    def _note_leftovers(self) -> None:
        index, notes = self._directory.index, self.result.notes
        if self._note is None:
            notes.append("the identity file is missing or damaged; the next start writes it")
        if fresh_folder(index).exists():
            notes.append("an index was about to be replaced; the next start ends that")
        notes += [f"{aside} is an index that was damaged" for aside in guard.set_aside(index)]
        notes += [
            f"{aside} is a store of another format, kept for the version that made it"
            for aside in other_formats.kept(self._directory.path)
        ]

    def _read_index(self) -> list[RowBatch] | None:
        """Read all rows. Return None if the index is missing or damaged."""
        folder = self._directory.index
        if not (folder / DATA_FILE).exists():
            folder = fresh_folder(folder)  # a crash came between removal and renaming
        if not (folder / DATA_FILE).exists():
            return None
        try:
            batches = list(guard.read_rows(folder, self._scan_timeout_seconds))
            found = read_identity(folder)
            if found is None and any(batch.slots for batch in batches):
                raise IndexDamaged("it does not say what it is for")
        except IndexDamaged as damage:
            self._damage = damage
            return None
        if found is None:
            return None
        self._compare(found)
        return batches

    def _compare(self, found: Identity) -> None:
        self._refuse_other_format(found)
        if self._identity is not None and not self._identity.is_same(found):
            self.result.add(IDENTITY, "the index and the identity file name different stores")
        self._identity = found

    def _refuse_other_format(self, found: Identity) -> None:
        if found.format_version != FORMAT_VERSION:
            raise TierConfigError(
                f"{self._directory.path} has format {found.format_version} and this version "
                f"checks format {FORMAT_VERSION}; use the version that made it"
            )

    def _records(self, file: RecordFile) -> Iterator[Found]:
        """Yield the content of every slot. Yield nothing if the size of a record is unknown."""
        self.result.bytes_read = file.size
        block_bytes = self._note.page_bytes if self._note else file.block_bytes()
        if block_bytes is None:
            return
        size = record_bytes_of(block_bytes)
        self._plan = plan = plan_slots(size - HEADER_PAGE_BYTES, file.size // size)
        self.result.slots = plan.num_slots
        self._check_sizes(plan, file.size)
        yield from file.records(block_bytes)

    def _check_sizes(self, plan: SpacePlan, slot_file_bytes: int) -> None:
        if slot_file_bytes != plan.slot_file_bytes:
            self.result.add(
                SIZE,
                f"the slot file has {slot_file_bytes} bytes, which is not a number of records of "
                f"{plan.record_bytes}",
            )
        used = self._directory.used_bytes()
        if used > plan.total_bytes:
            self.result.add(
                SIZE, f"everything takes {used} bytes on the disk, where {plan.total_bytes} may be"
            )
        index = self._directory.index / DATA_FILE
        if index.exists() and index.stat().st_size != plan.index_bytes:
            self.result.notes.append(
                f"the index file has {index.stat().st_size} bytes and should have "
                f"{plan.index_bytes}; the next start sees to that"
            )


def _rows(batches: Iterable[RowBatch] | None) -> Iterator[Row]:
    return (row for batch in batches or () for row in batch.unpack_rows())
