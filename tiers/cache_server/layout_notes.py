# SPDX-License-Identifier: Apache-2.0
"""How the blocks of stores on the disk lie: PATH/NAME.layout beside each store's folder.

A server that starts again so knows a room's layout before anybody attaches, and makes it ready. A
note that is lost or damaged only costs that. Knows nothing of what is in a store.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import msgspec

from ..block import LAYOUT_VERSION, BlockLayout
from ..errors import InvalidBlock

log = logging.getLogger(__name__)

_LIMIT_BYTES = 64 * 1024
_NAME_DIGITS = 32


class _Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layout_version: int
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str


def store_folder(path: Path, room: str) -> Path:
    """Where a room's store is: a name that no tenant can choose."""
    return path / hashlib.sha256(room.encode()).hexdigest()[:_NAME_DIGITS]


def read_layout_note(path: Path, room: str) -> BlockLayout | None:
    """The layout of a room's store; None where there is no note of it that can be read."""
    place = _place(path, room)
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(place, flags)
        try:  # not `open`, which leaves the descriptor of a directory open
            note = msgspec.json.decode(os.read(descriptor, _LIMIT_BYTES), type=_Note)
        finally:
            os.close(descriptor)
        if note.layout_version != LAYOUT_VERSION:
            return None
        return BlockLayout(
            note.num_layers, note.block_size, note.num_kv_heads, note.head_dim, note.kv_dtype
        )
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, InvalidBlock) as error:
        log.warning(
            "%s cannot be read (%s); the first engine to attach says it again", place, error
        )
        return None


def write_layout_note(path: Path, room: str, layout: BlockLayout) -> None:
    """Replace the note. May raise OSError."""
    note = _Note(
        LAYOUT_VERSION,
        layout.num_layers,
        layout.block_size,
        layout.num_kv_heads,
        layout.head_dim,
        layout.kv_dtype,
    )
    place = _place(path, room)
    fresh = place.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(fresh, flags, 0o600), "wb") as file:
        file.write(msgspec.json.encode(note))
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(place)


def _place(path: Path, room: str) -> Path:
    return store_folder(path, room).with_suffix(".layout")
