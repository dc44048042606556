# SPDX-License-Identifier: Apache-2.0
"""What must hold of a hierarchy's writes and breakers."""

from __future__ import annotations

from stratakv.tiers.hierarchy.breaker import MAX_PROBES
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.hierarchy.write_back import BATCHES_IN_FLIGHT, SHARES_OF_SLAB
from stratakv.tiers.hierarchy.writes import LATE_SHARE


def check_writes(hierarchy: Hierarchy) -> None:
    """At any time: so many batches at most, and so many slots held by those that are late."""
    num_slots = hierarchy.num_slots
    for write_back in hierarchy._write_backs._all:
        writes = write_back._writes
        batches = writes._batches
        late = [batch for batch in batches if batch.is_late]
        usual = [batch for batch in batches if not (batch.is_late or batch.is_probe)]
        assert len(usual) <= BATCHES_IN_FLIGHT
        assert sum(batch.is_probe for batch in batches) <= MAX_PROBES
        pinned = sum(len(batch.keys) for batch in batches)
        # Of a slab of a few slots a batch is more than its share.
        most = max(LATE_SHARE, BATCHES_IN_FLIGHT / SHARES_OF_SLAB) * num_slots + BATCHES_IN_FLIGHT
        assert not late or pinned <= most
        assert writes._store.traffic.late_write_blocks == sum(len(batch.keys) for batch in late)


def check_breakers(hierarchy: Hierarchy) -> None:
    """Soon after all is well: whoever works is asked, and written to if there is anything to
    write."""
    for store, write_back in zip(hierarchy._stores, hierarchy._write_backs._all, strict=True):
        assert store.breaker.allows, f"{store.name} is not asked any more"
        is_idle = store.write_breaker.allows or not write_back._dirty
        assert is_idle, f"no writes: {store.name}"
