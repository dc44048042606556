# SPDX-License-Identifier: Apache-2.0
"""Settings of Python's garbage collector for a process that runs engine steps."""

from __future__ import annotations

import gc

# Net number of new objects between two scans of the young ones. With full tiers the numbers of new
# and freed blocks always differ by more than Python's 700, and no block is garbage.
YOUNG_OBJECTS = 10_000


def settle_collector() -> None:
    """Exclude all present objects from garbage collection, and scan new ones less often. Called
    when a process is built: its objects stay alive, so scans during steps would find no garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
