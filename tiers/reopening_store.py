# SPDX-License-Identifier: Apache-2.0
"""A store that was down when it was to be opened: empty until it can be, then what it is.

A thread tries again, at once at first and then ever more rarely. Until then every look-up is a miss
and every block is refused, which costs nobody anything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from .base import (
    NO_CONTEXT,
    Answer,
    ReadSample,
    RequestContext,
    Stored,
    StoreTier,
    TierStats,
    load_for,
    prefetch_lookup_for,
)
from .block import BlockLayout
from .errors import TierDown, TierError
from .tag import Proof, Proofs

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
DOWN = "down"  # the key in `TierStats.errors`: times it could not be opened
# Blocks that are to be forgotten once it opens; with more, everything is.
MOST_DROPPED = 65536

_T = TypeVar("_T")


def open_or_wait(name: str, layout: BlockLayout, open_it: Callable[[], StoreTier]) -> StoreTier:
    """The store; where it is down, one that becomes it. Raises what `open_it` raises beside
    TierDown."""
    try:
        return open_it()
    except TierDown as error:
        log.warning("serving without the %s tier until it can be opened: %s", name, error)
        return StandbyStore(name, layout, open_it)


class StandbyStore(StoreTier):
    """`open_it` raises TierDown while the store cannot be opened, and is called by a thread of
    this one. What else it raises is the end of trying. Thread-safe."""

    def __init__(
        self,
        name: str,
        layout: BlockLayout,
        open_it: Callable[[], StoreTier],
        *,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
        longest_pause_seconds: float = LONGEST_PAUSE_SECONDS,
    ) -> None:
        self.name = name
        self.layout = layout
        self._open_it = open_it
        self._first_pause = first_pause_seconds
        self._longest_pause = longest_pause_seconds
        self._lock = threading.Lock()  # guards what follows
        self._store: StoreTier | None = None
        self._times_down = 1
        self._is_cleared = False  # what it held before is forgotten
        self._dropped: set[bytes] = set()  # so are these
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"stratakv-standby-{name}", daemon=True
        )
        self._thread.start()

    @property
    def opened(self) -> StoreTier | None:
        """The store, once it is open."""
        return self._store

    @property
    def is_up(self) -> bool:
        return self._store is not None and self._store.is_up

    @property
    def learns(self) -> bool:
        return self._store is not None and self._store.learns

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        if self._store is not None:
            self._store.observe(chain, now)

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        store = self._store
        return [Answer.MISS] * len(keys) if store is None else store.lookup(keys)

    def load(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        context: RequestContext = NO_CONTEXT,
    ) -> Future[list[Proof | None]]:
        store = self._store
        if store is None:
            nothing: list[Proof | None] = [None] * len(keys)
            return _done(nothing)
        return load_for(store, keys, buffers, context)

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        """See StoreTier. While it is down blocks are refused, not queued."""
        store = self._store
        if store is None:
            return _done([Stored.REFUSED] * len(keys))
        return store.store(keys, buffers, proofs)

    def touch(self, keys: Sequence[bytes]) -> None:
        if self._store is not None:
            self._store.touch(keys)

    def prefetch_lookup(
        self, keys: Sequence[bytes], context: RequestContext = NO_CONTEXT
    ) -> Future[None] | None:
        store = self._store
        return None if store is None else prefetch_lookup_for(store, keys, context)

    def lease(self, keys: Sequence[bytes], seconds: float) -> Future[list[bool]] | None:
        return None if self._store is None else self._store.lease(keys, seconds)

    def trial_read(self, seconds: float) -> ReadSample | None:
        return None if self._store is None else self._store.trial_read(seconds)

    def drop(self, keys: Sequence[bytes]) -> int:
        """See StoreTier. Includes what it will turn out to hold, of which none is known
        now."""
        with self._lock:
            store = self._store
            if store is None and not self._is_cleared:
                self._dropped.update(keys)
                if len(self._dropped) > MOST_DROPPED:
                    self._is_cleared, self._dropped = True, set()
        return 0 if store is None else store.drop(keys)

    def clear(self) -> None:
        """See StoreTier. Includes what it will turn out to hold."""
        with self._lock:
            self._is_cleared = True
            store = self._store
        if store is not None:
            store.clear()

    def wait_forgotten(self, timeout_seconds: float) -> bool:
        """See StoreTier. While it is down what it was told to forget is still there."""
        store = self._store
        if store is not None:
            return store.wait_forgotten(timeout_seconds)
        return not (self._is_cleared or self._dropped)

    def stats(self) -> TierStats:
        store = self._store
        stats = TierStats() if store is None else store.stats()
        stats.errors[DOWN] = self._times_down
        return stats

    def close(self, timeout_seconds: float) -> None:
        """See StoreTier. An opening under way that takes longer closes what it opened
        by itself."""
        deadline = time.monotonic() + timeout_seconds
        self._closing.set()
        self._thread.join(timeout_seconds)
        with self._lock:
            store = self._store
        if store is not None:
            store.close(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        pause = self._first_pause
        while not self._closing.wait(pause):
            pause = min(2 * pause, self._longest_pause)
            try:
                store = self._open_it()
            except TierDown as error:
                self._times_down += 1
                log.debug("the %s tier is still down: %s", self.name, error)
            except TierError as error:
                log.error("the %s tier stays closed: %s", self.name, error)
                return
            except Exception:
                log.exception("the %s tier stays closed, since it could not be opened", self.name)
                return
            else:
                self._take_over(store)
                return

    def _take_over(self, store: StoreTier) -> None:
        with self._lock:
            if not self._closing.is_set():
                if self._is_cleared:
                    store.clear()
                store.drop(sorted(self._dropped))
                self._dropped = set()
                self._store = store
                log.info("the %s tier is open and in use", self.name)
                return
        store.close(0.0)


def _done(result: list[_T]) -> Future[list[_T]]:
    future: Future[list[_T]] = Future()
    future.set_result(result)
    return future
