# SPDX-License-Identifier: Apache-2.0
"""ReopeningStore: a wrapper of a store that may be down at the start, and whose disk may vanish and
return.

    down ──opened──► in use ──the disk or the folder is gone──► closed ──► down

While the store is down, every look-up is a miss and every block is refused. A thread tries to open
the store, at intervals that grow from 1 to 60 seconds. After the disk was lost, the thread opens
only an existing store, since a new store would be made on another disk while the lost disk is not
mounted.

A file that was open on a lost disk never works again, even when the disk is back, and writes to
removed files are lost. So the thread checks whether the files of a `DiskStore` are still at their
path and, after faults, can be read. If a check fails, the thread closes the store.

A disk that hangs may block a thread of the store for longer than `close` waits. Until the blocked
thread has ended, the store's files stay open and its folder stays locked, so no process can open
the store."""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from .base import NO_CONTEXT, Answer, RequestContext, Stored, StoreTier, TierStats, load_for
from .block import BlockLayout
from .errors import TierClosed, TierConfigError, TierDown, TierError
from .forwarding_store import ForwardingStore
from .tag import Proof, Proofs

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
LOOK_SECONDS = 1.0
# Keys of `TierStats.errors`: the number of failed openings, and of losses of the disk.
DOWN, GONE = "down", "disk gone"
# The most keys that are dropped while the store is down; beyond it, all blocks are dropped.
MOST_DROPPED = 65536
_CLOSE_SECONDS = 2.0  # for a lost disk, whose writes cannot end
_GAUGES = ("capacity_bytes", "used_bytes", "capacity_blocks", "blocks", "pinned_blocks",
           "reserved_blocks")  # fmt: skip

_T = TypeVar("_T")


