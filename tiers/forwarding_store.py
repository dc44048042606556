# SPDX-License-Identifier: Apache-2.0
"""ForwardingStore: the base class of wrappers of a store, which override the methods that they
change. A store in the hierarchy has at most two wrappers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

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
from .tag import Proof, Proofs


class ForwardingStore(StoreTier):
    """Passes every call on to `inner`, which a subclass may replace while calls run."""

    def __init__(self, name: str, layout: BlockLayout, inner: StoreTier) -> None:
        self.name = name
        self.layout = layout
        self.is_shared = inner.is_shared
        self.is_read_only = inner.is_read_only
        self.inner = inner

    @property
    def is_up(self) -> bool:
        return self.inner.is_up

    @property
    def learns(self) -> bool:
        return self.inner.learns

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        self.inner.observe(chain, now)

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        return self.inner.lookup(keys)

    def load(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        context: RequestContext = NO_CONTEXT,
    ) -> Future[list[Proof | None]]:
        return load_for(self.inner, keys, buffers, context)

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        return self.inner.store(keys, buffers, proofs)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.inner.touch(keys)

    def prefetch_lookup(
        self, keys: Sequence[bytes], context: RequestContext = NO_CONTEXT
    ) -> Future[None] | None:
        return prefetch_lookup_for(self.inner, keys, context)

    def watch(self, news: Callable[[Sequence[bytes]], None]) -> bool:
        return self.inner.watch(news)

    def lease(self, keys: Sequence[bytes], seconds: float) -> Future[list[bool]] | None:
        return self.inner.lease(keys, seconds)

    def trial_read(self, seconds: float) -> ReadSample | None:
        return self.inner.trial_read(seconds)

    def drop(self, keys: Sequence[bytes]) -> int:
        return self.inner.drop(keys)

    def clear(self) -> None:
        self.inner.clear()

    def wait_forgotten(self, timeout_seconds: float) -> bool:
        return self.inner.wait_forgotten(timeout_seconds)

    def stats(self) -> TierStats:
        return self.inner.stats()

    def close(self, timeout_seconds: float) -> None:
        self.inner.close(timeout_seconds)
