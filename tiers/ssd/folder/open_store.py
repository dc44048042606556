# SPDX-License-Identifier: Apache-2.0
"""Opens a store: checks its directory, reads its index and fits its files to the capacity.

Opening reads no payloads unless the store shrinks, so opening is as fast with large blocks as with
small blocks. The caller must hold the lock of the returned state to use the state's `index`."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lmdb

from ...base import TierStats
from ...block import BlockLayout
from ...codecs.base import Codec
from ...errors import TierConfigError, TierDown, lasting_cause
from ...mac_key import MacKey
from ...policies.known_policies import DEFAULT_SSD_POLICY, LRU, PolicyFactory, policy_factory
from ..disk.slot_file import SlotFile
from ..disk.space import SpacePlan, plan_space
from ..index.index_file import (
    DATA_FILE,
    EPOCH_SHIFT,
    FORMAT_VERSION,
    Identity,
    IndexDamaged,
    IndexFile,
    finish_rebuild,
    rebuild,
    sync_folder,
)
from ..index.slot_index import SlotIndex
from ..state import StoreState
from . import guard, other_formats
from .directory import StoreDirectory
from .identity_note import (
    Note,
    full_namespace,
    identity_of,
    make_note,
    read_note,
    refuse,
    write_note,
)
from .shrinking import num_slots_there, shrink

log = logging.getLogger(__name__)

# The most slots of a store with an eviction policy; a larger store evicts by least recent use, with
# the arrays of the index. A policy has an object for each block, `adaptive` also for evicted
# blocks: at this size up to 160 MiB, and 0.2 s at the first prompt to copy the order of use.
MOST_POLICY_SLOTS = 131_072

# Keys of `TierStats.errors`.
SET_ASIDE = "index_set_aside"
OTHER_FORMAT = "other_format"

# LMDB's errors for a damaged file, as opposed to errors of the machine.
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
    epoch: int  # of this opening; no earlier opening had it
    cleared_up_to: int  # the generation up to which all blocks are removed
    note_cleared: Callable[[int], None]  # writes the new value durably; may raise OSError
    forget_other_formats: Callable[[], None]  # removes stores of other formats durably; OSError
    is_in_place: Callable[[], bool]  # whether the path still leads to the store
    close: Callable[[], None]


def open_store(
    path: Path,
    layout: BlockLayout,
    capacity_bytes: int,
    namespace: bytes,
    scan_timeout_seconds: float,
    codec: Codec | None = None,
    mac_key: MacKey | None = None,
    policy: str = DEFAULT_SSD_POLICY,
    *,
    create: bool = True,
) -> OpenedStore:
    """Open the store in `path`. If `create` is false, a directory without a store is refused.
    Raises TierConfigError with cause and remedy, or TierDown if the disk is the cause. After an
    error, no file of the store is open."""
    make_policy = policy_factory(policy)  # first, so that an unknown policy changes nothing
    plan = plan_space(layout, capacity_bytes)
    stats = TierStats(capacity_bytes=capacity_bytes, capacity_blocks=plan.num_slots)
    made_for = full_namespace(namespace, codec, mac_key)
    wanted = identity_of(FORMAT_VERSION, layout, made_for)
    with ExitStack() as undo:
        directory = StoreDirectory(path, create=create)
        undo.callback(directory.close)
        try:
            note, index = _read_store(directory, plan, wanted, stats, scan_timeout_seconds)
            _check_free_space(directory, plan)
            cleared_up_to = 0
            if note is not None and note.identity.is_same(wanted):
                cleared_up_to = note.cleared_up_to
            elif index is None:
                # No file identifies the records, all of which a later repair would use.
                directory.slot_file.unlink(missing_ok=True)
            if index is None:
                index = SlotIndex(plan.num_slots)
            if cleared_up_to:
                index.forget_up_to(cleared_up_to)
            if index.num_slots > plan.num_slots:
                index = shrink(directory, plan, index)
            if policy != LRU:
                _choose_victims(index, policy, make_policy)
            index_file = _fit_index(directory, plan, wanted, index)
            undo.callback(index_file.close)
            slot_file = SlotFile(directory.slot_file, layout, plan.num_slots)
            undo.callback(slot_file.close)
            epoch = index_file.next_epoch(note.epoch if note else None)
            # If epochs begin anew, new blocks must not count as cleared.
            cleared_up_to = min(cleared_up_to, (epoch << EPOCH_SHIFT) - 1)

            def note_cleared(generation: int) -> None:
                note = make_note(wanted, layout.page_bytes, epoch, generation)
                write_note(directory.path, note)

            note_cleared(cleared_up_to)
            directory.note_opened()
        except (OSError, lmdb.Error, IndexDamaged) as error:
            cure = lasting_cause(error)
            kind = TierConfigError if cure or isinstance(error, IndexDamaged) else TierDown
            raise kind(
                f"the SSD tier cannot use {directory.path} ({error}); "
                f"{cure or 'use another path or make room there'}"
            ) from error
        seal = None if mac_key is None else made_for.seal(mac_key)
        state = StoreState(layout, slot_file, index, stats, seal)
        close = undo.pop_all().close
        forget = partial(other_formats.forget, directory.path)
        return OpenedStore(
            state,
            index_file,
            epoch,
            cleared_up_to,
            note_cleared,
            forget,
            directory.is_in_place,
            close,
        )


def _read_store(
    directory: StoreDirectory,
    plan: SpacePlan,
    wanted: Identity,
    stats: TierStats,
    scan_timeout_seconds: float,
) -> tuple[Note | None, SlotIndex | None]:
    """Read the identity file and the index. A result is None if its file is missing. Move a store
    of another format or a damaged index aside. Raises TierConfigError, OSError."""
    path = directory.path
    other_formats.finish_moves(path, wanted)
    note = read_note(path)
    try:
        try:
            if note is not None:
                _check_format(path, note.identity, wanted)
            return note, _read_index(directory, plan, wanted, note, scan_timeout_seconds)
        except _OtherFormat as other:
            stats.errors[OTHER_FORMAT] = 1
            aside = other_formats.keep(path, other.number)
            is_back = other_formats.bring_back(path, wanted)
            log.warning(
                "the SSD tier in %s has format %d and this version has format %d; it was set aside "
                "in %s for a version that reads it, and the tier %s",
                path, other.number, FORMAT_VERSION, aside.name,
                "goes on with its store of that format" if is_back else "starts empty",
            )  # fmt: skip
            note = read_note(path)
            return note, _read_index(directory, plan, wanted, note, scan_timeout_seconds)
    except IndexDamaged as damage:
        log.warning(
            "the index of the SSD tier is damaged (%s); it was moved to %s and the tier starts "
            "empty",
            damage,
            guard.move_aside(directory.index),
        )
        stats.errors[SET_ASIDE] = 1
        return note, None


def _choose_victims(index: SlotIndex, name: str, make: PolicyFactory) -> None:
    """Evict by policy `name`, up to `MOST_POLICY_SLOTS` slots. Raises TierConfigError."""
    if index.num_slots > MOST_POLICY_SLOTS:
        log.warning(
            "the SSD tier has %d slots and evicts by least recent use: with more than %d the "
            "policy %s would take too much memory",
            index.num_slots,
            MOST_POLICY_SLOTS,
            name,
        )
        return
    index.choose_by(make(index.num_slots))


def _check_free_space(directory: StoreDirectory, plan: SpacePlan) -> None:
    """Raise TierDown or TierConfigError if the disk has too little room. Before TierDown, remove
    damaged indexes and stores of other formats that were set aside, and check again."""
    try:
        directory.check_free_space(plan)
    except TierDown:
        aside = guard.set_aside(directory.index) + other_formats.kept(directory.path)
        if not aside:
            raise
        names = ", ".join(map(str, aside))
        log.warning("the disk has no room for %s as well, which is removed", names)
        for each in aside:
            shutil.rmtree(each)
        directory.check_free_space(plan)


def _read_index(
    directory: StoreDirectory,
    plan: SpacePlan,
    wanted: Identity,
    note: Note | None,
    scan_timeout_seconds: float,
) -> SlotIndex | None:
    """Read the index on the disk. Return None without an index. Raises IndexDamaged. Raises
    TierConfigError for the index of another store, which stays unchanged."""
    finish_rebuild(directory.index)
    if not (directory.index / DATA_FILE).exists():
        # After a crash right after the folder was made, the folder has no data.
        shutil.rmtree(directory.index, ignore_errors=True)
        return None
    num_slots = max(plan.num_slots, num_slots_there(directory.slot_file, plan))
    index = SlotIndex(num_slots, guard.read_rows(directory.index, scan_timeout_seconds))
    found = read_identity(directory.index)
    if found is None:
        if len(index):
            raise IndexDamaged("it does not say what it is for")
        return None  # the store crashed before the first commit
    if not found.is_same(wanted):
        if note is not None and note.identity.is_same(wanted):
            raise IndexDamaged("it does not say that it is for what the store is for")
        _check_format(directory.path, found, wanted)
        refuse(directory.path, found, wanted)
    return index


def read_identity(folder: Path) -> Identity | None:
    """Return the identity in an index that `guard.read_rows` has checked. Raises IndexDamaged."""
    try:
        index = IndexFile(folder, 0)
    except _DAMAGE as error:
        raise IndexDamaged(str(error)) from error
    try:
        return index.identity()
    finally:
        index.close()


class _OtherFormat(Exception):
    """A store with this identity but of another format, which this version cannot read."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _check_format(path: Path, found: Identity, wanted: Identity) -> None:
    """Raise _OtherFormat if only the format versions differ, TierConfigError if more differs."""
    if found.format_version == wanted.format_version:
        return
    if not found._replace(format_version=wanted.format_version).is_same(wanted):
        refuse(path, found, wanted)
    raise _OtherFormat(found.format_version)


def _fit_index(
    directory: StoreDirectory, plan: SpacePlan, identity: Identity, index: SlotIndex
) -> IndexFile:
    """Open the index on the disk with the planned size. A missing index is created."""
    data = directory.index / DATA_FILE
    if data.exists() and data.stat().st_size > plan.index_bytes:
        rebuild(directory.index, plan.index_bytes, identity, index.iter_by_use())
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
