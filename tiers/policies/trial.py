# SPDX-License-Identifier: Apache-2.0
"""A trial: whether a policy serves at least what LRU would have served, from what both were asked.

An LRU of the same capacity is kept beside it, in keys only. Where the policy falls behind by more
than chance, it is set aside for a while, each time for twice as long. Knows nothing of policies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import sqrt

# Prompts that are seen before the policy is trusted for the first time.
WARM_UP = 128
# Prompts for which it is set aside at first, and at most.
SUSPEND = 512
MAX_SUSPEND = 1 << 14
# Prompts after which a result counts half.
HALF_LIFE = 1024
# It fell behind: by this share of what was asked, and so many standard deviations.
MARGIN = 0.002
DEVIATIONS = 1.5


class Trial:
    """`is_trusted` says whether the policy is to be followed now."""

    def __init__(self, capacity: int) -> None:
        self.is_trusted = False
        self._capacity = capacity
        self._lru: OrderedDict[bytes, None] = OrderedDict()
        self._decide_at = WARM_UP
        self._suspend = SUSPEND
        self._prompts = 0
        # Of blocks, with older prompts counting less: asked for, served less than by LRU, and the
        # squares of the latter.
        self._asked = self._lost = self._variance = 0.0

    def observe(self, chain: Sequence[bytes], hits: int) -> None:
        """A prompt came, and so many of its leading blocks were held under the policy."""
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
        """What LRU holds of the chain, head first; then it takes the chain in."""
        lru = self._lru
        hits = next((i for i, key in enumerate(chain) if key not in lru), len(chain))
        for key in reversed(chain):
            lru[key] = None
            lru.move_to_end(key)
        while len(lru) > self._capacity:
            lru.popitem(last=False)
        return hits
