# SPDX-License-Identifier: Apache-2.0
"""A simulated cache server that several engines share, and what each of them has of it.

A client knows of a block what it was told last, which may be out of date: the server evicts, other
engines store, and a restart leaves it empty.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from stratakv.tiers.base import Answer
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.errors import TierBusy, TierError

from .clock import VirtualClock
from .store import ASK_SECONDS, SLOW_SECONDS, SOON_SECONDS, SimStore

# What a client believes of a block that the server did not have.
MISS_SECONDS = 0.5
# Of the server's memory, as much as leases may hold.
LEASED_SHARE = 0.5


class Server:
    """What the server keeps, the least recently used first."""

    def __init__(self, clock: VirtualClock, num_blocks: int) -> None:
        self.blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self.num_blocks = num_blocks
        self.promised: dict[bytes, float] = {}  # when a lease was last given, or would have been
        self._clock = clock
        self._leases: dict[bytes, float] = {}

    def restart(self) -> None:
        """It has lost everything."""
        self.blocks.clear()
        self._leases.clear()

    def lease(self, keys: Sequence[bytes], seconds: float) -> int:
        """How many of these, from the first on, are here and kept."""
        now = self._clock.now
        there = next((i for i, k in enumerate(keys) if k not in self.blocks), len(keys))
        leased = {key for key, end in self._leases.items() if end > now}
        for key in keys[:there]:
            if key in leased or len(leased) < LEASED_SHARE * self.num_blocks:
                leased.add(key)
                self._leases[key] = now + seconds
            self.promised[key] = now  # beyond its share it lends none, and has it all the same
        return there

    def put(self, key: bytes, page: bytes) -> None:
        """Keep a block, and evict another one where there is no room."""
        self.blocks[key] = page
        self.blocks.move_to_end(key)
        if len(self.blocks) > self.num_blocks:
            now = self._clock.now
            free = (k for k in self.blocks if self._leases.get(k, 0.0) <= now)
            del self.blocks[next(free)]


class ClientStore(SimStore):
    """One engine's way to the server. `refuses`: how often a lease is."""

    def __init__(
        self,
        server: Server,
        layout: BlockLayout,
        clock: VirtualClock,
        rng: random.Random,
        may_hold: Callable[[bytes, bytes], bool],
        wrong: list[str],
        *,
        refuses: float = 0.0,
    ) -> None:
        super().__init__(
            "net", layout, server.num_blocks, clock, rng, may_hold, wrong, is_shared=True
        )
        self._server = server
        self._blocks = server.blocks
        self._refuses = refuses
        self._seen: dict[bytes, tuple[bool, float]] = {}  # whether it is there, and until when
        self._news: list[Callable[[Sequence[bytes]], None]] = []

    def abandon(self) -> None:
        """Its engine was killed: nothing that is under way ends."""
        self._open.clear()
        self._hung.clear()
        self._lost.clear()
        self._closed = True

    def forget_what_is_known(self) -> None:
        """The connection was lost and is back."""
        self._seen.clear()

    @property
    def believed(self) -> set[bytes]:
        """The digests of what it takes for being there."""
        return {key[:32] for key, (is_there, _) in self._seen.items() if is_there}

    def tell(self, keys: Sequence[bytes]) -> None:
        """Others have stored these."""
        if self._news and not self._closed and self.mode not in ("down", "hung", "lost"):
            self._learn(keys, True)
            for news in self._news:
                news(keys)

    def watch(self, news: Callable[[Sequence[bytes]], None]) -> bool:
        self._maybe_raise("watch")
        self._news.append(news)
        return True

    def lease(self, keys: Sequence[bytes], seconds: float) -> Future[list[bool]] | None:
        self._maybe_raise("lease")
        if self._rng.random() < self._refuses:
            if self._rng.random() < 0.3:
                return None
            raise TierBusy("no more leases")
        future: Future[list[bool]] = Future()
        answers = self.mode not in ("hung", "lost")
        is_lost = self._rng.random() < self._refuses

        def finish() -> None:
            if not answers or self.mode in ("down", "lost"):
                future.set_exception(TierError("no answer in time"))
                return
            there = self._server.lease(keys, seconds)
            if is_lost:  # it is leased, and nobody knows
                future.set_exception(TierError("the answer was lost"))
                return
            for key in keys[there:]:
                self._seen.pop(key, None)
            future.set_result([place < there for place in range(len(keys))])

        soon = SLOW_SECONDS if self.mode == "slow" or is_lost else SOON_SECONDS
        self._clock.after(self._rng.uniform(0.0, soon) if answers else ASK_SECONDS, finish)
        return future

    def prefetch_lookup(self, keys: Sequence[bytes]) -> Future[None] | None:
        new = [key for key in keys if self._known_of(key) is None and key not in self._asked]
        if not new:
            return None
        self._known -= set(new)  # what it keeps are keys that it was told of
        asked = super().prefetch_lookup(new)
        if asked is not None:
            asked.add_done_callback(lambda over: over.exception(0) or self._look(new))
        return asked

    def clear(self) -> None:
        self._seen.clear()
        super().clear()

    def _look(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._learn([key], key in self._blocks)

    def _learn(self, keys: Sequence[bytes], is_there: bool) -> None:
        until = float("inf") if is_there else self._clock.now + MISS_SECONDS
        self._seen.update(dict.fromkeys(keys, (is_there, until)))

    def _known_of(self, key: bytes) -> bool | None:
        is_there, until = self._seen.get(key, (False, 0.0))
        return is_there if until > self._clock.now else None

    def _answer(self, key: bytes) -> Answer:
        known = self._known_of(key)
        if known is None:
            return Answer.PENDING if key in self._asked else Answer.MISS
        return Answer.HIT if known else Answer.MISS

    def _load_now(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Any:
        answers = super()._load_now(keys, buffers)
        for key, answer in zip(keys, answers, strict=False):
            if answer is None:
                self._seen.pop(key, None)
        return answers

    def _keep(self, key: bytes, page: bytes) -> None:
        self._server.put(key, page)
        self._learn([key], True)
