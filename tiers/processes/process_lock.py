# SPDX-License-Identifier: Apache-2.0
"""ProcessLock: a lock of one process on a file.

A flock lock belongs to the open file, and a fork copies the descriptor. A child would hold the lock
as long as it lives, even after its parent has closed the file or was killed, and could release or
change the parent's lock. So a forked child closes its copy of the descriptor at once."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from weakref import WeakSet

_LOCKS: WeakSet[ProcessLock] = WeakSet()


class ProcessLock:
    """Owns `descriptor`, on which the caller calls flock, until `close`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._owner = os.getpid()
        _LOCKS.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether the lock is open and this process opened it."""
        return self.descriptor >= 0 and self._owner == os.getpid()

    def close(self) -> None:
        """Release the lock, even if a process that is just being started has a copy of the
        descriptor, and close the descriptor. A forked child only closes its copy. Idempotent."""
        descriptor, is_ours = self.descriptor, self.is_ours
        self.descriptor = -1
        if descriptor >= 0:
            if is_ours:
                with suppress(OSError):  # the kernel drops the lock of a removed file system
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _close_copies() -> None:
    """Close the copies of all locks; called in a forked child."""
    for lock in list(_LOCKS):
        descriptor, lock.descriptor = lock.descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


os.register_at_fork(after_in_child=_close_copies)
