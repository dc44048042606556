# SPDX-License-Identifier: Apache-2.0
"""Adaptive: keeps what saves the most for each second that it takes up a place.

From the prompts it is told of it learns how soon blocks are used again, by turn, pace and kind
(`runs.py`), as a function of age (`reuse_model.py`); what that is worth is weighed by what a miss
costs. Nothing is tuned beforehand: until it has seen enough, and whenever LRU would have served
more (`trial.py`), it is LRU. Tails go before heads: a block whose followers in some chain are held
goes after them, as far as others may go. Until the first `observe` it is LRU and costs what LRU
costs, for owners that hear of blocks but not of prompts.

Beside its owner's blocks it remembers those that are gone: three times as many and `MIN_GONE`, but
no more than `MAX_GONE`. A block takes about 400 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import inf

from .base import EvictionPolicy
from .history import History
from .lru import LruPolicy
from .reuse_model import ReuseModel
from .run_queues import ALL_THE_SAME, MissCost, RunQueues
from .runs import Run
from .tails_first import take_tails_first
from .trial import Trial

MIN_GONE = 16_384
MAX_GONE = 262_144


class AdaptivePolicy(EvictionPolicy):
    """For an owner of `capacity` blocks. A key costs O(1) on average; `victims` is linear in what
    it looks at, and in the number of classes."""

    learns = True

    def __init__(self, capacity: int, cost: MissCost = ALL_THE_SAME) -> None:
        model = ReuseModel()
        self._queues = RunQueues(model)
        gone = min(MAX_GONE, 3 * capacity + MIN_GONE)
        self._history = History(capacity + gone, model, self._queues, cost=cost)
        self._trial = Trial(capacity)
        self._held = 0
        self._untold: LruPolicy | None = LruPolicy()  # all there is until the first prompt

    def __len__(self) -> int:
        return self._held if self._untold is None else len(self._untold)

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        if self._untold is not None:
            held = self._untold.victims(len(self._untold), lambda _key: True)
            self._untold = None
            self._history.now = now  # what it holds is as old as the first prompt, not the clock
            self.insert(held)
        hits = self._history.observe(chain, now)
        self._trial.observe(chain, hits)

    def insert(self, keys: Iterable[bytes]) -> None:
        if self._untold is not None:
            self._untold.insert(keys)
            return
        keys = list(keys)
        blocks = self._history.blocks
        self._history.gather(key for key in keys if key not in blocks)
        for key in keys:
            block = blocks[key]
            if not block.held:
                block.run.hold(block)
                self._held += 1
                self._queues.link(block.run, self._history.now)
        self._history.forget()

    def touch(self, keys: Iterable[bytes]) -> None:
        # What a prompt uses was told by `observe`.
        if self._untold is not None:
            self._untold.touch(keys)

    def remove(self, keys: Iterable[bytes]) -> None:
        if self._untold is not None:
            self._untold.remove(keys)
            return
        for key in keys:
            block = self._history.blocks.get(key)
            if block is not None and block.held:
                block.run.let_go(block)
                self._held -= 1
                if not block.run.blocks:
                    self._queues.unlink(block.run)

    def victims(self, count: int, may_evict: Callable[[bytes], bool]) -> list[bytes]:
        if self._untold is not None:
            return self._untold.victims(count, may_evict)
        return self._choose(count, may_evict, inf)

    def displaced_by(
        self, keys: Sequence[bytes], count: int, may_evict: Callable[[bytes], bool]
    ) -> list[bytes]:
        coming = self._history.blocks.get(keys[-1]) if keys else None
        if coming is None or not self._trial.is_trusted:
            return self.victims(count, may_evict)
        return self._choose(count, may_evict, self._queues.value(coming.run, self._history.now))

    def _choose(self, count: int, may_evict: Callable[[bytes], bool], limit: float) -> list[bytes]:
        """Up to `count` blocks of runs that are worth less than `limit`."""
        taken = take_tails_first(self._runs(limit), count, may_evict)
        chosen = [block.key for block in taken]
        if limit == inf and len(chosen) < count:
            # Tails that may not go: what is before them goes rather than nothing.
            others = (b for run in self._runs(limit) for b in run.tail_first() if b not in taken)
            chosen += islice((b.key for b in others if may_evict(b.key)), count - len(chosen))
        return chosen

    def _runs(self, limit: float) -> Iterator[Run]:
        """Runs that are worth less than `limit`, in the order in which they should go."""
        now = self._history.now
        ranked = self._queues.by_value if self._trial.is_trusted else self._queues.by_age
        for value, runs in ranked(now):
            if value >= limit:
                break
            yield from runs
