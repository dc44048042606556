# SPDX-License-Identifier: Apache-2.0
"""Adaptive: keeps the blocks that save the most time for each second in a slot.

It learns from observed prompts how soon blocks are used again, by turn, pace and kind
(`history.py`) and as a function of age (`reuse_model.py`), and weighs the expected gain by the cost
of a miss. Nothing is tuned beforehand: the policy acts as LRU until it has seen enough prompts, and
whenever LRU would have served more blocks (`Trial`). Tails go before heads: a held block goes after
its followers in a chain, except where these may not go. Until the first `observe` it is LRU at the
cost of LRU, for owners that do not pass prompts on.

It also remembers blocks that are gone: three times its owner's number of blocks plus `MIN_GONE`,
but at most `MAX_GONE`. A block takes about 400 bytes.
"""

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

# Prompts that are seen before the policy is trusted for the first time.
WARM_UP = 128
# Prompts for which a policy that fell behind is set aside: the first time, and at most.
SUSPEND = 512
MAX_SUSPEND = 1 << 14
# Prompts after which a result counts half.
HALF_LIFE = 1024
# The policy fell behind if it lost more than this share of blocks and so many standard deviations.
MARGIN = 0.002
DEVIATIONS = 1.5

MIN_GONE = 16_384
MAX_GONE = 262_144


class Trial:
    """Compares a policy with LRU: whether the policy serves at least as many blocks.

    An LRU of the same capacity runs beside the policy, with keys only. A policy that falls behind
    by more than chance is set aside for a while, each time for twice as long. `is_trusted` says
    whether to follow the policy now."""

    def __init__(self, capacity: int) -> None:
        self.is_trusted = False
        self._capacity = capacity
        self._lru: OrderedDict[bytes, None] = OrderedDict()
        self._decide_at = WARM_UP
        self._suspend = SUSPEND
        self._prompts = 0
        # Blocks, with older prompts weighing less: requested; served by LRU only; squares of these.
        self._asked = self._lost = self._variance = 0.0

    def compare_prompt(self, chain: Sequence[bytes], hits: int) -> None:
        """Count a prompt of which `hits` leading blocks were held under the policy."""
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
        """Return how many leading blocks of the chain LRU holds; then insert the chain into it."""
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
    """Up to `count` blocks of the runs, the first run first; changes nothing. No block goes before
    its followers in a chain, because the followers are useless without it. A block whose followers
    are held and stay is passed over, with all blocks before it in its run. It is taken as soon as
    its followers are taken."""
    taken: dict[Block, None] = {}
    if count <= 0:
        return taken
    left: dict[Block, int] = {}  # by parent of taken blocks: its followers that stay
    waiting: set[Run] = set()  # passed over because of their followers
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
    """The policy of an owner of `capacity` blocks. A key costs O(1) on average; `victims` is linear
    in the number of blocks that it visits, and in the number of classes."""

    learns = True

    def __init__(self, capacity: int, cost: MissCost | None = None) -> None:
        gone = min(MAX_GONE, 3 * capacity + MIN_GONE)
        self._history = History(capacity + gone, ReuseModel(), cost=cost)
        self._trial = Trial(capacity)
        self._untold: LruPolicy | None = LruPolicy()  # used until the first prompt

    def __len__(self) -> int:
        return self._history.num_held if self._untold is None else len(self._untold.order)

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        if self._untold is not None:
            held = self._untold.order
            self._untold = None
            self._history.now = now  # the blocks held count as used at the first prompt
            self.insert(held)
        hits = self._history.record_prompt(chain, now)
        self._trial.compare_prompt(chain, hits)

    def insert(self, keys: Iterable[bytes]) -> None:
        if self._untold is not None:
            self._untold.insert(keys)
            return
        self._history.mark_held(keys)

    def touch(self, keys: Iterable[bytes]) -> None:
        # `observe` has recorded the uses of a prompt.
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
        """See EvictionPolicy. Compares whole runs, as if every block of a run may go."""
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
        """The keys of up to `count` blocks, from runs (blocks last used by one prompt, which age
        together) that are worth less than `limit`."""
        taken = take_tails_first(self._runs(limit), count, may_evict)
        chosen = [block.key for block in taken]
        if limit == inf and len(chosen) < count:
            # Where tails may not go, the blocks before them go instead.
            others = (b for run in self._runs(limit) for b in run.tail_first() if b not in taken)
            chosen += islice((b.key for b in others if may_evict(b.key)), count - len(chosen))
        return chosen

    def _runs(self, limit: float) -> Iterator[Run]:
        """Runs that are worth less than `limit`, in the order in which they should go."""
        queues = self._history.queues
        ranked = queues.by_value if self._trial.is_trusted else queues.by_age
        for value, runs in ranked(self._history.now):
            if value >= limit:
                break
            yield from runs
