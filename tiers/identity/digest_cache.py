# SPDX-License-Identifier: Apache-2.0
"""Digests of files, kept in the user's cache folder so that a restart does not hash weights again.

    $XDG_CACHE_HOME/stratakv/digests/DEVICE-INODE           (XDG_CACHE_HOME: ~/.cache by default)

An entry holds the digest of a file, and the file's state at the time of hashing:

    offset  bytes
         0      8  magic, "STRKVDG2"
         8     48  file system, device, inode, size, mtime_ns, ctime_ns: six u64, little-endian
        56     32  digest
        88     32  SHA-256 of the 88 bytes before

A program that may write a file can set the file's mtime back, but not its ctime, which the kernel
advances with each change of content. So an entry is valid only if all six numbers still match the
file. No entry is written while ctime is younger than two seconds: a file system may count ctime in
steps of two seconds, so a later change could leave the six numbers unchanged. Digests are kept only
for files on file systems that are known to advance ctime, and not on read-only images, whose times
were set by the maker of the image."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import stat
import struct
from contextlib import suppress
from pathlib import Path

from .file_state import FileState
from .mounts import mount_of

log = logging.getLogger(__name__)

MAGIC = b"STRKVDG2"
YOUNG_NS = 2_000_000_000
MOST_ENTRIES = 4096
_FORM = struct.Struct("<8s6Q32s32s")
_CHECK_BYTES = 32
_U64 = 2**64 - 1
# File systems that advance ctime with each change. Others return the times of a server, a program
# or an image, or (as tmpfs) ignore writes through a mapping.
_WITH_CTIME = re.compile(r"ext[234]|xfs|btrfs|zfs|f2fs|bcachefs|jfs|nfs4?|overlay")
_LAZY = "lazytime"  # with it, times may be older than the content after a power loss


class DigestCache:
    """The digest cache in one folder. No method raises; without a folder no digest is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def of_user(cls) -> DigestCache:
        """Return this user's cache; without a cache folder the cache keeps no digest."""
        parent = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return cls(Path(parent) / "stratakv" / "digests" if os.path.isabs(parent) else None)

    def load_digest(self, state: FileState, file_system: int = 0) -> bytes | None:
        """Return the digest of a file in this state; None without a valid entry of this user.
        `file_system` is the file's `f_fsid`. The caller has checked the file with `trusts`."""
        if self._folder is None:
            return None
        try:
            entry = _read(self._entry(state))
        except OSError:
            return None
        if len(entry) != _FORM.size:
            return None
        magic, *numbers, digest, check = _FORM.unpack(entry)
        if check != hashlib.sha256(entry[:-_CHECK_BYTES]).digest() or magic != MAGIC:
            return None
        return bytes(digest) if tuple(numbers) == _numbers(state, file_system) else None

    def trusts(self, path: Path) -> bool:
        """Whether the file system in which `path` lies advances ctime with each change."""
        if self._folder is None:
            return False
        try:
            mount = mount_of(path)
        except (OSError, ValueError):
            return False
        if mount is None or mount.is_image or _LAZY in mount.options:
            return False
        return bool(_WITH_CTIME.fullmatch(mount.kind))

    def takes(self, state: FileState, now_ns: int) -> bool:
        """Whether the digest of a file that `trusts` accepts may be kept; hashing began at `now_ns`
        (since the epoch). True if each later change will give the file another ctime."""
        return now_ns - state.ctime_ns >= YOUNG_NS

    def add(self, state: FileState, digest: bytes, file_system: int = 0) -> None:
        """Store the digest of a file in this state, for which `takes` is True."""
        if self._folder is None:
            return
        try:
            _make_private(self._folder)
            self._drop_oldest()
            content = _FORM.pack(MAGIC, *_numbers(state, file_system), digest, b"")[:-_CHECK_BYTES]
            _write(self._entry(state), content + hashlib.sha256(content).digest())
        except OSError as error:
            log.debug("the digest of a file is not remembered: %s", error)

    def _entry(self, state: FileState) -> Path:
        assert self._folder is not None
        return self._folder / f"{state.device & _U64:x}-{state.inode & _U64:x}"

    def _drop_oldest(self) -> None:
        assert self._folder is not None
        with os.scandir(self._folder) as found:
            entries = sorted((each.stat(follow_symlinks=False).st_mtime_ns, each) for each in found)
        for _, entry in entries[: max(0, len(entries) - MOST_ENTRIES + 1)]:
            with suppress(OSError):
                os.unlink(entry)


def _numbers(state: FileState, file_system: int) -> tuple[int, ...]:
    return tuple(number & _U64 for number in (file_system, *state))


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True, parents=True)
    _check_private(folder)


def _check_private(folder: Path) -> None:
    """Raise OSError for a folder that another user can write."""
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(0, "others can write the folder", str(folder))


def _read(path: Path) -> bytes:
    """Read an entry. Raises OSError for a file that another user could have written."""
    _check_private(path.parent)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or stat.S_IMODE(status.st_mode) != 0o600
            or status.st_nlink != 1
        ):
            raise PermissionError(0, "others can write it", str(path))
        return os.read(descriptor, _FORM.size + 1)
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes) -> None:
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        made = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(made, "wb") as file:
            file.write(content)
        os.replace(fresh, path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise
