# SPDX-License-Identifier: Apache-2.0
"""GuardedStore: a store with circuit breakers and a count of the store's faults.

Every fault of a store becomes a miss, is counted, and is reported to one of the store's two circuit
breakers. Reads and writes have separate breakers, because reads may succeed while writes hang.
While a breaker is open, the store is probed with one block at intervals. A read probe has separate
memory and takes no slot of the slab, since a hanging store may write there later."""

from __future__ import annotations

import copy
import dataclasses
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..base import (
    IO_SECONDS,
    NO_CONTEXT,
    Answer,
    Histogram,
    RequestContext,
    StoreTier,
    TierStats,
    prefetch_lookup_for,
)
from ..block import KEY_BYTES
from ..errors import TierBusy
from ..mailbox import Mailbox
from ..tag import Proof
from .breaker import Breaker
from .hierarchy_options import HierarchyOptions

LATE = "late"
LATE_WRITE = "late_write"
# Faults of single blocks, which open no breaker: the store refused the block; the bytes in the slab
# did not match the block's proof; the store returned the bytes of another key.
REFUSED, DAMAGED, WRONG_TAG = "refused", "damaged_in_slab", "wrong_tag"


@dataclass(slots=True)
class Traffic:
    """Counters of the transfers between the slab and one store: a *promotion* is a batch read, a
    *cascade* a batch written. Only the hierarchy's thread changes the counters."""

    active_promotions: int = 0  # gauge: batches under way
    active_cascades: int = 0  # gauge: batches under way
    # Seconds from the call of the store to the store's answer, for batches with an answer.
    promotion_seconds: Histogram = field(default_factory=lambda: Histogram(IO_SECONDS))
    promotion_failures: int = 0  # batches that failed or were late
    promotion_allocation_failures: int = 0  # loads cut short because the slab had no slot
    cascade_failures: int = 0  # batches that failed or were late
    late_write_blocks: int = 0  # gauge: slots of late batches that have not ended
    # Blocks that the slab evicted before the store took them; evictions with such a block.
    lost_blocks: int = 0
    lost_stores: int = 0
    unadmitted_blocks: int = 0  # blocks that the admission filter refused
    breaker: str = "closed"  # gauge: "closed", "open" or "probing"
    breaker_opened: int = 0  # how often the breaker opened
    # The breaker of writes; `breaker` is the breaker of all other calls.
    write_breaker: str = "closed"
    write_breaker_opened: int = 0


