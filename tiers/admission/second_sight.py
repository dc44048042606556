# SPDX-License-Identifier: Apache-2.0
"""Second sight: a block is written once two prompts have asked for it.

Knows nothing of time. Remembers no more names than four times what the tier below holds, and no
more than `MAX_NAMES`, the least recently seen forgotten first; a name takes about 200 bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .base import AdmissionFilter

CAPACITIES = 4
MIN_NAMES = 16_384
MAX_NAMES = 262_144


class SecondSight(AdmissionFilter):
    """For a tier of `blocks_below` blocks."""

    learns = True

    def __init__(self, blocks_below: int) -> None:
        self._limit = min(MAX_NAMES, max(MIN_NAMES, CAPACITIES * blocks_below))
        self._seen_again: OrderedDict[bytes, bool] = OrderedDict()

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        seen = self._seen_again
        for key in reversed(chain):
            seen[key] = key in seen
            seen.move_to_end(key)
        while len(seen) > self._limit:
            seen.popitem(last=False)

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        return [self._seen_again.get(key, False) for key in keys]
