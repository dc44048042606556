# SPDX-License-Identifier: Apache-2.0
"""AdaptivePolicy: keeps the blocks that save the most time per second in a slot.

The policy learns from observed prompts how soon blocks are used again. The rate of reuse depends on
the conversation's turn, the time between the conversation's prompts and whether conversations share
the blocks (`history.py`), and on the blocks' age (`reuse_model.py`). The policy multiplies the rate
of reuse by the cost of a miss. The policy needs no tuning: it acts as LRU for the first prompts,
and for a while after LRU would have served more blocks (`Trial`). A block is evicted after the
blocks that follow it in a chain, unless the following blocks must not be evicted. Before the first
`observe` the policy is plain LRU, for owners that do not report prompts.

The policy also remembers evicted blocks: three times its owner's number of blocks plus `MIN_GONE`,
but at most `MAX_GONE`. A block takes about 400 bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from itertools import islice
from math import inf, sqrt

from .base import EvictionPolicy
from .history import History
from .lru import LruPolicy
from .miss_cost import MissCost
from .reuse_model import ReuseModel
from .runs import Block, Run

# The number of prompts before the learned order replaces LRU for the first time.
WARM_UP = 128
# The number of prompts for which a policy worse than LRU is suspended: the first time, and at most.
SUSPEND = 512
MAX_SUSPEND = 1 << 14
# The number of prompts after which a result has half its weight.
HALF_LIFE = 1024
# A policy is worse than LRU if it lost more than MARGIN of the blocks, and DEVIATIONS.
MARGIN = 0.002
DEVIATIONS = 1.5

MIN_GONE = 16_384
MAX_GONE = 262_144


class Trial:
    """Compares how many blocks a policy and LRU serve.

    A simulated LRU of the same capacity, with keys only, gets the same prompts. If the policy
    serves fewer blocks than LRU, by more than chance, the policy is suspended for a while, each
    time for twice as long. `is_trusted`: whether the policy is not suspended."""

    def __init__(self, capacity: int) -> None:
        self.is_trusted = False
        self._capacity = capacity
        self._lru: OrderedDict[bytes, None] = OrderedDict()
        self._decide_at = WARM_UP
        self._suspend = SUSPEND
        self._prompts = 0
        # Sums over prompts, older prompts with less weight: blocks requested, hits of LRU minus
        # hits of the policy, and squares of these differences.
        self._asked = self._lost = self._variance = 0.0

    def compare_prompt(self, chain: Sequence[bytes], hits: int) -> None:
        """Compare `hits`, the leading blocks of a prompt that the owner held, with those of LRU."""
        lru_hits = self._replay(chain)
        self._prompts += 1
        if not self.is_trusted:
            if self._prompts >= self._decide_at:
                self.is_trusted = True
                self._asked = self._lost = self._variance = 0.0
            return
        keep = 0.5 ** (1 / HALF_LIFE)
        lost = lru_hits - hits
        self._lost = keep * self._lost + lost
        self._variance = keep * keep * self._variance + lost * lost
        self._asked = keep * self._asked + len(chain)
        if self._lost > MARGIN * self._asked and self._lost > DEVIATIONS * sqrt(self._variance):
            self.is_trusted = False
            self._decide_at = self._prompts + self._suspend
            self._suspend = min(MAX_SUSPEND, 2 * self._suspend)

    def _replay(self, chain: Sequence[bytes]) -> int:
        """Return how many leading blocks of the chain LRU holds. Then insert the chain into LRU."""
        lru = self._lru
        hits = next((i for i, key in enumerate(chain) if key not in lru), len(chain))
        for key in reversed(chain):
            lru[key] = None
            lru.move_to_end(key)
        while len(lru) > self._capacity:
            lru.popitem(last=False)
        return hits


def take_tails_first(
    runs: Iterable[Run], count: int, may_go: Callable[[bytes], bool]
) -> dict[Block, None]:
    """Choose up to `count` blocks of the runs for eviction, the first run first. Change nothing. A
    block is chosen only after its followers in a chain, which are useless without the block. A
    block with a held follower that is not chosen is skipped, with all blocks before it in its run.
    A skipped block is considered again as soon as all its followers are chosen."""
    taken: dict[Block, None] = {}
    if count <= 0:
        return taken
    left: dict[Block, int] = {}  # parent of taken blocks → number of its followers not taken
    waiting: set[Run] = set()  # skipped runs
    for first in runs:
        to_do = [first]
        while to_do:
            run = to_do.pop()
            for block in run.tail_first():
                if block in taken:
                    continue
                if left.get(block, block.children):
                    waiting.add(run)
                    break
                if not may_go(block.key):
                    break
                taken[block] = None
                if len(taken) == count:
                    return taken
                parent = block.parent
                if parent is None:
                    continue
                left[parent] = stay = left.get(parent, parent.children) - 1
                if not stay and waiting and parent.run in waiting:
                    waiting.discard(parent.run)
                    to_do += [run, parent.run]
                    break
    return taken


class AdaptivePolicy(EvictionPolicy):
    """The policy for an owner of up to `capacity` blocks. An operation on a key takes O(1) on
    average; `victims` takes time linear in the visited blocks and the classes."""

    learns = True

    def __init__(self, capacity: int, cost: MissCost | None = None) -> None:
        gone = min(MAX_GONE, 3 * capacity + MIN_GONE)
        self._history = History(capacity + gone, ReuseModel(), cost=cost)
        self._trial = Trial(capacity)
        self._untold: LruPolicy | None = LruPolicy()  # the order until the first prompt

    def __len__(self) -> int:
        return self._history.num_held if self._untold is None else len(self._untold.order)

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        if self._untold is not None:
            held = self._untold.order
            self._untold = None
            self._history.now = now  # held blocks count as used at the first prompt
            self.insert(held)
        hits = self._history.record_prompt(chain, now)
        self._trial.compare_prompt(chain, hits)

    def insert(self, keys: Iterable[bytes]) -> None:
        if self._untold is not None:
            self._untold.insert(keys)
            return
        self._history.mark_held(keys)

    def touch(self, keys: Iterable[bytes]) -> None:
        # After the first prompt, `observe` records the uses.
        if self._untold is not None:
            self._untold.touch(keys)

    def remove(self, keys: Iterable[bytes]) -> None:
        if self._untold is not None:
            self._untold.remove(keys)
            return
        self._history.mark_gone(keys)

    def victims(self, count: int, may_evict: Callable[[bytes], bool]) -> list[bytes]:
        if self._untold is not None:
            return self._untold.victims(count, may_evict)
        return self._choose(count, may_evict, inf)

    def may_be_next(self, keys: KeysView[bytes], count: int) -> bool:
        """See EvictionPolicy. Checks whole runs, as if all blocks of a run may be evicted."""
        if self._untold is not None:
            return self._untold.may_be_next(keys, count)
        for run in self._runs(inf):
            if count <= 0:
                break
            if not keys.isdisjoint(run.blocks):
                return True
            count -= len(run.blocks)
        return False

    def displaced_by(
        self, keys: Sequence[bytes], count: int, may_evict: Callable[[bytes], bool]
    ) -> list[bytes]:
        coming = self._history.blocks.get(keys[-1]) if keys else None
        if coming is None or not self._trial.is_trusted:
            return self.victims(count, may_evict)
        limit = self._history.queues.value(coming.run, self._history.now)
        return self._choose(count, may_evict, limit)

    def _choose(self, count: int, may_evict: Callable[[bytes], bool], limit: float) -> list[bytes]:
        """Return up to `count` keys to evict, from runs with a value below `limit`."""
        taken = take_tails_first(self._runs(limit), count, may_evict)
        chosen = [block.key for block in taken]
        if limit == inf and len(chosen) < count:
            # Blocks whose followers must not be evicted are evicted instead.
            others = (b for run in self._runs(limit) for b in run.tail_first() if b not in taken)
            chosen += islice((b.key for b in others if may_evict(b.key)), count - len(chosen))
        return chosen

    def _runs(self, limit: float) -> Iterator[Run]:
        """Yield the runs with a value below `limit`, in the order of eviction."""
        queues = self._history.queues
        ranked = queues.by_value if self._trial.is_trusted else queues.by_age
        for value, runs in ranked(self._history.now):
            if value >= limit:
                break
            yield from runs
