# SPDX-License-Identifier: Apache-2.0
"""Locks vLLM's region, a file in shared memory that scheduler and workers map, and removes old
regions.

vLLM removes the region at an orderly stop. Next to the region StrataKV makes an empty lock file,
which every process of the engine locks before the region is made. If no process has this lock, the
engine has ended, and the next engine that starts removes the region and the lock file. The kernel
drops the locks of killed processes; locks also work between containers that share `/dev/shm`."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from ...tiers.processes.process_lock import ProcessLock

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where vLLM makes the region
PREFIX, MARK = "vllm_offload_", "_stratakv"
LOCK = ".lock"


def marked(engine_id: str) -> str:
    """Return the engine id with a mark of StrataSpec, for the name of the region's file."""
    return engine_id + MARK


class Hold:
    """The lock of one process of an engine on its region, held until `release_lock`."""

    def __init__(self, engine_id: str, folder: Path = SHARED_MEMORY) -> None:
        self._place = folder / f"{PREFIX}{marked(engine_id)}{LOCK}"
        while True:
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
            self._lock = ProcessLock(os.open(self._place, flags, 0o600))
            fcntl.flock(self._lock.descriptor, fcntl.LOCK_SH)
            if os.fstat(self._lock.descriptor).st_nlink:
                break
            self._lock.close()  # another engine has just removed the lock file

    def release_lock(self) -> None:
        """Release the lock after an orderly stop, in which vLLM removes the region. The engine's
        last process removes the lock file. Idempotent; no effect in a forked process."""
        self._let_go([])

    def abandon(self) -> None:
        """Release the lock after a stop that was not orderly, such as a refused start. The engine's
        last process removes the region too. Idempotent; no effect in a forked process."""
        self._let_go(_regions(self._place))

    def _let_go(self, others: list[Path]) -> None:
        if not self._lock.is_ours:
            return
        try:
            fcntl.flock(self._lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for place in (*others, self._place):
                place.unlink(missing_ok=True)
        except OSError:  # other processes of the engine have the lock
            pass
        finally:
            self._lock.close()


def left_behind(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Return the files of ended engines, which `sweep` would remove."""
    found: list[Path] = []
    for lock in folder.glob(f"{PREFIX}*{MARK}{LOCK}"):
        try:
            found += _sweep_one(lock, remove=False)
        except OSError as error:
            log.debug("%s is another user's, in use, or just gone: %s", lock, error)
    return found


def unmarked(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Return the regions of engines without StrataSpec, which may run or have ended."""
    return [place for place in folder.glob(f"{PREFIX}*.mmap*") if MARK not in place.name]


def sweep(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the regions of engines that have ended. Return the removed files."""
    removed: list[Path] = []
    for lock in folder.glob(f"{PREFIX}*{MARK}{LOCK}"):
        try:
            removed += _sweep_one(lock)
        except OSError as error:  # another user's, in use, or just gone
            log.debug("%s stays: %s", lock, error)
    if removed:
        log.info("removed %d files of engines that are gone", len(removed))
    return removed


def _sweep_one(lock: Path, *, remove: bool = True) -> list[Path]:
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        places = [*_regions(lock), lock]
        for place in places if remove else ():
            place.unlink(missing_ok=True)
        return places
    finally:
        os.close(descriptor)


def _regions(lock: Path) -> list[Path]:
    """Return the region's files beside a lock: NAME.mmap, and for large regions NAME.mmap.1, …."""
    return list(lock.parent.glob(f"{lock.name.removesuffix(LOCK)}.mmap*"))
