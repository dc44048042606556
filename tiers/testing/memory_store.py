# SPDX-License-Identifier: Apache-2.0
"""MemoryStore: blocks in a dict, the simplest tier that keeps the whole contract of `StoreTier`.

MemoryStore is the test double of every tier below the slab, and therefore in the package: `fault`
makes the calls that a test chooses slow, busy or broken. The only threads are timers of delays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from ..base import Answer, Stored, StoreTier, TierStats
from ..block import BlockLayout
from ..errors import InvalidBlock, TierClosed, TierConfigError
from ..policies.lru import LruPolicy
from ..settings.sizes import show_size
from ..tag import Proof, Proofs, Tagger, payload_digest

# A function called with "lookup", "load", "store" or "drop" and the keys, before the call takes
# effect. The function may raise a TierError, which the call raises, or return a delay in seconds,
# after which a load or store takes effect as a whole.
Fault = Callable[[str, Sequence[bytes]], float | None]

_T = TypeVar("_T")


class MemoryStore(StoreTier):
    """A store of blocks as bytes, which evicts the least recently used block. Thread-safe."""

    def __init__(
        self,
        layout: BlockLayout,
        capacity_bytes: int,
        *,
        name: str = "memory",
        fault: Fault | None = None,
    ) -> None:
        if capacity_bytes < layout.page_bytes:
            raise TierConfigError(
                f"the {name} tier needs at least {show_size(layout.page_bytes)} for one block, "
                f"not {show_size(capacity_bytes)}"
            )
        self.name = name
        self.layout = layout
        self.fault = fault
        self._capacity_blocks = capacity_bytes // layout.page_bytes
        self._lock = threading.Condition()
        self._blocks: dict[bytes, tuple[bytes, Proof]] = {}
        self._tagger = Tagger(layout.layout_id(), layout.page_bytes)
        self._policy = LruPolicy()
        self._pending: dict[bytes, int] = {}  # number of delayed stores by key
        self._delayed: dict[Future[Any], threading.Timer] = {}
        self._stats = TierStats(
            capacity_bytes=capacity_bytes, capacity_blocks=self._capacity_blocks
        )
        self._closed = False

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        self._fault("lookup", keys)
        with self._lock:
            return [self._lookup_block(key) for key in keys]

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        self._check_buffers(keys, buffers)
        delay = self._fault("load", keys)
        return self._complete(delay, lambda: self._load_now(keys, buffers))

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        self._check_buffers(keys, buffers)
        given = [None] * len(keys) if proofs is None else list(proofs)
        delay = self._fault("store", keys)
        with self._lock:
            for key in keys:
                self._pending[key] = self._pending.get(key, 0) + 1
        return self._complete(delay, lambda: self._store_now(keys, buffers, given))

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._policy.touch([key for key in reversed(keys) if key in self._blocks])

    def drop(self, keys: Sequence[bytes]) -> int:
        self._fault("drop", keys)
        with self._lock:
            known = [key for key in keys if self._blocks.pop(key, None) is not None]
            self._policy.remove(known)
        return len(known)

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._policy = LruPolicy()

    def stats(self) -> TierStats:
        with self._lock:
            stats = self._stats
            stats.blocks = len(self._blocks)
            stats.used_bytes = stats.blocks * self.layout.page_bytes
            return stats.copy()

    def close(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._delayed, deadline - time.monotonic())
            abandoned, self._delayed = self._delayed, {}
            self._blocks.clear()
            self._policy = LruPolicy()
        for future, timer in abandoned.items():
            timer.cancel()
            future.set_exception(TierClosed(f"the {self.name} tier was closed"))

    def _lookup_block(self, key: bytes) -> Answer:
        if key in self._blocks:
            return Answer.HIT
        return Answer.PENDING if key in self._pending else Answer.MISS

    def _fault(self, op: str, keys: Sequence[bytes]) -> float:
        if self._closed:
            raise TierClosed(f"the {self.name} tier was closed")
        return (self.fault(op, keys) or 0.0) if self.fault else 0.0

    def _check_buffers(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        if len(keys) != len(buffers):
            raise InvalidBlock(f"{len(keys)} keys came with {len(buffers)} buffers")
        for buffer in buffers:
            if buffer.nbytes < self.layout.page_bytes:
                raise InvalidBlock(
                    f"a block takes {self.layout.page_bytes} bytes, the buffer has {buffer.nbytes}"
                )

    def _complete(self, delay: float, work: Callable[[], _T]) -> Future[_T]:
        """Return a future with the result of `work`, complete now or after `delay` seconds."""
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()
        if not delay:
            future.set_result(work())
            return future
        timer = threading.Timer(delay, self._finish, (future, work))
        timer.daemon = True
        with self._lock:
            self._delayed[future] = timer
        timer.start()
        return future

    def _finish(self, future: Future[_T], work: Callable[[], _T]) -> None:
        """Run delayed work, under the lock, so that `close` cannot abandon a half-done call."""
        with self._lock:
            if self._delayed.pop(future, None) is None:
                return
            result = work()
            self._lock.notify_all()
        future.set_result(result)

    def _load_now(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Proof | None]:
        size = self.layout.page_bytes
        answers: list[Proof | None] = []
        with self._lock:
            for key, buffer in zip(keys, buffers, strict=True):
                block, proof = self._blocks.get(key, (None, None))
                answers.append(proof)
                if block is not None:
                    buffer.cast("B")[:size] = block
            hits = [key for key in keys if key in self._blocks]
            self._policy.touch(reversed(hits))
            self._stats.hits += len(hits)
            self._stats.misses += len(keys) - len(hits)
            self._stats.loaded_blocks += len(hits)
            self._stats.loaded_bytes += len(hits) * size
        return answers

    def _store_now(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], proofs: Proofs
    ) -> list[Stored]:
        size = self.layout.page_bytes
        outcomes = []
        with self._lock:
            for key, buffer, given in zip(keys, buffers, proofs, strict=True):
                self._pending[key] -= 1
                if not self._pending[key]:
                    del self._pending[key]
                outcomes.append(Stored.KEPT)
                if key in self._blocks:
                    continue
                block = bytes(buffer.cast("B")[:size])
                digest = payload_digest(block)
                if given is not None and given.digest != digest:
                    outcomes[-1] = Stored.DAMAGED
                    continue
                self._evict(len(self._blocks) + 1 - self._capacity_blocks)
                proof = Proof(self._tagger.tag(key, digest), digest) if given is None else given
                self._blocks[key] = block, proof
                self._policy.insert((key,))
                self._stats.stored_blocks += 1
                self._stats.stored_bytes += size
            self._policy.touch([key for key in reversed(keys) if key in self._blocks])
        return outcomes

    def _evict(self, count: int) -> None:
        victims = self._policy.victims(count, lambda _key: True)
        for key in victims:
            del self._blocks[key]
        self._policy.remove(victims)
        self._stats.evicted_blocks += len(victims)
