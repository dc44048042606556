# SPDX-License-Identifier: Apache-2.0
"""What the core and its tiers count, translated from their `stats` into metric families.

The tables below name, for each figure of `stats`, the metric that shows it. Only what `stats`
holds is shown. The figures are asked for at each scrape; a scrape is answered also when the core
is busy or dead, with the last figures, their age, and whether the core is alive. Knows nothing of
requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..client.base import EngineClient, EngineDead

logger = logging.getLogger(__name__)


class Shown(NamedTuple):
    """How one figure is shown."""

    name: str
    is_counter: bool
    text: str


# Of the scheduler. It makes a counter when there is something to count; until then it is 0.
SCHEDULER: dict[str, Shown] = {
    "num_running": Shown("vllm:num_requests_running", False, "Requests being computed."),
    "num_waiting": Shown("vllm:num_requests_waiting", False, "Requests in the queue."),
    "num_parked": Shown(
        "stratakv:num_requests_loading", False, "Requests whose blocks are being loaded."
    ),
    "pool_usage": Shown("vllm:kv_cache_usage_perc", False, "Held part of the KV pool, 1 is all."),
    "num_blocks": Shown("stratakv:pool_blocks", False, "Blocks of the KV pool."),
    "num_free_blocks": Shown(
        "stratakv:pool_free_blocks", False, "Blocks of the KV pool that can be had."
    ),
    "evicted_blocks": Shown(
        "stratakv:pool_evicted_blocks", True, "Named blocks that the KV pool reused."
    ),
    "preemptions": Shown("vllm:num_preemptions", True, "Requests sent back to the queue."),
    "steps": Shown("stratakv:steps", True, "Steps of the engine."),
    "scheduled_tokens": Shown("stratakv:scheduled_tokens", True, "Tokens computed."),
    "loads": Shown("stratakv:loads", True, "Loads from the tiers that were begun."),
    "loads_failed": Shown(
        "stratakv:loads_failed", True, "Loads that failed; their requests computed."
    ),
    "loads_given_up": Shown(
        "stratakv:loads_given_up", True, "Loaded blocks given back to make room."
    ),
}

# Of the connector, where there is one.
CONNECTOR: dict[str, Shown] = {
    "stores": Shown("stratakv:stores", True, "Copy jobs from the KV pool to the tiers."),
    "stored_blocks": Shown("stratakv:stored_blocks", True, "Blocks copied out of the KV pool."),
    "seconds_loaded": Shown("stratakv:load_seconds_paid", True, "Time that requests were loading."),
    "loads_in_flight": Shown("stratakv:loads_in_flight", False, "Loads under way."),
    "stores_in_flight": Shown("stratakv:stores_in_flight", False, "Stores under way."),
}
FAILURES = Shown("stratakv:offload_failures", True, "Transfers that failed.")  # label: reason

# Of each tier, with the label `tier`.
TIER: dict[str, Shown] = {
    "capacity_bytes": Shown("stratakv:tier_capacity_bytes", False, "Bytes a tier may hold."),
    "used_bytes": Shown("stratakv:tier_used_bytes", False, "Bytes a tier holds."),
    "blocks": Shown("stratakv:tier_blocks", False, "Blocks a tier holds."),
    "hits": Shown("stratakv:tier_hits", True, "Blocks asked for and held."),
    "misses": Shown("stratakv:tier_misses", True, "Blocks asked for and not held."),
    "stored_blocks": Shown("stratakv:tier_stored_blocks", True, "Blocks taken in."),
    "loaded_blocks": Shown("stratakv:tier_loaded_blocks", True, "Blocks given out."),
    "stored_bytes": Shown("stratakv:tier_stored_bytes", True, "Bytes taken in."),
    "loaded_bytes": Shown("stratakv:tier_loaded_bytes", True, "Bytes given out."),
    "evicted_blocks": Shown("stratakv:tier_evicted_blocks", True, "Blocks displaced by others."),
    "dropped_stores": Shown("stratakv:tier_dropped_stores", True, "Blocks refused or lost."),
    "store_seconds": Shown("stratakv:tier_store_seconds", True, "Time spent on storing."),
    "load_seconds": Shown("stratakv:tier_load_seconds", True, "Time spent on loading."),
}

# Of each tier, by a further label.
TIER_BY_LABEL: dict[str, tuple[Shown, str]] = {
    "rejected": (
        Shown("stratakv:checksum_rejects", True, "Damaged records that were not served."),
        "defect",
    ),
    "errors": (Shown("stratakv:tier_errors", True, "Faults of a tier, each a miss."), "kind"),
}

# Sums and quotients of several figures.
QUERIES = Shown("vllm:prefix_cache_queries", True, "Prompt tokens looked up in the KV pool.")
HITS = Shown("vllm:prefix_cache_hits", True, "Prompt tokens found in the KV pool.")
EXTERNAL_QUERIES = Shown(
    "vllm:external_prefix_cache_queries", True, "Prompt tokens looked up in the tiers below it."
)
EXTERNAL_HITS = Shown(
    "vllm:external_prefix_cache_hits", True, "Prompt tokens that came from the tiers."
)
CPU_USAGE = Shown("vllm:kv_offload_cpu_cache_usage_perc", False, "Used part of the cpu tier.")

UP = Shown("stratakv:engine_up", False, "1 while the engine core is alive.")
AGE = Shown("stratakv:stats_age_seconds", False, "Age of the core's figures.")


class CoreCollector(Collector):
    """Keeps the last figures and shows them. `labels` go on every metric."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._names = list(labels)
        self._values = list(labels.values())
        self._stats: Mapping[str, Any] = {}
        self._taken_seconds: float | None = None
        self._is_alive = True

    async def refresh(self, client: EngineClient, timeout_seconds: float) -> None:
        """Take new figures, if the core gives them in time."""
        try:
            self._stats = await client.call("stats", timeout_seconds=timeout_seconds)
            self._taken_seconds = time.monotonic()
        except (TimeoutError, EngineDead, ValueError) as error:
            logger.warning("metrics show old figures, since the core gave none: %s", error)
        self._is_alive = client.is_alive

    def describe(self) -> list[Metric]:
        """Nothing: what is shown depends on what the core has."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metric families of the last figures."""
        yield self._metric(UP, float(self._is_alive))
        if self._taken_seconds is None:
            return
        yield self._metric(AGE, time.monotonic() - self._taken_seconds)
        scheduler = self._stats["scheduler"]
        yield from self._table(SCHEDULER, scheduler)
        # Every prompt is looked up in the pool, and what is not found there in the tiers.
        queries, hits = scheduler.get("prompt_tokens", 0), scheduler.get("cached_tokens_pool", 0)
        yield self._metric(QUERIES, queries)
        yield self._metric(HITS, hits)
        connector = self._stats["connector"]
        if connector is None:
            return
        yield from self._table(CONNECTOR, connector)
        yield self._by_label(FAILURES, "reason", connector["failures"])
        tiers: Mapping[str, Mapping[str, Any]] = connector["tiers"]
        external = sum(scheduler.get(f"cached_tokens_{name}", 0) for name in tiers)
        yield self._metric(EXTERNAL_QUERIES, queries - hits)
        yield self._metric(EXTERNAL_HITS, external)
        yield from self._tiers(tiers)

    def _table(self, table: Mapping[str, Shown], figures: Mapping[str, Any]) -> Iterator[Metric]:
        for key, shown in table.items():
            if shown.is_counter or key in figures:
                yield self._metric(shown, figures.get(key, 0))

    def _tiers(self, tiers: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        for key, shown in TIER.items():
            yield self._by_label(shown, "tier", {n: f[key] for n, f in tiers.items() if key in f})
        for key, (shown, label) in TIER_BY_LABEL.items():
            family = self._family(shown, "tier", label)
            for name, figures in tiers.items():
                for value, count in figures.get(key, {}).items():
                    family.add_metric([*self._values, name, value], count)
            yield family
        cpu = tiers.get("cpu")
        if cpu is not None and cpu["capacity_bytes"]:
            yield self._metric(CPU_USAGE, cpu["used_bytes"] / cpu["capacity_bytes"])

    def _by_label(self, shown: Shown, label: str, figures: Mapping[str, float]) -> Metric:
        family = self._family(shown, label)
        for value, number in figures.items():
            family.add_metric([*self._values, value], number)
        return family

    def _metric(self, shown: Shown, value: float) -> Metric:
        family = self._family(shown)
        family.add_metric(self._values, value)
        return family

    def _family(self, shown: Shown, *labels: str) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if shown.is_counter else GaugeMetricFamily
        return kind(shown.name, shown.text, labels=[*self._names, *labels])
