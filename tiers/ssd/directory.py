# SPDX-License-Identifier: Apache-2.0
"""The directory of a store: made, checked, and locked against a second process.

    PATH/lock          held by flock while the store is open; holds the owner's process id
    PATH/blocks        the slot file
    PATH/index/        the LMDB environment
    PATH/index.bad-n/  an index that was damaged, kept for inspection

Knows nothing of what is in these files.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ..errors import TierConfigError
from .space import SpacePlan


class StoreDirectory:
    """Holds the lock until `close`. Raises TierConfigError with cause and cure."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.slot_file = self.path / "blocks"
        self.index = self.path / "index"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_foreign_files()
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(self.path / "lock", flags, 0o600)
        except (FileExistsError, NotADirectoryError):
            raise TierConfigError(
                f"the SSD tier needs a directory and {self.path} is in the way of one; use "
                "another path or remove that file"
            ) from None
        except OSError as error:
            raise TierConfigError(
                f"the SSD tier cannot write to {self.path} ({error.strerror}); use another path "
                "or change its permissions"
            ) from error
        self._take_lock()

    def check_free_space(self, plan: SpacePlan) -> None:
        """Refuse a plan that the file system has no room for, counting what is already ours."""
        stat = os.statvfs(self.path)
        free = stat.f_bavail * stat.f_frsize
        files = [self.slot_file, *self.path.glob(f"{self.index.name}*/*")]
        ours = sum(each.stat().st_blocks * 512 for each in files if each.exists())
        missing = plan.total_bytes - ours - free
        if missing > 0:
            raise TierConfigError(
                f"the SSD tier takes {plan.total_bytes} bytes in {self.path}, where {free} bytes "
                f"are free; lower its size by {missing} bytes or more, or use another path"
            )

    def close(self) -> None:
        """Let another process in."""
        os.close(self._lock)

    def _refuse_foreign_files(self) -> None:
        """Files under our names that we did not make, since the lock file is always made first."""
        for each in (self.slot_file, self.index):
            if os.path.lexists(each) and not os.path.lexists(self.path / "lock"):
                raise TierConfigError(
                    f"the SSD tier would write over {each}, which it did not make (no lock file "
                    "lies beside it); use another path or remove it"
                )

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise TierConfigError(
                f"the SSD tier in {self.path} is in use by process {owner}; stop that process or "
                "use another path"
            ) from None
        except OSError as error:
            os.close(self._lock)
            raise TierConfigError(
                f"the SSD tier cannot lock {self.path} ({error.strerror}); use another path, on a "
                "local disk with room"
            ) from error
