# SPDX-License-Identifier: Apache-2.0
"""Stores of other formats, kept whole beside the one in use for the version that made them.

    PATH/format-N/        the store of format N: identity, blocks, index, as they lay in PATH
    PATH/format-N.new/    one that is being moved there

So an upgrade that is rolled back finds its blocks again, and so does the upgrade that follows. They
are not counted in the tier's size: they stay as long as the disk has room for both. What is in them
cannot be forgotten block by block, so the first clear, and the first block that is to stay
forgotten, remove them all.

Whoever calls holds the store's lock. Every call may raise OSError, and a move that a crash cut
short goes on at the next opening. No symbolic link is followed.
"""

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
    """The folders of stores of other formats in `path`, also those that are half moved."""
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return []
    return [path / name for name in names if _NAME.fullmatch(name) and _is_folder(path / name)]


def keep(path: Path, format_version: int) -> Path:
    """Move the store in `path` into its own folder; an earlier one of its format is removed, but
    one that its own version was about to bring back is that very store."""
    folder, moving = _folder(path, format_version), _moving(path, format_version)
    if _has_index(folder) and not os.path.lexists(folder / IDENTITY) and not _has_index(path):
        for name in (_BLOCKS, IDENTITY):  # in the order opposite to that of bringing
            _move(path / name, folder / name)
        sync_folder(folder)
        sync_folder(path)
        return folder
    if _is_folder(folder):
        shutil.rmtree(folder)
    if not _is_folder(moving):
        moving.mkdir(mode=0o700)  # not where a link or a file stands
    # The identity is last: until then it says that this store is to be moved.
    for name in (_BLOCKS, fresh_folder(path / _INDEX).name, _INDEX, IDENTITY):
        _move(path / name, moving / name)
    return _end_keeping(path, moving)


def bring_back(path: Path, wanted: Identity) -> bool:
    """Make the store of this identity the one in `path`, where nothing lies; False where none was
    kept."""
    folder = _folder(path, wanted.format_version)
    note = read_note(folder) if _is_folder(folder) else None
    if note is None or not note.identity.is_same(wanted) or not _has_index(folder):
        return False
    _end_bringing(path, folder)
    return True


def finish_moves(path: Path, wanted: Identity) -> None:
    """After a crash: end what was begun. `wanted` is the store that is being opened."""
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
        bring_back(path, wanted)  # what lay here was moved, and this was to come next


def forget(path: Path) -> None:
    """Remove them all, durably."""
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
    """Where the store in `path` is the one being opened, and another version was about to move it
    away: what was moved comes back."""
    note = read_note(path)
    if not _is_folder(moving) or note is None or note.format_version != format_version:
        return
    # In the order opposite to that of `keep`, which so could go on from any point of it.
    for name in (_INDEX, fresh_folder(path / _INDEX).name, _BLOCKS):
        if os.path.lexists(moving / name) and not os.path.lexists(path / name):
            _move(moving / name, path / name)
    shutil.rmtree(moving)
    sync_folder(path)


def _end_bringing(path: Path, folder: Path) -> None:
    # The index is last: a folder with one, and without an identity, is being moved.
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
