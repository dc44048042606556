# SPDX-License-Identifier: Apache-2.0
"""Layout notes: the file PATH/NAME.layout, next to a store's folder, has its blocks' layout.

A restarted server reads a tenant store's layout from this file and opens the store before an engine
attaches. Without a readable file the store is opened when an engine attaches."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..block import LAYOUT_VERSION, BlockLayout
from ..errors import InvalidBlock, TierConfigError
from ..ssd.folder.inventory import StoreEntry, find_stores, remove

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


def store_folder(path: Path, tenant_store: str) -> Path:
    """Return the folder of a tenant store on the disk, with a name that no tenant can choose."""
    return path / hashlib.sha256(tenant_store.encode()).hexdigest()[:_NAME_DIGITS]


def read_layout_note(path: Path, tenant_store: str) -> BlockLayout | None:
    """Return the layout of a tenant store on the disk, or None without a readable layout note."""
    place = _place(path, tenant_store)
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(place, flags)
        try:  # `open` would leave the descriptor of a directory open
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


def write_layout_note(path: Path, tenant_store: str, layout: BlockLayout) -> None:
    """Write the layout note, replacing an older note. May raise OSError."""
    note = _Note(
        LAYOUT_VERSION,
        layout.num_layers,
        layout.block_size,
        layout.num_kv_heads,
        layout.head_dim,
        layout.kv_dtype,
    )
    place = _place(path, tenant_store)
    fresh = place.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(fresh, flags, 0o600), "wb") as file:
        file.write(msgspec.json.encode(note))
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(place)


def stores_left(path: Path, names: Iterable[str]) -> list[StoreEntry]:
    """Return the store folders in `path` of no store in `names`. Raises TierConfigError."""
    if not path.is_dir():
        raise TierConfigError(f"{path} is no folder; give the --ssd-path of a cache server")
    known = {store_folder(path, name).name for name in names}
    ours = re.compile(f"[0-9a-f]{{{_NAME_DIGITS}}}")
    entries = [entry for entry in find_stores(path) if entry.path.parent == path]
    return [
        each for each in entries if ours.fullmatch(each.path.name) and each.path.name not in known
    ]


def remove_left(folder: Path) -> int:
    """Remove a store's folder and note; return bytes freed. Raises TierConfigError if in use."""
    freed = remove(folder)
    folder.with_suffix(".layout").unlink(missing_ok=True)
    return freed


def _place(path: Path, tenant_store: str) -> Path:
    return store_folder(path, tenant_store).with_suffix(".layout")
