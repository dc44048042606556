# SPDX-License-Identifier: Apache-2.0
"""Digests of whole files.

    digest = SHA-256( "stratakv.file" | size u64 | SHA-256 of each 8 MiB, in order )

Several threads hash the pieces, so that with enough processors hashing takes no longer than
reading. A file whose digest is in the cache is not read again (digest_cache.py)."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..settings.sizes import rough_size
from ..settings.values import ConfigError
from .digest_cache import DigestCache
from .file_state import FileState

PIECE_BYTES = 8 * 1024**2
MOST_THREADS = 16
QUIET_SECONDS = 2.0  # of hashing, before and between lines of progress
_READ_BYTES = 1024**2  # stays in a processor's cache between the copy and the hash
_NAME = b"stratakv.file"
_SIZE = struct.Struct("<Q")

Progress = Callable[[str], None]


class FileDigest(NamedTuple):
    """A file, its state when it was hashed, and its digest."""

    path: Path
    state: FileState
    digest: bytes  # 32

    def check_unchanged(self) -> None:
        """Raise ConfigError if the file was changed or replaced since it was hashed."""
        try:
            state = FileState.from_stat(os.stat(self.path))
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if state != self.state:
            raise _changed(self.path)


def are_unchanged(files: Iterable[FileDigest]) -> bool:
    """Whether all files are unchanged since they were hashed."""
    try:
        for file in files:
            file.check_unchanged()
    except ConfigError:
        return False
    return True


def digest_files(
    paths: Sequence[Path], cache: DigestCache | None = None, progress: Progress | None = None
) -> list[FileDigest]:
    """Return the digest of each file, in the order of the paths. `cache` defaults to the cache of
    this user. `progress` is called with a line every two seconds. Raises ConfigError for a file
    that cannot be read to its end, or that changes while it is read."""
    cache = DigestCache.of_user() if cache is None else cache
    told = _Told(progress)
    found: dict[Path, FileDigest] = {}
    unknown: list[tuple[Path, bool]] = []
    trusted: dict[int, bool] = {}  # by device, so that the table of mounts is read once per device
    for path in paths:
        with _opened(path) as (descriptor, state):
            digest = None
            if state.device not in trusted:
                trusted[state.device] = cache.trusts(path)
            if trusted[state.device]:
                digest = cache.load_digest(state, os.fstatvfs(descriptor).f_fsid)
        if digest is None:
            unknown.append((path, trusted[state.device]))
            told.total_bytes += state.size
        else:
            found[path] = FileDigest(path, state, digest)
    with ThreadPoolExecutor(_threads(), thread_name_prefix="stratakv-digest") as pool:
        for path, is_trusted in unknown:
            found[path] = _digest_file(path, pool, cache, told, is_trusted=is_trusted)
    return [found[path] for path in paths]


class _Told:
    """The progress of hashing: bytes done of all, reported every `QUIET_SECONDS`."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._said_at = time.monotonic()
        self.total_bytes = 0
        self._done_bytes = 0

    def add(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        now = time.monotonic()
        if self._progress is not None and now - self._said_at >= QUIET_SECONDS:
            self._said_at = now
            done, total = rough_size(self._done_bytes), rough_size(self.total_bytes)
            self._progress(f"hashing the weights, for the keys of blocks: {done} of {total}")


def _threads() -> int:
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def _digest_file(
    path: Path, pool: ThreadPoolExecutor, cache: DigestCache, told: _Told, *, is_trusted: bool
) -> FileDigest:
    began_ns = time.time_ns()
    with _opened(path) as (descriptor, found):
        is_written, state = _write_back(descriptor)
        may_remember = is_trusted and is_written and state == found
        may_remember = may_remember and cache.takes(state, began_ns)
        file_system = os.fstatvfs(descriptor).f_fsid
        hasher = hashlib.sha256(_NAME + _SIZE.pack(state.size))
        starts = range(0, state.size, PIECE_BYTES)
        for length, digest in _in_order(pool, descriptor, starts, state.size):
            hasher.update(digest)
            told.add(length)
        if FileState.from_stat(os.fstat(descriptor)) != state:
            raise _changed(path)
    digest = hasher.digest()
    if may_remember:
        cache.add(state, digest, file_system)
    return FileDigest(path, state, digest)


def _write_back(descriptor: int) -> tuple[bool, FileState]:
    """Write back the file's dirty pages: only the first write to a mapped page after its write-back
    advances ctime. Return whether this succeeded, and the file's state afterwards."""
    is_written = True
    try:
        os.fsync(descriptor)
    except OSError:
        is_written = False
    return is_written, FileState.from_stat(os.fstat(descriptor))


def _in_order(
    pool: ThreadPoolExecutor, descriptor: int, starts: Iterable[int], size: int
) -> Iterator[tuple[int, bytes]]:
    """Yield length and digest of each piece. When the iteration ends, all reads have ended."""
    pieces: list[Future[tuple[int, bytes]]] = []
    try:
        pieces += [
            pool.submit(_digest_piece, descriptor, start, min(start + PIECE_BYTES, size))
            for start in starts
        ]
        for piece in pieces:
            yield piece.result()
    finally:
        for piece in pieces:
            piece.cancel()
        for piece in pieces:
            if not piece.cancelled():
                piece.exception()


def _digest_piece(descriptor: int, start: int, end: int) -> tuple[int, bytes]:
    hasher, place = hashlib.sha256(), start
    buffer = memoryview(bytearray(min(_READ_BYTES, end - start)))
    while place < end:
        length = os.preadv(descriptor, [buffer[: end - place]], place)
        if not length:
            raise OSError(0, "it became shorter while it was read")
        hasher.update(buffer[:length])
        place += length
    return end - start, hasher.digest()


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, FileState]]:
    """Yield a descriptor and the file's state. Raises ConfigError in place of OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, "it is no ordinary file")
            yield descriptor, FileState.from_stat(status)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read ({error.strerror}), and the keys of blocks depend on it; change "
        "its mode, or copy it from the model again"
    )


def _changed(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} was changed while it was read; start again when nothing writes to it"
    )
