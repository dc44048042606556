# SPDX-License-Identifier: Apache-2.0
"""SeveralDisks: several disks as one SSD tier. A block's key decides which disk keeps the block.

    key ─► one of 4,096 parts ─► the disk with the highest hash for that part   (rendezvous hashing)

Adding or removing a disk moves only the parts of this disk. The order in which the disks are listed
does not matter. Each disk has its own store (index, queue, folder) and holds no data of other
disks, so losing a disk loses only the blocks on that disk.

The failure of one disk does not affect the other disks. A block that a disk cannot read is a miss;
a block that a disk cannot store is refused. A disk that has not answered for `HUNG_SECONDS` gets no
look-ups, loads, stores or leases until it answers again, while other disks continue to work.
Earlier calls to a hung disk wait for its answer, because the disk may still write into the buffers
of these calls."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import xxhash

from ..base import Answer, ReadSample, Stored, StoreTier, TierStats
from ..block import KEY_BYTES, BlockLayout
from ..errors import InvalidBlock, TierError
from ..tag import Proof, Proofs

log = logging.getLogger(__name__)

PARTS = 4096
HUNG_SECONDS = 1.0
HUNG = "hung disk"  # key in `TierStats.errors`: how often a disk stopped answering
_ANSWER = TypeVar("_ANSWER")


class Disk(NamedTuple):
    """A disk's store and name (the path). The name decides which keys belong to the store."""

    name: str
    store: StoreTier


