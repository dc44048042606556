# SPDX-License-Identifier: Apache-2.0
"""Opens a store: checks what lies in the directory, fits it to the capacity, reads the index.

Reads no payload, so opening takes as long for large blocks as for small ones. Knows nothing of
threads; what it returns is used under the lock of the state it makes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import lmdb

from ..base import TierStats
from ..block import BlockLayout
from ..errors import TierConfigError
from . import guard
from .directory import StoreDirectory
from .index_file import FORMAT_VERSION, Identity, IndexFile, Row, rebuild
from .slot_file import SlotFile
from .slot_index import SlotIndex
from .space import SpacePlan, plan_space
from .state import StoreState

SET_ASIDE = "index_set_aside"  # the key in `TierStats.errors`


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
) -> OpenedStore:
    """Raises TierConfigError with cause and cure, and then leaves nothing open."""
    plan = plan_space(layout, capacity_bytes)
    stats = TierStats(capacity_bytes=capacity_bytes, capacity_blocks=plan.num_slots)
    with ExitStack() as undo:
        directory = StoreDirectory(path)
        undo.callback(directory.close)
        try:
            if not guard.make_safe(directory.index, scan_timeout_seconds):
                stats.errors[SET_ASIDE] = 1
            rows = _prepare_index(directory, plan, _identity(layout, namespace))
            index_file = IndexFile(directory.index, plan.index_bytes)
            undo.callback(index_file.close)
            slot_file = SlotFile(directory.slot_file, layout, plan.num_slots)
            undo.callback(slot_file.close)
            epoch = index_file.next_epoch()
        except (OSError, lmdb.Error) as error:
            raise TierConfigError(
                f"the SSD tier cannot use {directory.path} ({error}); use another path or make "
                "room there"
            ) from error
        state = StoreState(layout, slot_file, SlotIndex(plan.num_slots, rows), stats)
        return OpenedStore(state, index_file, epoch, undo.pop_all().close)


def _prepare_index(directory: StoreDirectory, plan: SpacePlan, identity: Identity) -> list[Row]:
    """Make the index, or the one that is there, fit the plan; its rows. What belongs to another
    identity is refused before anything is changed."""
    rows: list[Row] = []
    surplus: list[int] = []
    if directory.index.exists():
        index = IndexFile(directory.index, plan.index_bytes)
        try:
            _check_identity(directory.path, index.identity(), identity)
            for row in index.rows():
                if row.slot < plan.num_slots:
                    rows.append(row)
                else:
                    surplus.append(row.slot)
            is_too_large = index.file_bytes() > plan.index_bytes
            directory.check_free_space(plan)
            if surplus and not is_too_large:
                index.delete(surplus)
        finally:
            index.close()
        if is_too_large:
            rebuild(directory.index, plan.index_bytes, identity, rows)
    else:
        directory.check_free_space(plan)
    guard.remove_larger(directory.index, plan.index_bytes)
    index = IndexFile(directory.index, plan.index_bytes)
    try:
        index.reserve(plan.index_bytes)
        if index.identity() is None:
            index.write_identity(identity)
    finally:
        index.close()
    return rows


def _identity(layout: BlockLayout, namespace: bytes) -> Identity:
    text = (
        f"{layout.num_layers} layers of {layout.num_kv_heads} KV heads of {layout.head_dim}, "
        f"blocks of {layout.block_size} tokens, {layout.kv_dtype}"
    )
    return Identity(FORMAT_VERSION, layout.layout_id(), namespace, text)


def _name_of(identity: Identity) -> str:
    return f"namespace {identity.namespace.hex()[:16]}" if identity.namespace else "no namespace"


def _check_identity(path: Path, found: Identity | None, wanted: Identity) -> None:
    if found is None:
        return  # a crash came before the first commit
    if found.format_version != wanted.format_version:
        theirs, ours = f"format {found.format_version}", f"format {wanted.format_version}"
    elif found.layout_id != wanted.layout_id:
        theirs, ours = found.layout_text, wanted.layout_text
    elif found.namespace != wanted.namespace:
        # A namespace is there where the names of blocks do not say which model they are of.
        theirs = f"another model or naming of blocks ({_name_of(found)})"
        ours = _name_of(wanted)
    else:
        return
    raise TierConfigError(
        f"the SSD tier in {path} was made for {theirs}, and this engine has {ours}; use another "
        "path or delete that directory"
    )
