# SPDX-License-Identifier: Apache-2.0
"""The traffic between the slab and one store below it, in plain numbers since start.

A *promotion* is a batch of blocks read up from the store, a *cascade* one written down to it.
Knows nothing of keys or of why a batch was moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..histogram import IO_SECONDS, Histogram


@dataclass(slots=True)
class Traffic:
    """Written by the hierarchy's thread."""

    active_promotions: int = 0  # now
    active_cascades: int = 0  # now
    # From asking the store to its answer, of batches that were answered.
    promotion_seconds: Histogram = field(default_factory=lambda: Histogram(IO_SECONDS))
    promotion_failures: int = 0  # batches that broke or were late
    promotion_allocation_failures: int = 0  # loads cut short because the slab had no slot
    cascade_failures: int = 0  # batches that broke or were late
    late_write_blocks: int = 0  # now: slots held by batches that are late and have not ended
    # What the slab evicted before the store could take it, and in how many rounds of eviction.
    lost_blocks: int = 0
    lost_stores: int = 0
    unadmitted_blocks: int = 0  # blocks that the admission filter found not worth writing
    breaker: str = "closed"  # now: "closed", "open" or "probing"
    breaker_opened: int = 0  # times
    # The same of writes alone; the one above is of all else.
    write_breaker: str = "closed"
    write_breaker_opened: int = 0
