# SPDX-License-Identifier: Apache-2.0
"""Keeps stores of other formats beside the store in use, for the StrataKV version that made them.

    PATH/format-N/        the store of format N: identity, blocks, index, as they lay in PATH
    PATH/format-N.new/    a store that is being moved there

So after a rollback the old version finds its blocks again, and after a repeated upgrade the new
version finds its blocks. Stores of other formats do not count towards the tier's size, and are kept
while the disk has room for them and for the store in use. Single blocks cannot be removed from a
store of another format, so the first `clear` or `wait_forgotten` removes all these stores.

The caller must hold the store's lock. Every function may raise OSError. The next opening finishes a
move that a crash interrupted. No symbolic link is followed."""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

from ..index.index_file import DATA_FILE, Identity, fresh_folder, sync_folder
from .identity_note import NAME as IDENTITY
from .identity_note import read_note

_BLOCKS, _INDEX = "blocks", "index"
_NAME = re.compile(r"format-\d{1,20}(\.new)?")


def kept(path: Path) -> list[Path]:
    """Return the folders in `path` with stores of other formats, also with partly moved stores."""
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return []
    return [path / name for name in names if _NAME.fullmatch(name) and _is_folder(path / name)]


def keep(path: Path, format_version: int) -> Path:
    """Move the store in `path` into the folder of its format, and remove an earlier store in this
    folder. If a crash interrupted a move of the store out of the folder, move its files back."""
    folder, moving = _folder(path, format_version), _moving(path, format_version)
    if _has_index(folder) and not os.path.lexists(folder / IDENTITY) and not _has_index(path):
        for name in (_BLOCKS, IDENTITY):  # in the reverse order of `_end_bringing`
            _move(path / name, folder / name)
        sync_folder(folder)
        sync_folder(path)
        return folder
    if _is_folder(folder):
        shutil.rmtree(folder)
    if not _is_folder(moving):
        moving.mkdir(mode=0o700)  # fails if a link or a file has this name
    # The identity is moved last: while it is in `path`, the store there must still be moved.
    for name in (_BLOCKS, fresh_folder(path / _INDEX).name, _INDEX, IDENTITY):
        _move(path / name, moving / name)
    return _end_keeping(path, moving)


def bring_back(path: Path, wanted: Identity) -> bool:
    """Move the kept store of identity `wanted` into the empty `path`. Return False without one."""
    folder = _folder(path, wanted.format_version)
    note = read_note(folder) if _is_folder(folder) else None
    if note is None or not note.identity.is_same(wanted) or not _has_index(folder):
        return False
    _end_bringing(path, folder)
    return True


def finish_moves(path: Path, wanted: Identity) -> None:
    """Finish moves that a crash interrupted. `wanted` is the identity of the store to be opened."""
    format_version = wanted.format_version
    for moving in kept(path):
        is_empty = not (os.path.lexists(path / IDENTITY) or _has_index(path))
        if moving.suffix == ".new" and is_empty:
            _end_keeping(path, moving)
    _take_back(path, _moving(path, format_version), format_version)
    folder = _folder(path, format_version)
    if _is_folder(folder) and not os.path.lexists(folder / IDENTITY):
        note = read_note(path)
        is_ours = note is not None and note.format_version == format_version
        if is_ours and _has_index(folder) and not _has_index(path):
            _end_bringing(path, folder)
        else:
            shutil.rmtree(folder)
    if not any(os.path.lexists(path / name) for name in (IDENTITY, _BLOCKS, _INDEX)):
        bring_back(path, wanted)  # the other store was moved away, so this move is next


def forget(path: Path) -> None:
    """Remove all stores of other formats in `path`, durably."""
    found = kept(path)
    for folder in found:
        shutil.rmtree(folder)
    if found:
        sync_folder(path)


def _end_keeping(path: Path, moving: Path) -> Path:
    folder = moving.with_suffix("")
    if _is_folder(folder):
        shutil.rmtree(folder)
    sync_folder(moving)
    moving.rename(folder)
    sync_folder(path)
    return folder


def _take_back(path: Path, moving: Path, format_version: int) -> None:
    """Move files back into `path` if another version crashed while it moved them away."""
    note = read_note(path)
    if not _is_folder(moving) or note is None or note.format_version != format_version:
        return
    # In the reverse order of `keep`, so that `keep` could continue from any point.
    for name in (_INDEX, fresh_folder(path / _INDEX).name, _BLOCKS):
        if os.path.lexists(moving / name) and not os.path.lexists(path / name):
            _move(moving / name, path / name)
    shutil.rmtree(moving)
    sync_folder(path)


def _end_bringing(path: Path, folder: Path) -> None:
    # The index is moved last: a folder with an index but without an identity is being moved.
    for name in (IDENTITY, _BLOCKS, _INDEX):
        _move(folder / name, path / name)
    shutil.rmtree(folder)
    sync_folder(path)


def _move(source: Path, target: Path) -> None:
    if not os.path.lexists(source):
        return
    if _is_folder(target):
        shutil.rmtree(target)
    source.rename(target)


def _folder(path: Path, format_version: int) -> Path:
    return path / f"format-{format_version}"


def _moving(path: Path, format_version: int) -> Path:
    return path / f"format-{format_version}.new"


def _has_index(path: Path) -> bool:
    return (path / _INDEX / DATA_FILE).exists()


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False
