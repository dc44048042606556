# SPDX-License-Identifier: Apache-2.0
"""StoreDirectory: creates and checks a store's directory, and locks it against other processes.

    PATH/lock          held by flock while the store is open; holds the owner's process id
    PATH/identity      the layout, namespace, codec and key of the store
    PATH/blocks        the slot file
    PATH/index/        the LMDB environment
    PATH/index.new/    an index that is about to replace the one in index/
    PATH/index.bad-n/  an index that was damaged, kept for inspection
    PATH/format-n/     a store of another format (`other_formats.py`)

Files get mode 0600 and folders mode 0700, even if they had other modes before. A PATH that existed
before keeps its mode. No symbolic link below PATH is followed."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ...errors import LASTING, TierConfigError, TierDown, lasting_cause
from ...processes.process_lock import ProcessLock
from ...settings.sizes import MIB, rough_size
from ..disk.space import SpacePlan
from ..index.index_file import DATA_FILE as INDEX_DATA

# The wait for a lock that a killed owner's child keeps until its `exec`; the owner forked the child
# for a scan (`guard.py`).
LEFT_BEHIND_SECONDS = 2.0
# The wait for a lock that a listing of stores (`inventory.py`) holds.
GLANCE_SECONDS = 0.1
_RETRY_SECONDS = 0.01

_FOLDERS = ("index", "index.new", "index.bad-*")

# Errors that do not show whether a file is in place.
_SAYS_NOTHING = (errno.EACCES, errno.EPERM, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class StoreDirectory:
    """The directory of a store, locked until `close`. Raises TierConfigError with cause and remedy,
    or TierDown if the path cannot be written to at present. If `create` is false, a directory
    without a store is refused."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path.absolute()
        self.slot_file = self.path / "blocks"
        self.index = self.path / "index"
        self._opened: dict[Path, tuple[int, int]] = {}
        if not create and not os.path.lexists(self.path / "lock"):
            raise TierConfigError(
                f"{self.path} holds no SSD tier (there is no lock file in it); give the directory "
                "of one"
            )
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_foreign_files()
            self._refuse_wrong_kind(self.path / "lock")
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = ProcessLock(os.open(self.path / "lock", flags, 0o600))
        except OSError as error:
            raise self._error(error) from error
        self._take_lock()
        try:
            for each in self._ours():
                self._refuse_wrong_kind(each)
                _make_private(each)
        except TierConfigError:
            self.close()
            raise
        except OSError as error:
            self.close()
            kind = TierConfigError if isinstance(error, PermissionError) else TierDown
            raise kind(
                f"the SSD tier cannot make all of {self.path} private ({error}); use another "
                "path or remove what is there"
            ) from error

    def check_free_space(self, plan: SpacePlan) -> None:
        """Raise an error if the planned files do not fit on the file system. Space of the store's
        existing files counts as free. Raises TierConfigError if even the empty file system is too
        small, else TierDown. If the slot file is complete, only the index must fit, because the
        plan's other files may never exist."""
        stat = os.statvfs(self.path)
        free, largest = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
        if _allocated(self.slot_file) >= plan.slot_file_bytes:
            missing = plan.index_bytes - _allocated(self.index / INDEX_DATA) - free
        else:
            missing = plan.total_bytes - self.used_bytes() - free
        if missing > 0:
            kind = TierConfigError if plan.total_bytes > largest else TierDown
            raise kind(
                f"the SSD tier takes {rough_size(plan.total_bytes)} in {self.path}, where "
                f"{rough_size(free)} are free; lower its size by {-(-missing // MIB)}MiB or more, "
                "or use another path"
            )

    def used_bytes(self) -> int:
        """The bytes that the file system has allocated to all files of the store."""
        return sum(each.lstat().st_blocks * 512 for each in self._ours())

    def note_opened(self) -> None:
        """Record device and inode of the open files, for `is_in_place`. May raise OSError."""
        for each in (self.path / "lock", self.slot_file, self.index / INDEX_DATA):
            status = each.lstat()
            self._opened[each] = (status.st_dev, status.st_ino)

    def is_in_place(self) -> bool:
        """Whether `path` still leads to the open files. False if the files or the directory were
        removed or moved, a disk was unmounted, or another disk mounted. Takes microseconds if the
        disk works."""
        for each, opened in self._opened.items():
            try:
                there = each.lstat()
            except OSError as error:
                if error.errno in _SAYS_NOTHING:
                    continue
                return False
            if (there.st_dev, there.st_ino) != opened:
                return False
        return True

    def close(self) -> None:
        """Release the lock. Idempotent; does nothing in a forked process."""
        self._lock.close()

    def _error(self, error: OSError) -> TierConfigError:
        """Return the error for a directory or a lock file that cannot be made or opened."""
        cure = lasting_cause(error, self.path)
        if cure is None:
            is_away = isinstance(error, FileExistsError)
            why = "a link leads to where nothing is" if is_away else error.strerror
            return TierDown(
                f"the SSD tier cannot write to {self.path} ({why}); use another path or change its "
                "permissions"
            )
        if cure == LASTING[errno.EEXIST]:
            return TierConfigError(
                f"the SSD tier needs a directory and {self.path} is in the way of one; use "
                "another path or remove that file"
            )
        return TierConfigError(f"the SSD tier cannot be in {self.path}: {cure}")

    def _refuse_foreign_files(self) -> None:
        """Raise TierConfigError if a slot file or an index exists without a lock file. A store
        makes its lock file first, so files without a lock file are not a store's."""
        for each in (self.slot_file, self.index):
            if os.path.lexists(each) and not os.path.lexists(self.path / "lock"):
                raise TierConfigError(
                    f"the SSD tier would write over {each}, which it did not make (no lock file "
                    "lies beside it); use another path or remove it"
                )

    def _ours(self) -> Iterator[Path]:
        """Return the existing files and folders of the store, the lock file included."""
        for name in ("lock", "identity", "identity.new", "blocks", *_FOLDERS):
            yield from self.path.glob(name)
        for name in _FOLDERS:
            yield from self.path.glob(f"{name}/*")

    def _refuse_wrong_kind(self, path: Path) -> None:
        """Raise TierConfigError if `path` exists and is a symbolic link, has a second hard link, or
        is not the expected kind of file or folder."""
        if not os.path.lexists(path):
            return
        mode = path.lstat().st_mode
        is_folder = any(path.parent == self.path and path.match(name) for name in _FOLDERS)
        if not (stat.S_ISDIR(mode) if is_folder else stat.S_ISREG(mode)):
            what = "a symbolic link" if stat.S_ISLNK(mode) else "something else"
            raise TierConfigError(
                f"the SSD tier needs {path} to be a {'folder' if is_folder else 'file'} and finds "
                f"{what}; use another path or remove it"
            )
        if not is_folder and path.lstat().st_nlink > 1:
            raise TierConfigError(
                f"the SSD tier would write over {path}, which has another name somewhere (a hard "
                "link), and so perhaps another owner; use another path or remove it"
            )

    def _take_lock(self) -> None:
        began = time.monotonic()
        try:
            while not self._has_lock():
                owner = (
                    os.pread(self._lock.descriptor, 32, 0).decode(errors="replace").strip()
                    or "unknown"
                )
                waited = time.monotonic() - began
                if waited > (LEFT_BEHIND_SECONDS if _is_gone(owner) else GLANCE_SECONDS):
                    self._lock.close()
                    raise TierConfigError(
                        f"the SSD tier in {self.path} is in use by process {owner}; stop that "
                        "process or use another path"
                    )
                time.sleep(_RETRY_SECONDS)
            if not os.fstat(self._lock.descriptor).st_nlink:
                raise OSError(errno.ENOENT, "the store was just removed")
            owner_line = f"{os.getpid()}\n".encode()
            # Written before the truncation, since a full disk may not allocate a freed block again.
            os.pwrite(self._lock.descriptor, owner_line, 0)
            os.ftruncate(self._lock.descriptor, len(owner_line))
        except OSError as error:
            self._lock.close()
            kind = TierConfigError if error.errno in _NO_LOCKS else TierDown
            raise kind(
                f"the SSD tier cannot lock {self.path} ({error.strerror}); use another path, on a "
                "local disk with room"
            ) from error

    def _has_lock(self) -> bool:
        try:
            fcntl.flock(self._lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _is_gone(owner: str) -> bool:
    """Whether no process has the id `owner`. An owner in another container counts as gone too."""
    try:
        os.kill(int(owner), 0)
    except (ValueError, OverflowError, PermissionError):
        return False
    except ProcessLookupError:
        return True
    return False


def _allocated(path: Path) -> int:
    """Return the bytes that the file system has allocated to a file; 0 for a missing file."""
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _make_private(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_IMODE(mode) & 0o077:
            os.fchmod(descriptor, 0o700 if stat.S_ISDIR(mode) else 0o600)
    finally:
        os.close(descriptor)
