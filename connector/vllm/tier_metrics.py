# SPDX-License-Identifier: Apache-2.0
"""The tiers' metrics for vLLM, in addition to vLLM's own counts of every secondary tier. vLLM sums
the reports of a counter, so each report has the growth since the last report."""

from __future__ import annotations

import time
from typing import Any

from .build import Tiers

PREFIX = "stratakv:"
TIER = ("tier",)
TELL_SECONDS = 1.0  # the shortest time between two reports

GAUGES = {
    "tier_capacity_bytes": "bytes that a tier may take",
    "tier_used_bytes": "bytes that a tier takes",
    "tier_blocks": "blocks in a tier",
    "tier_up": "1 while a tier can be asked",
}
COUNTERS = {
    "tier_stored_bytes": "bytes of blocks stored in a tier",
    "tier_loaded_bytes": "bytes of blocks loaded from a tier",
    "tier_evicted_blocks": "blocks that a tier evicted",
    "tier_dropped_stores": "blocks that a tier could not take",
    "tier_rejected_blocks": "records refused because they were damaged or another block's",
    "tier_errors": "faults of a tier",
    "declined_tokens": "prompt tokens a tier had that were quicker to compute",
}
DAMAGED = "damaged_blocks"
# Metrics of StrataConnector: name -> (its only label, its meaning).
CONNECTOR_COUNTERS = {
    "loaded_tokens": ("tier", "prompt tokens that came from a tier"),
    "load_failures": ("reason", "loads of which something, or everything, did not come"),
    DAMAGED: ("tier", "blocks whose bytes changed in memory, found when they were loaded"),
}


def definitions() -> dict[str, Any]:
    """Return the definitions of all metrics, in vLLM's form."""
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

    made: dict[str, Any] = {}
    for name, text in GAUGES.items():
        made[PREFIX + name] = OffloadingGaugeMetadata(documentation=text, labelnames=TIER)
    for name, text in COUNTERS.items():
        made[PREFIX + name] = OffloadingCounterMetadata(documentation=text, labelnames=TIER)
    text = "blocks whose bytes changed in memory, found when they were loaded"
    made[PREFIX + DAMAGED] = OffloadingCounterMetadata(documentation=text)
    return made


class TierMetrics:
    """Reports the counters of `tiers` to vLLM."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._told: dict[tuple[str, str], float] = {}
        self._next = 0.0

    def build_stats(self) -> Any:
        """Return vLLM's OffloadingConnectorStats; None within TELL_SECONDS of the last report."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + TELL_SECONDS
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
            OffloadingConnectorStats,
        )

        payload = OffloadingConnectorStats()
        hierarchy, transfers = self._tiers.hierarchy, self._tiers.transfers
        with transfers.lock:
            stats = hierarchy.stats()
            up = {store.name: store.is_up for store in hierarchy.stores}
            declined = dict(self._tiers.economics.declined_tokens)
        for tier, each in stats.items():
            gauges = (each.capacity_bytes, each.used_bytes, each.blocks, up.get(tier, True))
            for name, value in zip(GAUGES, gauges, strict=True):
                payload.set_gauge(PREFIX + name, float(value), (tier,))
            counters = (
                each.stored_bytes,
                each.loaded_bytes,
                each.evicted_blocks,
                each.dropped_stores,
                sum(each.rejected.values()),
                sum(each.errors.values()),
                declined.get(tier, 0),
            )
            for name, value in zip(COUNTERS, counters, strict=True):
                self._increase_counter(payload, name, tier, value)
        self._increase_counter(payload, DAMAGED, "", transfers.damaged)
        return payload

    def _increase_counter(self, payload: Any, name: str, tier: str, value: float) -> None:
        grown = value - self._told.get((name, tier), 0)
        if grown > 0:
            self._told[name, tier] = value
            payload.increase_counter(PREFIX + name, grown, (tier,) if tier else ())