class _Waits:
    """The unanswered calls to one disk. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[int, float] = {}
        self._numbers = itertools.count()

    def start_wait(self) -> int:
        """Record that a call to the disk has begun. Return a number to pass to `remove_wait`."""
        with self._lock:
            number = next(self._numbers)
            self._since[number] = time.monotonic()
            return number

    def remove_wait(self, number: int) -> None:
        with self._lock:
            self._since.pop(number, None)

    def oldest_seconds(self) -> float:
        with self._lock:
            first = next(iter(self._since.values()), None)
        return 0.0 if first is None else time.monotonic() - first


class SeveralDisks(StoreTier):
    """A `StoreTier` made of several stores, one on each disk. Only tests set `hung_seconds`."""

    name = "ssd"

    def __init__(
        self, disks: Sequence[Disk], layout: BlockLayout, *, hung_seconds: float = HUNG_SECONDS
    ) -> None:
        self.layout = layout
        self._disks = list(disks)
        self._stores = [disk.store for disk in disks]
        self._waits = [_Waits() for _ in disks]
        self._hung_seconds = hung_seconds
        self._is_hung = [False] * len(disks)
        self._times_hung = 0
        self._failures: dict[str, int] = {}
        self._lock = threading.Lock()  # guards the three previous fields
        names = [disk.name.encode() for disk in disks]
        self._disk_of_part = [
            max(range(len(names)), key=lambda n: _hash(names[n], part)) for part in range(PARTS)
        ]

    def disk_of(self, key: bytes) -> int:
        """Return the index of the disk that keeps the block `key`."""
        return self._disk_of_part[int.from_bytes(key[:2], "little") % PARTS]

    @property
    def is_up(self) -> bool:
        return any(store.is_up for store in self._stores)

    @property
    def learns(self) -> bool:
        return any(store.learns for store in self._stores)

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        for number, places in self._split(chain).items():
            self._stores[number].observe([chain[place] for place in places], now)

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        answers = [Answer.MISS] * len(keys)
        for number, places in self._split(keys).items():
            if not self._hangs(number):
                found = self._stores[number].lookup([keys[place] for place in places])
                for place, answer in zip(places, found, strict=True):
                    answers[place] = answer
        return answers

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        self._check_buffers(keys, buffers)

        def begin(store: StoreTier, places: list[int]) -> Future[list[Proof | None]]:
            return store.load([keys[each] for each in places], [buffers[each] for each in places])

        nothing: list[Proof | None] = [None] * len(keys)
        return self._ask_each(keys, nothing, begin)

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        self._check_buffers(keys, buffers)

        def begin(store: StoreTier, places: list[int]) -> Future[list[Stored]]:
            given = None if proofs is None else [proofs[each] for each in places]
            return store.store(
                [keys[each] for each in places], [buffers[each] for each in places], given
            )

        return self._ask_each(keys, [Stored.REFUSED] * len(keys), begin)

    def touch(self, keys: Sequence[bytes]) -> None:
        for number, places in self._split(keys).items():
            self._stores[number].touch([keys[place] for place in places])

    def lease(self, keys: Sequence[bytes], seconds: float) -> Future[list[bool]] | None:
        def begin(store: StoreTier, places: list[int]) -> Future[list[bool]]:
            found = store.lease([keys[each] for each in places], seconds)
            if found is None:
                found = Future()
                found.set_result([False] * len(places))
            return found

        return self._ask_each(keys, [False] * len(keys), begin)

    def trial_read(self, seconds: float) -> ReadSample | None:
        """See StoreTier. Reads from all disks at the same time, as loads do."""
        samples: list[ReadSample] = []

        def read(store: StoreTier) -> None:
            try:
                sample = store.trial_read(seconds)
            except TierError:
                return
            if sample is not None:
                samples.append(sample)

        threads = [
            threading.Thread(target=read, args=(store,), name="stratakv-trial-read", daemon=True)
            for number, store in enumerate(self._stores)
            if not self._hangs(number)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not samples:
            return None
        return ReadSample(sum(s.num_bytes for s in samples), max(s.seconds for s in samples))

    def drop(self, keys: Sequence[bytes]) -> int:
        return sum(
            self._stores[number].drop([keys[place] for place in places])
            for number, places in self._split(keys).items()
        )

    def clear(self) -> None:
        for store in self._stores:
            store.clear()

    def wait_forgotten(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        left = [
            store.wait_forgotten(max(0.0, deadline - time.monotonic())) for store in self._stores
        ]
        return all(left)

    def stats(self) -> TierStats:
        """Return the sums of all disks' counters."""
        total = TierStats()
        for store in self._stores:
            total.add(store.stats())
        with self._lock:
            found = dict(self._failures)
            if self._times_hung:
                found[HUNG] = self._times_hung
        for kind, count in found.items():
            total.errors[kind] = total.errors.get(kind, 0) + count
        return total

    def close(self, timeout_seconds: float) -> None:
        """Close all stores at the same time, so that a hung disk does not delay the other disks."""
        threads = [
            threading.Thread(
                target=store.close, args=(timeout_seconds,), name="stratakv-close-disk", daemon=True
            )
            for store in self._stores
        ]
        deadline = time.monotonic() + timeout_seconds
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()) + 1.0)

    def _check_buffers(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """Raise InvalidBlock for wrong keys or buffers before any disk gets the call, because other
        disks would already use the buffers if one disk refused the call later."""
        if len(keys) != len(buffers) or not {KEY_BYTES}.issuperset(map(len, keys)):
            raise InvalidBlock(
                f"every block takes a key of {KEY_BYTES} bytes and a buffer; {len(keys)} keys came "
                f"with {len(buffers)} buffers"
            )
        for buffer in buffers:
            if buffer.nbytes < self.layout.page_bytes:
                raise InvalidBlock(
                    f"a block takes a buffer of {self.layout.page_bytes} bytes, not one of "
                    f"{buffer.nbytes}"
                )

    def _split(self, keys: Sequence[bytes]) -> dict[int, list[int]]:
        """Group the positions in `keys` by the index of the disk that keeps the key."""
        parts: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            parts.setdefault(self.disk_of(key), []).append(place)
        return parts

    def _hangs(self, number: int) -> bool:
        """Whether a call to a disk waits for longer than `hung_seconds`. Logs each change."""
        hangs = self._waits[number].oldest_seconds() > self._hung_seconds
        with self._lock:
            if hangs == self._is_hung[number]:
                return hangs
            self._is_hung[number] = hangs
            self._times_hung += hangs
        if hangs:
            log.warning(
                "the disk of %s has not answered for %g s; the others serve on without it",
                self._disks[number].name, self._hung_seconds,
            )  # fmt: skip
        else:
            log.info("the disk of %s answers again", self._disks[number].name)
        return hangs

    def _ask_each(
        self,
        keys: Sequence[bytes],
        answers: list[_ANSWER],
        begin: Callable[[StoreTier, list[int]], Future[list[_ANSWER]]],
    ) -> Future[list[_ANSWER]]:
        """Call `begin` on each disk's store with the positions of that disk's keys. `answers` holds
        default answers, which stay for disks that hang or fail. If every disk that was called
        fails, the error of one disk is raised or set in the future."""
        errors: list[TierError] = []
        asked: list[tuple[int, list[int], int, Future[list[_ANSWER]]]] = []
        for number, places in self._split(keys).items():
            if self._hangs(number):
                continue
            wait = self._waits[number].start_wait()
            try:
                asked.append((number, places, wait, begin(self._stores[number], places)))
            except TierError as error:
                self._waits[number].remove_wait(wait)
                errors.append(error)
            except BaseException:
                self._waits[number].remove_wait(wait)
                raise
        if errors and not asked:
            raise errors[0]
        return self._gather(answers, asked)

    def _gather(
        self,
        answers: list[_ANSWER],
        asked: list[tuple[int, list[int], int, Future[list[_ANSWER]]]],
    ) -> Future[list[_ANSWER]]:
        together: Future[list[_ANSWER]] = Future()
        together.set_running_or_notify_cancel()  # no caller may cancel while buffers are in use
        left = [len(asked)]
        failed: list[BaseException] = []

        def ended(number: int, places: list[int], wait: int, future: Future[Any]) -> None:
            self._waits[number].remove_wait(wait)
            error = future.exception()
            with self._lock:
                if error is None:
                    for place, answer in zip(places, future.result(), strict=True):
                        answers[place] = answer
                else:
                    failed.append(error)
                    kind = f"disk: {type(error).__name__}"
                    self._failures[kind] = self._failures.get(kind, 0) + 1
                left[0] -= 1
                is_last = not left[0]
            if is_last:
                if failed and len(failed) == len(asked):
                    together.set_exception(failed[0])
                else:
                    together.set_result(answers)

        if not asked:
            together.set_result(answers)
        for number, places, wait, future in asked:
            future.add_done_callback(
                lambda done, n=number, p=places, w=wait: ended(n, p, w, done)  # type: ignore[misc]
            )
        return together


def _hash(name: bytes, part: int) -> int:
    return xxhash.xxh3_64_intdigest(name + b"\n%d" % part)
