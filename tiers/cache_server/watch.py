# SPDX-License-Identifier: Apache-2.0
"""Events for the Watch call: the blocks that are stored in and removed from a tenant store.

    store ──stored, removed, cleared──► every watcher's queue ──► its stream
    once a second, while there are watchers: look up some of the blocks reported as stored,
    because the store does not report evictions

A watcher that reads too slowly loses events, and is sent the number of lost events. Other watchers
lose no events."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import TierClosed
from ..wire.frames import MAX_KEYS, State
from ..wire.limits import Limits
from ..wire.status import TooMuch
from .access.shares import Shares
from .served_store import ServedStore

LOOK_AGAIN_SECONDS = 1.0
_SLICE_KEYS = 8192  # how many keys one look-up has


@dataclass(slots=True)
class Happening:
    """An event for watchers. `lost` counts the events that were lost just before this event."""

    stored: Sequence[bytes] = ()
    removed: Sequence[bytes] = ()
    cleared: bool = False
    lost: int = 0

    @property
    def num_keys(self) -> int:
        """The number of keys in the event, at least 1. Counts against a queue's `max_keys`."""
        return len(self.stored) + len(self.removed) or 1


class Watcher:
    """The event queue of one watcher. Any thread adds events; one event loop reads them."""

    def __init__(self, max_keys: int, loop: asyncio.AbstractEventLoop, tenant: str = "") -> None:
        self.tenant = tenant
        self._max_keys = max_keys
        self._loop = loop
        self._lock = threading.Lock()
        self._queue: deque[Happening] = deque()
        self._num_keys = 0
        self._lost = 0
        self._ended = False
        self._woken = asyncio.Event()

    def tell(self, happening: Happening) -> None:
        """Queue an event, or count it as lost if the queue is full."""
        with self._lock:
            if self._num_keys + happening.num_keys > self._max_keys:
                self._lost += 1
                return
            self._queue.append(Happening(happening.stored, happening.removed, happening.cleared))
            self._queue[-1].lost, self._lost = self._lost, 0
            self._num_keys += happening.num_keys
            is_first = len(self._queue) == 1
        if is_first:
            self._wake()

    def end_events(self) -> None:
        self._ended = True
        self._wake()

    async def next_event(self) -> Happening | None:
        """Wait for the next event and return it, or None after the last event."""
        while True:
            with self._lock:
                if self._queue:
                    happening = self._queue.popleft()
                    self._num_keys -= happening.num_keys
                    return happening
                if self._ended:
                    return None
                self._woken.clear()
            await self._woken.wait()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._woken.set)
        except RuntimeError:
            pass  # the event loop and the stream have been closed


@dataclass(slots=True, eq=False)
class TenantStoreWatch:
    """The `Listener` of one tenant store, which passes events on to watchers. `told` has the keys
    of the blocks that were reported as stored."""

    tenant_store: ServedStore
    max_told: int
    watchers: list[Watcher] = field(default_factory=list)
    told: dict[bytes, None] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stored(self, keys: Sequence[bytes]) -> None:
        """See Listener. The tenant store calls this."""
        with self.lock:
            for key in keys:
                self.told.pop(key, None)
                self.told[key] = None
            while len(self.told) > self.max_told:
                del self.told[next(iter(self.told))]
        self._notify_watchers(stored=keys)

    def removed(self, keys: Sequence[bytes]) -> None:
        with self.lock:
            for key in keys:
                self.told.pop(key, None)
        self._notify_watchers(removed=keys)

    def cleared(self) -> None:
        with self.lock:
            self.told.clear()
        for watcher in self.watchers:
            watcher.tell(Happening(cleared=True))

    def look_again(self) -> None:
        """Look up some of the blocks reported as stored, and report the missing ones as removed."""
        with self.lock:
            some = [key for key, _ in zip(self.told, range(_SLICE_KEYS), strict=False)]
        if not some:
            return
        states = self.tenant_store.lookup(some)
        gone = [key for key, state in zip(some, states, strict=True) if state is State.MISS]
        here = [key for key, state in zip(some, states, strict=True) if state is not State.MISS]
        with self.lock:
            for key in here:  # moves `key` to the end, to be looked up last
                if key in self.told:
                    del self.told[key]
                    self.told[key] = None
        if gone:
            self.removed(gone)

    def _notify_watchers(self, stored: Sequence[bytes] = (), removed: Sequence[bytes] = ()) -> None:
        for watcher in self.watchers:
            for part in _parts(stored):
                watcher.tell(Happening(stored=part))
            for part in _parts(removed):
                watcher.tell(Happening(removed=part))


class Watches:
    """A server's watchers; `Shares` limits those of each tenant. Used on one event loop only."""

    def __init__(
        self,
        limits: Limits,
        num_tenants: int = 1,
        look_again_seconds: float = LOOK_AGAIN_SECONDS,
    ) -> None:
        self._limits = limits
        self._shares = Shares(limits.max_watchers, num_tenants)
        self._look_again_seconds = look_again_seconds
        self._tenant_stores: dict[int, TenantStoreWatch] = {}
        self._looking: asyncio.Task[None] | None = None
        self._ended = False

    def __len__(self) -> int:
        return sum(len(watch.watchers) for watch in self._tenant_stores.values())

    def begin_watch(self, tenant_store: ServedStore, tenant: str) -> Watcher:
        """Add a watcher to a tenant store. Raises TooMuch if the tenant may have no more."""
        if not self._shares.take_place(tenant):
            most = self._shares.places_of(tenant)
            raise TooMuch(f"{most} watchers are here already, and {tenant} may have no more")
        watch = self._tenant_stores.get(id(tenant_store))
        watcher = Watcher(self._limits.max_queued_keys, asyncio.get_running_loop(), tenant)
        if watch is None:
            watch = self._tenant_stores[id(tenant_store)] = TenantStoreWatch(
                tenant_store, self._limits.max_watched_keys
            )
            tenant_store.subscribe(watch)
        watch.watchers = [*watch.watchers, watcher]
        if self._ended:
            watcher.end_events()
        elif self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        return watcher

    def end_watch(self, tenant_store: ServedStore, tenant: str, watcher: Watcher) -> None:
        """Remove a watcher whose stream has ended."""
        self._shares.give_back_place(tenant)
        watch = self._tenant_stores[id(tenant_store)]
        watch.watchers = [other for other in watch.watchers if other is not watcher]
        if not watch.watchers:
            tenant_store.unsubscribe(watch)
            del self._tenant_stores[id(tenant_store)]
        if not self._tenant_stores and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def set_tenants(self, num_tenants: int) -> None:
        self._shares.set_tenants(num_tenants)

    def end_of(self, tenants: Collection[str]) -> None:
        """End the streams of `tenants` after the queued events. Tenants may begin new streams."""
        for watch in self._tenant_stores.values():
            for watcher in watch.watchers:
                if watcher.tenant in tenants:
                    watcher.end_events()

    def end_all(self) -> None:
        """End every stream after its queued events. Later streams end at once."""
        self._ended = True
        for watch in self._tenant_stores.values():
            for watcher in watch.watchers:
                watcher.end_events()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._look_again_seconds)
            for watch in list(self._tenant_stores.values()):
                try:
                    await asyncio.to_thread(watch.look_again)
                except TierClosed:
                    pass  # the watchers are about to be ended


def _parts(keys: Sequence[bytes]) -> Iterable[Sequence[bytes]]:
    return (keys[start : start + MAX_KEYS] for start in range(0, len(keys), MAX_KEYS))
