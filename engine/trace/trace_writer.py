# SPDX-License-Identifier: Apache-2.0
"""Writes a step trace from a bounded queue on its own thread.

The thread that runs the engine's steps only appends to the queue. If the disk is slower than the
engine, records are dropped and counted. If the disk fails, the trace ends and one error is logged.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import aiofiles
import msgspec

from ...tiers.settings.values import ConfigError
from .records import DroppedRecord, EncodedDecision, Record

logger = logging.getLogger(__name__)

MOST_QUEUED = 16_384  # records of some thousand steps
MOST_AT_ONCE = 1_024  # records in one write
# The pause between two writes while records are queued. Larger batches disturb the steps less.
PAUSE_SECONDS = 0.25
CLOSE_SECONDS = 5.0
_LOOK_SECONDS = 0.05

MakeRecord = Callable[[], Record | EncodedDecision]


class TraceWriter:
    """Appends records to the file at `path`, which only its owner may read. Raises ConfigError if
    the file cannot be opened."""

    def __init__(self, path: Path, *, most_queued: int = MOST_QUEUED) -> None:
        try:
            self._descriptor = _open(path)
        except OSError as error:
            raise ConfigError(
                f"--step-trace {path} cannot be written: {error.strerror}; name a file in a "
                "directory that exists and can be written to"
            ) from error
        self._path = path
        self._most_queued = most_queued
        self._queue: deque[Record | MakeRecord] = deque()
        self._num_dropped = 0  # records lost since the last queued one
        self._has_failed = False
        self._closing = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._nudge: asyncio.Event | None = None
        self._sleeps = False  # whether the thread waits for `_wake`, without a timeout
        self._thread = threading.Thread(target=self._run, name="step-trace", daemon=True)
        self._thread.start()

    def put(self, record: Record | MakeRecord) -> None:
        """Queue a record, or a function that makes a record on the writer's thread. Never waits.
        Only one thread may call this method."""
        if self._has_failed:
            return
        if len(self._queue) >= self._most_queued:
            self._num_dropped += 1
            return
        if self._num_dropped:
            self._queue.append(DroppedRecord(self._num_dropped))
            self._num_dropped = 0
        self._queue.append(record)
        if self._sleeps:
            self._sleeps = False  # one wake-up is enough, even if the thread is slow to run
            self._wake()

    def wait_until_written(self, timeout_seconds: float) -> bool:
        """Wait until all queued records are in the file. Return False if writing has failed or the
        timeout has passed. Only the thread that calls `put` may call this method."""
        deadline = time.monotonic() + timeout_seconds
        while self._queue or not self._sleeps:
            if self._has_failed or time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Write the queued records, and end the thread. Records not written within the timeout are
        lost, and their number is logged. Idempotent."""
        if self._closing.is_set():
            return
        if self._num_dropped and not self._has_failed:
            self._queue.append(DroppedRecord(self._num_dropped))
        self._closing.set()
        self._wake()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            logger.warning(
                "the step trace lost about %d records: %s took longer than %.1f s to write",
                len(self._queue), self._path, timeout_seconds,
            )  # fmt: skip

    def _wake(self) -> None:
        loop, nudge = self._loop, self._nudge
        if loop is not None and nudge is not None:
            try:
                loop.call_soon_threadsafe(nudge.set)
            except RuntimeError:
                pass  # the loop has ended, so no thread waits

    def _run(self) -> None:
        try:
            asyncio.run(self._write_all())
        except Exception as error:  # noqa: BLE001 - a failed trace must not end the engine
            self._has_failed = True
            self._queue.clear()
            logger.error("the step trace %s ends here: %s", self._path, error)

    async def _write_all(self) -> None:
        self._loop, self._nudge = asyncio.get_running_loop(), asyncio.Event()
        encoder = msgspec.json.Encoder()
        queue = self._queue
        async with aiofiles.open(self._descriptor, "ab", buffering=0) as file:
            while True:
                is_closing = self._closing.is_set()
                while queue:
                    count = min(len(queue), MOST_AT_ONCE)
                    batch = [queue.popleft() for _ in range(count)]
                    lines = encoder.encode_lines(
                        [each() if callable(each) else each for each in batch]
                    )
                    await _write_whole(file, lines)
                if is_closing:
                    return
                await self._rest()

    async def _rest(self) -> None:
        """Pause before the next write. Without queued records, wait for a record or `close`."""
        assert self._nudge is not None
        await asyncio.sleep(0 if self._closing.is_set() else PAUSE_SECONDS)
        self._nudge.clear()
        self._sleeps = True
        if not self._queue and not self._closing.is_set():
            await self._nudge.wait()
        self._sleeps = False


def _open(path: Path) -> int:
    """Open a file for appending, and return its descriptor. A symbolic link is refused, and opening
    a pipe does not block. Only the user may read the file, because a trace has data of all
    requests. May raise OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a link, and none is followed") from error
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, "it is no ordinary file") from error
        raise
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            if status.st_nlink > 1:
                raise OSError(errno.EMLINK, "it has another name somewhere (a hard link)")
            if status.st_uid == os.geteuid() and status.st_mode & 0o077:
                os.fchmod(descriptor, 0o600)
        elif not stat.S_ISCHR(status.st_mode):  # not a character device such as /dev/null
            raise OSError(errno.EINVAL, "it is no ordinary file")
        os.set_blocking(descriptor, True)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


async def _write_whole(file: aiofiles.threadpool.binary.AsyncFileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = await file.write(view)
        view = view[written:]
