# SPDX-License-Identifier: Apache-2.0
"""What stores lie under a folder, and how to remove one: without opening it.

A store is what has a lock file and something else of a store beside it; whatever else is wrong with
it, it is listed, and can be removed. Reads a few pages of each, changes nothing but in `remove`,
and follows no symbolic link below the folders that it is given.
"""

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

_MOST_DEPTH = 3  # of a store below the folder that is searched
_FILES = (IDENTITY, f"{IDENTITY}.new", "blocks")
_FOLDERS = ("index", "index.new", "index.bad-*")


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One store as it lies on the disk. What nobody can tell is None."""

    path: Path
    layout_text: str | None  # what it was made for
    allocated_bytes: int  # what the file system has given to it
    blocks: int | None  # of the last commit
    used_bytes: int | None  # what these blocks hold; the rest is reserved for others
    last_used: float  # seconds since 1970, of the last change to one of its files
    owner: str | None  # the process id of who has it open, as far as it is known


def find_stores(folder: Path) -> list[StoreEntry]:
    """The stores in `folder` and below it, by path. What cannot be read is left out."""
    found = []
    for path in sorted(_search(folder, _MOST_DEPTH)):
        with contextlib.suppress(OSError):
            found.append(look_at(path))
    return found


def is_store(path: Path) -> bool:
    """Whether there is a store in this very folder."""
    try:
        if not stat.S_ISREG((path / "lock").lstat().st_mode):
            return False
    except OSError:
        return False
    return any(os.path.lexists(path / name) for name in (*_FILES, "index"))


def look_at(path: Path) -> StoreEntry:
    """The store in `path`. May raise OSError."""
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
    """Remove the store in `path`, and `path` itself where nothing else lies there; the bytes that
    it had. Raises TierConfigError where there is none or it is in use, and may raise OSError."""
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
        (path / "lock").unlink()  # last: who was killed in between can be followed up
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
    """Everything there is under a store's names but the lock."""
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
    """Who holds the lock. Looking takes it for a moment, which a store that is opened waits for."""
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
    """The number of rows that the newest root of an index names, by two pages of it."""
    try:
        descriptor = os.open(data, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return scan.count_rows(lambda size, start: os.pread(descriptor, size, start))
        finally:
            os.close(descriptor)
    except (OSError, scan.Damage, struct.error, ValueError):
        return None
