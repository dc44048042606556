# SPDX-License-Identifier: Apache-2.0
"""Statistics of the tiers for vLLM's log and its /metrics.

A report has the value of each gauge, and the growth of each counter since the last report, because
vLLM sums reports. The metrics are StrataTier's (`../tier_metrics.py`) and three more."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ..tier_metrics import CONNECTOR_COUNTERS, COUNTERS, DAMAGED, GAUGES, PREFIX, TELL_SECONDS

COUNTED, GAUGED = "counters", "gauges"
SLAB = "cpu"

Values = dict[str, dict[str, float]]  # name -> label -> value


class StrataStats(KVConnectorStats):
    """A report of the tiers: `data` has the growth of counters and the values of gauges."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {COUNTED: {}, GAUGED: {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counters of a later report, and take over its gauges."""
        for name, values in other.data.get(COUNTED, {}).items():
            mine = self.data.setdefault(COUNTED, {}).setdefault(name, {})
            for label, value in values.items():
                mine[label] = mine.get(label, 0) + value
        for name, values in other.data.get(GAUGED, {}).items():
            self.data.setdefault(GAUGED, {}).setdefault(name, {}).update(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values in a line of vLLM's log: growth of counters, and fill of tiers."""
        line: dict[str, int | float] = {}
        for part in (COUNTED, GAUGED):
            for name, values in self.data.get(part, {}).items():
                if name != "tier_capacity_bytes":
                    line |= {f"{label} {name}": value for label, value in values.items()}
        return line

    def is_empty(self) -> bool:
        return not (self.data.get(COUNTED) or self.data.get(GAUGED))


class StatsSource:
    """Makes StrataStats from the scheduler side's counters, at most one report per second."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], float] = {}
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def make(self, stats: Mapping[str, Any]) -> StrataStats | None:
        """Make StrataStats; None if `stats` is empty."""
        self._next = time.monotonic() + TELL_SECONDS
        if not stats:
            return None
        counters: Values = {}
        gauges: Values = {name: {} for name in GAUGES}
        for tier, each in stats["tiers"].items():
            is_up = tier not in stats["down"]
            values = (each["capacity_bytes"], each["used_bytes"], each["blocks"], is_up)
            for name, value in zip(GAUGES, values, strict=True):
                gauges[name][tier] = float(value)
            totals = (
                each["stored_bytes"],
                each["loaded_bytes"],
                each["evicted_blocks"],
                each["dropped_stores"],
                sum(each["rejected"].values()),
                sum(each["errors"].values()),
                stats["declined_tokens"].get(tier, 0),
            )
            for name, total in zip(COUNTERS, totals, strict=True):
                self._add_counter_delta(counters, name, tier, total)
        for tier, total in stats["tokens_loaded"].items():
            self._add_counter_delta(counters, "loaded_tokens", tier, total)
        for reason, total in stats["failures"].items():
            self._add_counter_delta(counters, "load_failures", reason, total)
        self._add_counter_delta(counters, DAMAGED, SLAB, stats["damaged_blocks"])
        return StrataStats(data={COUNTED: counters, GAUGED: gauges})

    def _add_counter_delta(self, counters: Values, name: str, label: str, total: float) -> None:
        grown = total - self._told.get((name, label), 0)
        if grown > 0:
            self._told[name, label] = total
            counters.setdefault(name, {})[label] = grown


class StrataPromMetrics(KVConnectorPromMetrics):
    """Metrics on vLLM's /metrics, under `stratakv:`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._engines = per_engine_labelvalues
        self._gauges = {
            name: self._gauge_cls(
                name=PREFIX + name, documentation=text, labelnames=[*labelnames, "tier"]
            )
            for name, text in GAUGES.items()
        }
        labelled = {name: ("tier", text) for name, text in COUNTERS.items()} | CONNECTOR_COUNTERS
        self._counters = {
            name: self._counter_cls(
                name=PREFIX + name, documentation=text, labelnames=[*labelnames, label]
            )
            for name, (label, text) in labelled.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self._engines[engine_idx]
        for name, values in transfer_stats_data.get(GAUGED, {}).items():
            for label, value in values.items():
                self._gauges[name].labels(*engine, label).set(value)
        for name, values in transfer_stats_data.get(COUNTED, {}).items():
            for label, value in values.items():
                self._counters[name].labels(*engine, label).inc(value)
