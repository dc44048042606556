# SPDX-License-Identifier: Apache-2.0
"""How Python collects garbage in a process that runs steps."""

from __future__ import annotations

import gc

# New objects, less those that went, until the young ones are looked through. Blocks that come to
# full tiers and go differ by more than Python's 700 all the time, and none of them is garbage.
YOUNG_OBJECTS = 10_000


def settle_collector() -> None:
    """Once everything is built: it stays, so it need not be scanned during steps; and what comes
    and goes with them is looked through seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
