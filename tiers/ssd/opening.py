# SPDX-License-Identifier: Apache-2.0
"""Opens a store: checks what lies in the directory, fits it to the capacity, reads the index.

Reads no payload, so opening takes as long for large blocks as for small ones. Knows nothing of
threads; what it returns is used under the lock of the state it makes.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import lmdb

from ..base import TierStats
from ..block import BlockLayout
from ..codecs.base import Codec
from ..errors import TierConfigError, TierDown
from ..mac_key import MacKey
from . import guard
from .directory import StoreDirectory
from .identity_file import Note, make_note, read_note, write_note
from .index_file import (
    DATA_FILE,
    FORMAT_VERSION,
    Identity,
    IndexDamaged,
    IndexFile,
    finish_rebuild,
    rebuild,
    sync_folder,
)
from .made_for import full_namespace, identity_of, refuse
from .slot_file import SlotFile
from .slot_index import SlotIndex
from .space import SpacePlan, plan_space
from .state import StoreState

log = logging.getLogger(__name__)

SET_ASIDE = "index_set_aside"  # the key in `TierStats.errors`

# What LMDB says of a file rather than of the machine.
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """The parts of an open store."""

    state: StoreState
    index_file: IndexFile
    epoch: int  # of this opening; no earlier one had it
    close: Callable[[], None]


def open_store(
    path: Path,
    layout: BlockLayout,
    capacity_bytes: int,
    namespace: bytes,
    scan_timeout_seconds: float,
    codec: Codec | None = None,
    mac_key: MacKey | None = None,
) -> OpenedStore:
    """Raises TierConfigError with cause and cure, TierDown where the disk is the cause, and then
    leaves nothing open."""
    plan = plan_space(layout, capacity_bytes)
    stats = TierStats(capacity_bytes=capacity_bytes, capacity_blocks=plan.num_slots)
    made_for = full_namespace(namespace, codec, mac_key)
    wanted = identity_of(FORMAT_VERSION, layout, made_for)
    with ExitStack() as undo:
        directory = StoreDirectory(path)
        undo.callback(directory.close)
        try:
            note = read_note(directory.path)
            if note is not None and note.format_version != FORMAT_VERSION:
                # Its index is not looked at: what it may hold is for that format to say.
                refuse(directory.path, note.identity, wanted)
            try:
                index = _read_index(directory, plan, wanted, note, scan_timeout_seconds)
            except IndexDamaged as damage:
                log.warning(
                    "the index of the SSD tier is damaged (%s); it was moved to %s and the tier "
                    "starts empty",
                    damage,
                    guard.move_aside(directory.index),
                )
                stats.errors[SET_ASIDE] = 1
                index = None
            directory.check_free_space(plan)
            if index is None:
                _leave_only_records_of(directory, wanted, note)
                index = SlotIndex(plan.num_slots)
            index_file = _fit_index(directory, plan, wanted, index)
            undo.callback(index_file.close)
            slot_file = SlotFile(directory.slot_file, layout, plan.num_slots)
            undo.callback(slot_file.close)
            epoch = index_file.next_epoch(note.epoch if note else None)
            write_note(directory.path, make_note(wanted, layout.page_bytes, epoch))
        except (OSError, lmdb.Error, IndexDamaged) as error:
            kind = TierDown if isinstance(error, OSError | lmdb.DiskError) else TierConfigError
            raise kind(
                f"the SSD tier cannot use {directory.path} ({error}); use another path or make "
                "room there"
            ) from error
        seal = None if mac_key is None else made_for.seal(mac_key)
        state = StoreState(layout, slot_file, index, stats, seal)
        return OpenedStore(state, index_file, epoch, undo.pop_all().close)


def _read_index(
    directory: StoreDirectory,
    plan: SpacePlan,
    wanted: Identity,
    note: Note | None,
    scan_timeout_seconds: float,
) -> SlotIndex | None:
    """What the index on the disk says; None where there is none. Raises IndexDamaged, and
    TierConfigError for the index of another store, which is left as it is."""
    finish_rebuild(directory.index)
    if not (directory.index / DATA_FILE).exists():
        # A crash right after the folder was made leaves nothing worth keeping.
        shutil.rmtree(directory.index, ignore_errors=True)
        return None
    index = SlotIndex(plan.num_slots, guard.read_rows(directory.index, scan_timeout_seconds))
    found = read_identity(directory.index)
    if found is None:
        if len(index):
            raise IndexDamaged("it does not say what it is for")
        return None  # a crash came before the first commit
    if not found.is_same(wanted):
        if note is not None and note.identity.is_same(wanted):
            raise IndexDamaged("it does not say that it is for what the store is for")
        refuse(directory.path, found, wanted)
    return index


def read_identity(folder: Path) -> Identity | None:
    """The identity in a sound index. Raises IndexDamaged."""
    try:
        index = IndexFile(folder, 0)
    except _DAMAGE as error:
        raise IndexDamaged(str(error)) from error
    try:
        return index.identity()
    finally:
        index.close()


def _leave_only_records_of(directory: StoreDirectory, wanted: Identity, note: Note | None) -> None:
    """Without an index the identity file alone says whose the records are. Those of another model
    must not lie where a later repair takes all records there are into a new index."""
    if note is None or not note.identity.is_same(wanted):
        directory.slot_file.unlink(missing_ok=True)


def _fit_index(
    directory: StoreDirectory, plan: SpacePlan, identity: Identity, index: SlotIndex
) -> IndexFile:
    """Make the index on the disk, or the one that is there, fit the plan."""
    data = directory.index / DATA_FILE
    if data.exists() and data.stat().st_size > plan.index_bytes:
        rebuild(directory.index, plan.index_bytes, identity, index.rows())
    guard.remove_larger(directory.index, plan.index_bytes)
    index_file = IndexFile(directory.index, plan.index_bytes)
    try:
        index_file.delete_from(plan.num_slots)
        index_file.reserve(plan.index_bytes)
        if index_file.identity() is None:
            index_file.write_identity(identity)
        sync_folder(directory.index)
    except BaseException:
        index_file.close()
        raise
    return index_file
