# SPDX-License-Identifier: Apache-2.0
"""Lists the stores below a folder and removes stores, without opening them.

A folder with a lock file and at least one other file of a store counts as a store. Damaged stores
are listed too and can be removed. Listing reads a few pages of each store and follows no symbolic
link below the given folder. Only `remove` changes anything."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import TierConfigError
from ..index.index_file import DATA_FILE
from . import other_formats, scan
from .identity_note import NAME as IDENTITY
from .identity_note import read_note

_MOST_DEPTH = 3  # most levels between the searched folder and a store
_FILES = (IDENTITY, f"{IDENTITY}.new", "blocks")
_FOLDERS = ("index", "index.new", "index.bad-*")


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """Facts about a store, from its files. A field is None if the files do not have its value."""

    path: Path
    layout_text: str | None  # the layout of the store's blocks
    allocated_bytes: int  # bytes that the file system has allocated to the store
    blocks: int | None  # number of blocks at the last commit
    used_bytes: int | None  # payload bytes of `blocks`
    last_used: float  # time of the last change to a file, in seconds since 1970
    owner: str | None  # id of the process that uses the store, if known


def find_stores(folder: Path) -> list[StoreEntry]:
    """Return the stores in and below `folder`, sorted by path. Unreadable stores are left out."""
    found = []
    for path in sorted(_search(folder, _MOST_DEPTH)):
        with contextlib.suppress(OSError):
            found.append(look_at(path))
    return found


def is_store(path: Path) -> bool:
    """Whether `path` itself is the folder of a store."""
    try:
        if not stat.S_ISREG((path / "lock").lstat().st_mode):
            return False
    except OSError:
        return False
    return any(os.path.lexists(path / name) for name in (*_FILES, "index"))


def look_at(path: Path) -> StoreEntry:
    """Read the facts about the store in `path`. May raise OSError."""
    note = read_note(path)
    files = [path / "lock", *_ours(path)]
    stats = [each.lstat() for each in files if os.path.lexists(each)]
    blocks = _num_rows(path / "index" / DATA_FILE)
    return StoreEntry(
        path,
        None if note is None else note.layout_text,
        sum(each.st_blocks * 512 for each in stats),
        blocks,
        None if blocks is None or note is None else blocks * note.page_bytes,
        max(each.st_mtime for each in stats),
        _owner(path),
    )


def remove(path: Path) -> int:
    """Remove the store in `path`, and then `path` itself if it is empty. Return the bytes that were
    allocated to the store. Raises TierConfigError if `path` is no store or the store is in use; may
    raise OSError."""
    if not is_store(path):
        raise TierConfigError(f"{path} holds no SSD tier; give the directory of one")
    lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TierConfigError(
                f"the SSD tier in {path} is in use by process {_owner(path) or 'unknown'}; stop "
                "that process first"
            ) from None
        size = look_at(path).allocated_bytes
        for each in _ours(path, contents=False):
            if stat.S_ISDIR(each.lstat().st_mode):
                shutil.rmtree(each)
            else:
                each.unlink()
        (path / "lock").unlink()  # last, so that a killed removal can be repeated
    finally:
        os.close(lock)
    if not path.is_symlink() and not any(path.iterdir()):
        path.rmdir()
    return size


def _search(folder: Path, depth: int) -> Iterator[Path]:
    if is_store(folder):
        yield folder
        return
    if not depth:
        return
    try:
        with os.scandir(folder) as entries:
            below = [Path(each.path) for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for each in below:
        yield from _search(each, depth - 1)


def _ours(path: Path, *, contents: bool = True) -> list[Path]:
    """Return the files and folders of the store in `path`, except the lock file."""
    found = [path / name for name in _FILES if os.path.lexists(path / name)]
    for pattern in _FOLDERS:
        for folder in path.glob(pattern):
            found.append(folder)
            if contents and not folder.is_symlink() and folder.is_dir():
                found += folder.iterdir()
    for folder in other_formats.kept(path):
        found += [folder, *(folder.rglob("*") if contents else ())]
    return found


def _owner(path: Path) -> str | None:
    """Return the id of the process that holds the lock; None if the lock is free. The lock is taken
    for a moment, for which an opening store waits."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
    except OSError:
        return None
    else:
        return None
    finally:
        os.close(lock)


def _num_rows(data: Path) -> int | None:
    """Return the number of rows in an index's newest snapshot, from a few pages, or None."""
    try:
        descriptor = os.open(data, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return scan.count_rows(lambda size, start: os.pread(descriptor, size, start))
        finally:
            os.close(descriptor)
    except (OSError, scan.Damage, struct.error, ValueError):
        return None