class GuardedStore:
    """A store below the slab, with its deadlines, breakers, counted faults and traffic. Only the
    thread that owns `mailbox` calls the methods."""

    def __init__(self, tier: StoreTier, mailbox: Mailbox, options: HierarchyOptions) -> None:
        self.tier = tier
        self.mailbox = mailbox
        self.read_seconds = options.read_seconds
        self.write_seconds = options.write_seconds
        self.name = tier.name
        self.is_shared = tier.is_shared
        self.is_read_only = tier.is_read_only
        self.breaker = Breaker()
        self.write_breaker = Breaker()
        self.traffic = Traffic()
        self._faults: dict[str, int] = {}
        self._last_stats = TierStats()
        self._open_lookups = 0  # unanswered prefetched look-ups
        # Keys for probes, from the last look-up with a hit, or else from the first failed look-up.
        self._known: Sequence[bytes] | None = None

    @property
    def awaits_lookup(self) -> bool:
        """Whether a prefetched look-up of the store has not completed yet."""
        return self._open_lookups > 0

    def count_fault(
        self, reason: str | Exception, times: int = 1, *, writing: bool = False
    ) -> None:
        """Count a fault and report it to the breaker. An exception is counted by the name of its
        class. A busy store and faults of single blocks leave the breaker unchanged."""
        name = name_of(reason)
        self._faults[name] = self._faults.get(name, 0) + times
        breaker = self.write_breaker if writing else self.breaker
        if reason == LATE:
            breaker.was_late()
        elif reason == LATE_WRITE:
            breaker.hung()
        elif reason not in (REFUSED, DAMAGED, WRONG_TAG) and not isinstance(reason, TierBusy):
            breaker.failed()

    def attempt(self, call: Callable[[], object], *, writing: bool = False) -> None:
        """Run `call`, a call of the store. An exception is counted and not raised."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - any fault of a store is counted, none spreads
            self.count_fault(error, writing=writing)

    def drop(self, keys: Sequence[bytes]) -> None:
        self.attempt(lambda: self.tier.drop(keys), writing=True)

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        """Return the store's answers; all are MISS if the breaker is open or the call fails."""
        if not self.breaker.allows:
            return [Answer.MISS] * len(keys)
        try:
            answers = self.tier.lookup(keys)
            check_answers(answers, keys)
        except Exception as error:  # noqa: BLE001 - any fault of a store is a counted miss
            if self._known is None:
                self._known = keys
            self.count_fault(error)
            return [Answer.MISS] * len(keys)
        if Answer.HIT in answers:
            self._known = keys
        return answers

    def prefetch_lookup(self, keys: Sequence[bytes], context: RequestContext = NO_CONTEXT) -> bool:
        """Look up a queued prompt's blocks, in prompt order. Return True if the store sends its
        server a request; `mailbox.version` changes with the answer."""
        if not self.breaker.allows:
            return False
        try:
            future = prefetch_lookup_for(self.tier, keys, context)
            when_done = None if future is None else future.add_done_callback
        except Exception as error:  # noqa: BLE001 - any fault of a store is a counted miss
            self.count_fault(error)
            return False
        if when_done is None:
            return False
        self._open_lookups += 1
        when_done(lambda done: self.mailbox.deliver(lambda: self._lookup_ended(done)))
        return True

    def watch(self, news: Callable[[Sequence[bytes]], None]) -> None:
        """Watch the store. The owner's thread calls `news` with the keys of new blocks."""
        deliver = self.mailbox.deliver
        self.attempt(lambda: self.tier.watch(lambda keys: deliver(lambda: news(keys))))

    def lease(
        self, keys: Sequence[bytes], seconds: float, done: Callable[[list[bool]], None]
    ) -> None:
        """Lease blocks for `seconds`. The owner's thread calls `done`, perhaps at once, with a bool
        for each block, whether it is protected; all are False if the store fails."""
        none = [False] * len(keys)
        try:
            future = self.tier.lease(keys, seconds) if self.breaker.allows else None
        except Exception as error:  # noqa: BLE001 - any fault of a store is counted, none spreads
            self.count_fault(error)
            future = None
        if future is None:
            done(none)
            return

        def ended(future: Future[list[bool]]) -> None:
            try:
                kept = future.result(timeout=0)
                check_answers(kept, keys)
            except Exception as error:  # noqa: BLE001 - as above
                self.count_fault(error)
                kept = none
            self.mailbox.version += 1
            done(kept)

        future.add_done_callback(lambda over: self.mailbox.deliver(lambda: ended(over)))

    def probe_when_due(self) -> None:
        """Begin a read probe if a probe is due, and set a timer for the next probe."""
        if self.breaker.allows:
            return
        if self.breaker.probe_due:
            self._begin_probe()
        self.breaker.announce_probe(self.mailbox)

    def stats(self) -> TierStats:
        """Return the store's counters (the last known if it raises), with this object's faults."""
        try:
            stats = self.tier.stats()
            if not isinstance(stats, TierStats):
                raise TypeError(f"stats() gave {type(stats).__name__}")
            self._last_stats = stats
        except Exception as error:  # noqa: BLE001 - blocks can be had without figures
            name = name_of(error)
            self._faults[name] = self._faults.get(name, 0) + 1
            stats = self._last_stats
        errors = dict(stats.errors)
        for reason, times in self._faults.items():
            errors[reason] = errors.get(reason, 0) + times
        return dataclasses.replace(stats, errors=errors)

    def copy_traffic(self) -> Traffic:
        """Return a copy of the traffic counters, with the present state of both breakers."""
        traffic = copy.deepcopy(self.traffic)
        traffic.breaker = self.breaker.state.value
        traffic.breaker_opened = self.breaker.times_opened
        traffic.write_breaker = self.write_breaker.state.value
        traffic.write_breaker_opened = self.write_breaker.times_opened
        return traffic

    def _lookup_ended(self, future: Future[None]) -> None:
        self._open_lookups -= 1
        error = None if future.cancelled() else future.exception()
        if isinstance(error, Exception):
            self.count_fault(error)
        self.mailbox.version += 1

    def _begin_probe(self) -> None:
        self.breaker.probe_began()
        try:
            key = self._key_to_probe()
            buffer = memoryview(mmap.mmap(-1, self.tier.layout.slot_bytes))
            future = self.tier.load([key], [buffer])
        except Exception as error:  # noqa: BLE001 - any fault of a store is counted, none spreads
            self._fail_probe(error)
            return
        future.add_done_callback(lambda done: self.mailbox.deliver(lambda: self._probe_ended(done)))

    def _key_to_probe(self) -> bytes:
        """Return a key to read in a probe, if possible of a block that the store has."""
        keys = self._known or ()
        answers = self.tier.lookup(keys)
        check_answers(answers, keys)
        # The last hit is taken: requests read earlier keys first, so a fault may have lost those.
        found = (key for key, a in zip(keys[::-1], answers[::-1], strict=True) if a is Answer.HIT)
        return next(found, keys[-1] if keys else bytes(KEY_BYTES))

    def _probe_ended(self, future: Future[list[Proof | None]]) -> None:
        try:
            check_answers(future.result(timeout=0), [b""])
        except Exception as error:  # noqa: BLE001 - as above
            self._fail_probe(error)
        else:
            self.breaker.probe_ended(answered=True)

    def _fail_probe(self, error: Exception) -> None:
        self.count_fault(error)
        self.breaker.probe_ended(answered=False)


def check_answers(answers: Sequence[object], keys: Sequence[bytes]) -> None:
    """Raise ValueError unless there is one answer for each key."""
    if len(answers) != len(keys):
        raise ValueError(f"{len(answers)} answers to {len(keys)} keys")


def name_of(reason: str | Exception) -> str:
    return type(reason).__name__ if isinstance(reason, Exception) else reason


def find_stores(
    stores: Sequence[GuardedStore], keys: Sequence[bytes], awaited: set[bytes] | None = None
) -> list[GuardedStore | None]:
    """Return for each key the first store that has the block, or None. A key that a store reports
    as PENDING during a prefetched look-up is added to `awaited`. Any other PENDING counts as a
    miss, because no completion would wake a request that waits."""
    places: list[GuardedStore | None] = [None] * len(keys)
    for store in stores:
        unplaced = [i for i, place in enumerate(places) if place is None]
        answers = store.lookup([keys[i] for i in unplaced])
        for i, answer in zip(unplaced, answers, strict=True):
            if answer is Answer.HIT:
                places[i] = store
            elif awaited is not None and answer is Answer.PENDING and store.awaits_lookup:
                awaited.add(keys[i])
    return places
