# SPDX-License-Identifier: Apache-2.0
"""Settings of Python's garbage collector in a process that runs steps."""

from __future__ import annotations

import gc

# New objects, less freed ones, until the young ones are scanned. With full tiers the numbers of new
# and freed blocks differ by more than Python's 700 all the time, and none of them is garbage.
YOUNG_OBJECTS = 10_000


def settle_collector() -> None:
    """Exclude all present objects from collection, and scan new ones seldom. Called when the
    process is built: its objects stay, so they need not be scanned during steps."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
