# SPDX-License-Identifier: Apache-2.0
"""A store whose disk may go and come back while it is open: pulled out, unmounted, offline; or one
whose folder is removed or moved.

    in use ──the disk is gone, or the folder──► closed, waited for ──it can be opened──► in use

What has an open file on a disk that went keeps a file that will never work again, also when the
disk is back at its place; and what is written to files that were removed is lost. So a
thread looks whether the files are still at their path, and once faults have been met whether they
can be read; where not it has the store closed, and opened anew when it can be. Meanwhile it is
empty and takes nothing. Only a store that lies there is opened again, never a new one made: the
folder where a disk was mounted is on another disk once it is not.

A disk that hangs may keep a thread of the store for longer than anybody waits, and the store keeps
its files and its lock so long. They are closed as soon as the thread is back: until then the store
could not be opened again, by us least of all.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from ..base import Answer, ReadSample, Stored, StoreTier, TierStats
from ..errors import TierClosed, TierConfigError, TierDown
from ..reopening_store import FIRST_PAUSE_SECONDS, StandbyStore
from ..tag import Proof, Proofs
from .store import SsdStore

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
GONE = "disk gone"  # the key in `TierStats.errors`: times that the disk was not there any more
_CLOSE_SECONDS = 2.0  # for a store whose disk is gone: nothing of it can be written
_GAUGES = ("capacity_bytes", "used_bytes", "capacity_blocks", "blocks", "pinned_blocks",
           "reserved_blocks")  # fmt: skip
_ANSWER = TypeVar("_ANSWER")


class WatchedStore(StoreTier):
    """A `StoreTier` over an `SsdStore`. `open_it(create)` opens it, with `create` false only where
    there is one. Raises what that raises. The seconds are for tests."""

    name = "ssd"

    def __init__(
        self,
        open_it: Callable[[bool], SsdStore],
        place: str,
        *,
        look_seconds: float = LOOK_SECONDS,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
    ) -> None:
        store = open_it(True)
        self.layout = store.layout
        self._open_it = open_it
        self._place = place
        self._look_seconds = look_seconds
        self._first_pause_seconds = first_pause_seconds
        self._lock = threading.Lock()  # guards what follows
        self._inner: SsdStore | StandbyStore = store
        self._past = TierStats()  # counters of stores whose disk went
        self._hanging: list[SsdStore] = []  # the watching thread's own
        self._is_closed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stratakv-ssd-watch", daemon=True)
        self._thread.start()

    @property
    def opened(self) -> SsdStore | None:
        """The store that is open at present."""
        inner = self._inner
        found = inner.opened if isinstance(inner, StandbyStore) else inner
        return found if isinstance(found, SsdStore) else None

    @property
    def is_up(self) -> bool:
        return self._inner.is_up

    @property
    def learns(self) -> bool:
        return self._inner.learns

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        self._inner.observe(chain, now)

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        return self._inner.lookup(keys)

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        return self._ask(lambda store: store.load(keys, buffers))

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        return self._ask(lambda store: store.store(keys, buffers, proofs))

    def touch(self, keys: Sequence[bytes]) -> None:
        self._inner.touch(keys)

    def lease(self, keys: Sequence[bytes], seconds: float) -> Future[list[bool]] | None:
        return self._ask(lambda store: store.lease(keys, seconds))

    def trial_read(self, seconds: float) -> ReadSample | None:
        return self._inner.trial_read(seconds)

    def drop(self, keys: Sequence[bytes]) -> int:
        with self._lock:  # so that it is told to the store that comes after, or by that one
            return self._inner.drop(keys)

    def clear(self) -> None:
        with self._lock:
            self._inner.clear()

    def wait_forgotten(self, timeout_seconds: float) -> bool:
        return self._inner.wait_forgotten(timeout_seconds)

    def stats(self) -> TierStats:
        with self._lock:
            stats = self._inner.stats()
            stats.add(self._past)
            return stats

    def close(self, timeout_seconds: float) -> None:
        """See StoreTier."""
        deadline = time.monotonic() + timeout_seconds
        self._closing.set()
        with self._lock:
            self._is_closed = True
            inner = self._inner
        inner.close(timeout_seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()) + 0.1)

    def _ask(self, call: Callable[[StoreTier], _ANSWER]) -> _ANSWER:
        """Ask the store, and the one that has just taken its place where it was closed for that."""
        asked = self._inner
        try:
            return call(asked)
        except TierClosed:
            if self._is_closed or asked is self._inner:
                raise
        return call(self._inner)

    def _run(self) -> None:
        while not self._closing.wait(self._look_seconds):
            store = self.opened
            try:
                self._end_hanging()
                if store is not None and store.has_lost_disk():
                    self._give_up(store)
            except Exception:  # the next look may do better
                log.exception("the disk of the SSD tier in %s could not be looked at", self._place)

    def _give_up(self, store: SsdStore) -> None:
        log.error(
            "the disk of the SSD tier in %s is gone; the tier goes on without it, and takes it in "
            "again when it is back", self._place,
        )  # fmt: skip
        if not os.path.isdir(self._place):
            log.error(
                "nothing is at %s; where the directory was removed for good, a restart makes a new "
                "one", self._place,
            )  # fmt: skip
        with self._lock:
            if self._is_closed:
                return
            standby = StandbyStore(
                f"ssd in {self._place}",
                self.layout,
                self._open_again,
                first_pause_seconds=self._first_pause_seconds,
            )
            keys, all_of_them = store.not_yet_forgotten()
            standby.drop(keys)
            if all_of_them:
                standby.clear()
            old, self._inner = self._inner, standby
            past = store.stats()
            for name in _GAUGES:
                setattr(past, name, 0)
            past.errors[GONE] = past.errors.get(GONE, 0) + 1
            self._past.add(past)
        old.close(_CLOSE_SECONDS)
        self._hanging.append(store)
        self._end_hanging()

    def _end_hanging(self) -> None:
        """Close those stores of which no thread is with the disk any more."""
        for store in self._hanging:
            store.close(0.0)
        self._hanging = [store for store in self._hanging if store.has_open_files]

    def _open_again(self) -> StoreTier:
        try:
            return self._open_it(False)
        except TierDown:
            raise
        except TierConfigError as error:  # an empty mount point, or another disk: until it is back
            raise TierDown(str(error)) from error