class ReopeningStore(ForwardingStore):
    """A store that may be down. `opened` is the inner store, if it is open already. `open_it` opens
    the inner store, and raises TierDown while the store cannot be opened. Before the first success,
    any other error ends the attempts; later, a TierConfigError does not end them. Thread-safe. Only
    tests set the parameters `..._seconds`."""

    @classmethod
    def wait_for(
        cls, name: str, layout: BlockLayout, open_it: Callable[[bool], StoreTier], error: TierDown
    ) -> ReopeningStore:
        """Log `error`, why the store is down; return a wrapper that opens the store later."""
        log.warning("serving without the %s tier until it can be opened: %s", name, error)
        return cls(name, layout, open_it)

    def __init__(
        self,
        name: str,
        layout: BlockLayout,
        open_it: Callable[[bool], StoreTier],
        opened: StoreTier | None = None,
        *,
        look_seconds: float = LOOK_SECONDS,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
        longest_pause_seconds: float = LONGEST_PAUSE_SECONDS,
    ) -> None:
        self._empty = EmptyStore(name, layout)
        inner = self._empty if opened is None else opened
        super().__init__(inner.name, layout, inner)
        self._shown_name = name
        self._open_it = open_it
        self._look_seconds = look_seconds
        self._first_pause, self._longest_pause = first_pause_seconds, longest_pause_seconds
        self._pause = first_pause_seconds
        self._next_try = time.monotonic() + first_pause_seconds
        self._was_open = opened is not None
        self._is_over = opened is not None and not isinstance(opened, DiskStore)
        self._times_down = int(opened is None)
        self._past = TierStats()  # counters of inner stores that lost their disk
        self._hanging: list[DiskStore] = []  # stores that lost their disk; for `_thread`
        self._lock = threading.Lock()  # guards the next fields, and `inner`
        self._is_cleared = False  # drop all earlier blocks when the store opens
        self._dropped: set[bytes] = set()  # keys to drop when the store opens
        self._is_closed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"stratakv-reopen-{name}", daemon=True
        )
        self._thread.start()

    @property
    def opened(self) -> StoreTier | None:
        inner = self.inner
        return None if inner is self._empty else inner

    def load(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        context: RequestContext = NO_CONTEXT,
    ) -> Future[list[Proof | None]]:
        return self._retry_after_reopen(lambda: load_for(self.inner, keys, buffers, context))

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        return self._retry_after_reopen(lambda: self.inner.store(keys, buffers, proofs))

    def lease(self, keys: Sequence[bytes], seconds: float) -> Future[list[bool]] | None:
        return self._retry_after_reopen(lambda: self.inner.lease(keys, seconds))

    def drop(self, keys: Sequence[bytes]) -> int:
        """See StoreTier. A store that is down drops blocks when it opens; the result is 0."""
        with self._lock:
            if self.inner is self._empty and not self._is_cleared:
                self._dropped.update(keys)
                if len(self._dropped) > MOST_DROPPED:
                    self._is_cleared, self._dropped = True, set()
            return self.inner.drop(keys)

    def clear(self) -> None:
        """See StoreTier. A store that is down drops all blocks when it opens."""
        with self._lock:
            self._is_cleared |= self.inner is self._empty
            self.inner.clear()

    def wait_forgotten(self, timeout_seconds: float) -> bool:
        """See StoreTier. Return False while the store is down and has blocks to drop."""
        inner = self.inner  # read once, since the thread may replace it
        if inner is not self._empty:
            return inner.wait_forgotten(timeout_seconds)
        return not (self._is_cleared or self._dropped)

    def stats(self) -> TierStats:
        with self._lock:
            stats = self.inner.stats()
            stats.add(self._past)
        if self._times_down:
            stats.errors[DOWN] = self._times_down
        return stats

    def close(self, timeout_seconds: float) -> None:
        """See StoreTier. If the store is still being opened, the thread closes it later."""
        deadline = time.monotonic() + timeout_seconds
        self._closing.set()
        with self._lock:
            self._is_closed = True
            inner = self.inner
        inner.close(timeout_seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()) + 0.1)

    def _retry_after_reopen(self, call: Callable[[], _T]) -> _T:
        """Run `call`, and again if it raised TierClosed because `inner` was replaced."""
        asked = self.inner
        try:
            return call()
        except TierClosed:
            if self._is_closed or asked is self.inner:
                raise
        return call()

    def _run(self) -> None:
        while not self._closing.wait(self._pause_seconds()):
            try:
                self._end_hanging()
                store = self.opened
                if store is None:
                    self._open_when_due()
                elif isinstance(store, DiskStore) and store.has_lost_disk():
                    self._give_up(store)
            except Exception:  # the next attempt may succeed
                log.exception("the %s tier could not be looked after", self._shown_name)
            if self._is_over and not self._hanging:
                return

    def _pause_seconds(self) -> float:
        if self.opened is not None or self._is_over:
            return self._look_seconds
        seconds = max(0.0, self._next_try - time.monotonic())
        return min(seconds, self._look_seconds) if self._hanging else seconds

    def _open_when_due(self) -> None:
        if self._is_over or time.monotonic() < self._next_try:
            return
        self._pause = min(2 * self._pause, self._longest_pause)
        self._next_try = time.monotonic() + self._pause
        try:
            store = self._open_inner()
        except TierDown as error:
            self._times_down += 1
            log.debug("the %s tier is still down: %s", self._shown_name, error)
        except TierError as error:
            self._is_over = True
            log.error("the %s tier stays closed: %s", self._shown_name, error)
        except Exception:
            self._is_over = True
            log.exception("the %s tier stays closed: it could not be opened", self._shown_name)
        else:
            self._is_over = not isinstance(store, DiskStore)  # without a disk the thread may end
            self._take_over(store)

    def _open_inner(self) -> StoreTier:
        if not self._was_open:
            return self._open_it(True)
        try:
            return self._open_it(False)
        except TierDown:
            raise
        except TierConfigError as error:  # an empty mount point, or another disk
            raise TierDown(str(error)) from error

    def _take_over(self, store: StoreTier) -> None:
        with self._lock:
            if not self._is_closed:
                if self._is_cleared:
                    store.clear()
                store.drop(sorted(self._dropped))
                self._is_cleared, self._dropped = False, set()
                self._was_open = True
                self.inner = store
                log.info("the %s tier is open and in use", self._shown_name)
                return
        store.close(0.0)

    def _give_up(self, store: DiskStore) -> None:
        log.error(
            "the disk of the SSD tier in %s is gone; the tier goes on without it, and takes it in "
            "again when it is back", store.path,
        )  # fmt: skip
        if not store.path.is_dir():
            log.error(
                "nothing is at %s; where the directory was removed for good, a restart makes a new "
                "one", store.path,
            )  # fmt: skip
        with self._lock:
            if self._is_closed:
                return
            keys, self._is_cleared = store.not_yet_forgotten()
            self._dropped = set(keys)
            self.inner = self._empty
            self._times_down += 1
            past = store.stats()
            for name in _GAUGES:
                setattr(past, name, 0)
            past.errors[GONE] = past.errors.get(GONE, 0) + 1
            self._past.add(past)
        self._pause = self._first_pause
        self._next_try = time.monotonic() + self._pause
        self._hanging.append(store)
        store.close(_CLOSE_SECONDS)
        self._end_hanging()

    def _end_hanging(self) -> None:
        """Close the stores in `_hanging` again. Remove each store whose files are closed now."""
        for store in self._hanging:
            store.close(0.0)
        self._hanging = [store for store in self._hanging if store.has_open_files]


class DiskStore(StoreTier):
    """A store in files whose disk may vanish while it is open."""

    path: Path

    @abstractmethod
    def has_lost_disk(self) -> bool:
        """Whether this store has lost its disk. May block. Only one thread may call this method."""

    @abstractmethod
    def not_yet_forgotten(self) -> tuple[list[bytes], bool]:
        """Return the dropped keys that may be on disk, and whether all blocks must be dropped."""

    @property
    @abstractmethod
    def has_open_files(self) -> bool:
        """Whether the store's files are open and its folder is locked. False when the store is
        closed and no thread of the store waits for the disk."""


class EmptyStore(StoreTier):
    """The replacement of a store that is down, which has no blocks and refuses every block."""

    is_up = False

    def __init__(self, name: str, layout: BlockLayout) -> None:
        self.name = name
        self.layout = layout

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        return [Answer.MISS] * len(keys)

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        nothing: list[Proof | None] = [None] * len(keys)
        return _done(nothing)

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        return _done([Stored.REFUSED] * len(keys))

    def drop(self, keys: Sequence[bytes]) -> int:
        return 0

    def clear(self) -> None:
        pass

    def stats(self) -> TierStats:
        return TierStats()

    def close(self, timeout_seconds: float) -> None:
        pass


def _done(result: list[_T]) -> Future[list[_T]]:
    future: Future[list[_T]] = Future()
    future.set_result(result)
    return future
