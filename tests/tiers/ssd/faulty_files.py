# SPDX-License-Identifier: Apache-2.0
"""Every call below the SSD store that changes the disk or reads it, in the hands of a test.

`watch_calls` replaces the functions of `os`, what asynchronous requests brought, and the commits of
LMDB, for as long as it lasts; the product has no hooks for it. A store moves records by `os` only
where it was opened within `waiting_disk`. The test's function stands around each call: it may count
it, fail instead of it, spoil its result, or end the process before or after it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import lmdb

from stratakv.tiers.block import ALIGNMENT
from stratakv.tiers.reopening_store import ReopeningStore
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.disk import slot_file
from stratakv.tiers.ssd.disk.disk_queue import AioContext, BlockingQueue

# (name, the real call, its arguments) -> what the caller gets
Around = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]

READS = ("preadv",)
WRITES = ("pwritev", "pwrite", "fdatasync", "fsync", "ftruncate", "posix_fallocate")
FOLDERS = ("mkdir", "rename", "replace", "unlink", "rmdir", "open")
COMMIT = "commit"
EVENTS = "events"  # of Linux AIO: what requests brought
OPEN_INDEX = "lmdb.open"


@contextlib.contextmanager
def watch_calls(
    around: Around, names: tuple[str, ...], store: SsdStore | ReopeningStore | None = None
) -> Iterator[None]:
    """Lead the calls of these names through `around`. Commits are those of indexes that are opened
    meanwhile, and those of an open `store`."""
    owners = {name: AioContext if name == EVENTS else os for name in names}
    real = {
        name: getattr(owner, name)
        for name, owner in owners.items()
        if name not in (COMMIT, OPEN_INDEX)
    }
    real_open = lmdb.open

    def lead(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def led(*arguments: Any, **options: Any) -> Any:
            return around(name, lambda *given: call(*given, **options), arguments)

        return led

    def open_index(*arguments: Any, **options: Any) -> Any:
        opener = lead(OPEN_INDEX, real_open) if OPEN_INDEX in names else real_open
        environment = opener(*arguments, **options)
        return _Environment(environment, around) if COMMIT in names else environment

    if isinstance(store, ReopeningStore):
        store = store.opened
    index_file = store._opened.index_file if store and COMMIT in names else None
    environment = index_file._env if index_file else None
    try:
        for name, call in real.items():
            setattr(owners[name], name, lead(name, call))
        lmdb.open = open_index
        if index_file:
            index_file._env = _Environment(environment, around)
        yield
    finally:
        if index_file:
            index_file._env = index_file._env._real
        for name, call in real.items():
            setattr(owners[name], name, call)
        lmdb.open = real_open


@contextlib.contextmanager
def waiting_disk() -> Iterator[None]:
    """Stores that are opened meanwhile wait for each of their requests, as they do where the kernel
    offers nothing else."""
    real = slot_file.open_queue
    slot_file.open_queue = lambda direct, buffered, _: BlockingQueue(direct, buffered)
    try:
        yield
    finally:
        slot_file.open_queue = real


class EveryNth:
    """Fails every Nth call in one way: an errno, "short" or "corrupt" for reads, "full" or "bad"
    for commits. Thread-safe; `faults` counts what it did."""

    def __init__(self, every: int, ways: dict[str, Callable[..., Any]]) -> None:
        self.every = every
        self.active = True
        self.faults = 0
        self._ways = ways  # name of a call -> (real call, arguments) -> result
        self._calls = 0
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._ways)

    def __call__(self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            self._calls += 1
            strikes = self.active and self._calls % self.every == 0
            self.faults += strikes
        return self._ways[name](call, arguments) if strikes else call(*arguments)


def failing(error: Exception) -> Callable[..., Any]:
    """The call does not take place."""

    def fail(_call: Callable[..., Any], _arguments: tuple[Any, ...]) -> Any:
        raise error

    return fail


def short_read(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Half of what was asked for."""
    descriptor, vector, offset = arguments
    left = sum(len(each) for each in vector) // 2 // ALIGNMENT * ALIGNMENT
    taken: list[memoryview] = []
    for each in vector:
        taken.append(each[:left])
        left -= len(taken[-1])
    return call(descriptor, [each for each in taken if len(each)], offset)


def short_write(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Half of what was to be written."""
    return short_read(call, arguments)


def corrupt_read(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """All of it, with one bit turned."""
    done = call(*arguments)
    target = arguments[1][done % len(arguments[1])]
    if len(target):
        target[len(target) // 3] ^= 1
    return done


def events_that_say(judge: Callable[[int], int]) -> Callable[..., Any]:
    """The requests take place, and their results are changed."""

    def change(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return [(number, judge(result)) for number, result in call(*arguments)]

    return change


class _Environment:
    """An LMDB environment whose write transactions are led through `around` when they commit."""

    def __init__(self, real: Any, around: Around) -> None:
        self._real = real
        self._around = around
        self._refuses = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def begin(self, *arguments: Any, **options: Any) -> Any:
        if not options.get("write"):
            return self._real.begin(*arguments, **options)
        if self._refuses:
            raise lmdb.PanicError("as after the first")
        return _Transaction(self._real.begin(*arguments, **options), self._commit)

    def _commit(self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """A panic lasts until the environment is opened anew, as it does in LMDB."""
        try:
            return self._around(name, call, arguments)
        except lmdb.PanicError:
            self._refuses = True
            raise

    def __enter__(self) -> _Environment:
        return self

    def __exit__(self, *_error: object) -> None:
        self._real.close()


class _Transaction:
    def __init__(self, real: Any, around: Around) -> None:
        self._real = real
        self._around = around

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __enter__(self) -> _Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._real.abort()
        else:
            self.commit()

    def commit(self) -> None:
        try:
            self._around(COMMIT, self._real.commit, ())
        except BaseException:
            self._real.abort()
            raise
