# SPDX-License-Identifier: Apache-2.0
"""The metrics of the engine core and its tiers, made from the core's replies to the call `stats`.

`metric_tables.py` maps the values in `stats` to metrics. Each scrape requests new values from the
engine core. If the core does not reply, the scrape has the last values, the age of the last values,
and whether the core is alive."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ....tiers.hierarchy.breaker import BreakerState
from ...client.base import EngineClient, EngineDead
from . import metric_tables as tables
from .metric_tables import Kind, Shown, Table

logger = logging.getLogger(__name__)

CoreStats = Mapping[str, Any]
# A sample of a metric: the values of its labels, and a number or a histogram.
Sample = tuple[tuple[str, ...], Any]

_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_FAMILIES: dict[Kind, type[_Family]] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


class CoreCollector(Collector):
    """A Prometheus collector that keeps the last values. Every metric has the `labels`."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._names = list(labels)
        self._values = list(labels.values())
        self._stats: CoreStats = {}
        self._taken_seconds: float | None = None
        self._is_alive = True

    async def refresh(self, client: EngineClient, timeout_seconds: float) -> None:
        """Request new values from the engine core; without a timely reply, keep the last values."""
        try:
            self._stats = await client.call("stats", timeout_seconds=timeout_seconds)
            self._taken_seconds = time.monotonic()
        except (TimeoutError, EngineDead, ValueError) as error:
            logger.warning("metrics show old figures, since the core gave none: %s", error)
        self._is_alive = client.is_alive

    def describe(self) -> list[Metric]:
        """Return no metric families, because the families depend on the engine core's parts."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield self._one(tables.UP, float(self._is_alive))
        if self._taken_seconds is None:
            return
        yield self._one(tables.AGE, time.monotonic() - self._taken_seconds)
        stats = self._stats
        scheduler, connector = stats["scheduler"], stats["connector"]
        yield from self._scheduler(scheduler)
        yield from self._table(tables.POOL, stats["pool"])
        yield from self._table(tables.SESSIONS, stats["sessions"])
        yield from self._adapters(stats["adapters"])
        if stats["speculation"] is not None:
            yield from self._speculation(stats["speculation"])
        yield from self._core(stats["core"], () if connector is None else connector["tiers"])
        if connector is not None:
            yield from self._connector(connector, scheduler)
            yield from self._table(tables.HANDOVER, stats["handover"])
            if connector.get("serving") is not None:
                yield from self._table(tables.SERVING, connector["serving"])
            yield from self._tiers(connector["tiers"])
            yield from self._tiering(connector)

    def _scheduler(self, figures: CoreStats) -> Iterator[Metric]:
        yield from self._table(tables.SCHEDULER, figures)
        deferred = figures["num_deferred"]
        reasons = {"capacity": figures["num_waiting"] - deferred, "deferred": deferred}
        yield self._by_label(tables.WAITING_BY_REASON, "reason", reasons)
        for shown, prefix in (
            (tables.RECOMPUTES, "recomputes"), (tables.RECOMPUTED_TOKENS, "recomputed_tokens"),
        ):  # fmt: skip
            counts = {cause: figures.get(f"{prefix}_{cause}", 0) for cause in tables.CAUSES}
            yield self._by_label(shown, "cause", counts)

    def _adapters(self, figures: CoreStats) -> Iterator[Metric]:
        """Yield the metric of LoRA adapters with requests; nothing if the engine has no LoRA."""
        if not figures["max_adapters"]:
            return
        states = ("running", "waiting")
        names = dict.fromkeys([*figures["loaded"], *figures["running"], *figures["waiting"]])
        samples = [((name, each), figures[each].get(name, 0)) for each in states for name in names]
        yield self._family(tables.LORA_REQUESTS, ("adapter", "state"), samples)
        labels = {"max_lora": str(figures["max_adapters"])}
        labels |= {f"{each}_lora_adapters": ",".join(figures[each]) for each in states}
        # The value of a LORA_INFO sample is the time, so gateways can find the newest sample.
        yield self._family(tables.LORA_INFO, labels, [(tuple(labels.values()), time.time())])

    def _core(self, figures: CoreStats, tiers: Iterable[str]) -> Iterator[Metric]:
        yield from self._table(tables.CORE, figures)
        yield self._info(tables.CACHE_CONFIG, figures["cache_config"])
        if figures["offload_config"] is not None:
            yield self._info(tables.OFFLOAD_CONFIG, figures["offload_config"])
        # Until the seconds per token are measured, the saved time is unknown, and 0 would be wrong.
        if figures["seconds_per_token"] is not None:
            yield self._one(tables.PRICE, figures["seconds_per_token"])
            saved = figures["saved_seconds"]
            sources = {source: saved.get(source, 0.0) for source in ("pool", *tiers)}
            yield self._by_label(tables.SAVED, "source", sources)

    def _speculation(self, figures: CoreStats) -> Iterator[Metric]:
        yield from self._table(tables.SPECULATION, figures)
        by_place = {str(place): count for place, count in enumerate(figures["accepted_at"])}
        yield self._by_label(tables.ACCEPTED_BY_PLACE, "position", by_place)
        yield self._by_label(tables.SPECULATION_GAIN, "requests", figures["gain"])

    def _connector(self, figures: CoreStats, scheduler: CoreStats) -> Iterator[Metric]:
        yield from self._table(tables.CONNECTOR, figures)
        yield self._by_label(tables.PREFILL_WAITS, "end", figures["prefill_waits"])
        yield self._by_label(tables.FAILURES, "reason", figures["failures"])
        yield self._by_label(tables.BLOCKS_DROPPED, "cause", figures["blocks_dropped"])
        yield self._by_label(tables.DECLINED, "tier", figures["declined_tokens"])
        for key, shown in tables.ESTIMATES:
            # The estimate is None for a tier that was not measured or is always slower to load.
            known = {tier: n for tier, n in figures["estimates"][key].items() if n is not None}
            yield self._by_label(shown, "tier", known)
        if (rate := figures["estimates"]["prefill_tokens_per_second"]) is not None:
            yield self._one(tables.PREFILL_RATE, rate)
        hits = sum(scheduler.get(f"cached_tokens_{name}", 0) for name in figures["tiers"])
        yield self._one(tables.EXTERNAL_QUERIES, scheduler.get("external_queried_tokens", 0))
        yield self._one(tables.EXTERNAL_HITS, hits)

    def _tiers(self, tiers: Mapping[str, CoreStats]) -> Iterator[Metric]:
        for key, shown in tables.TIER:
            yield self._by_label(shown, "tier", {name: f[key] for name, f in tiers.items()})
        for key, label, shown in tables.TIER_BY_LABEL:
            samples = [
                ((name, value), count)
                for name, figures in tiers.items()
                for value, count in figures[key].items()
            ]
            yield self._family(shown, ("tier", label), samples)
        slab = next(iter(tiers.values()))
        reading, filling = slab["pinned_blocks"], slab["reserved_blocks"]
        for shown, blocks in (
            (tables.CPU_USAGE, reading + filling),
            (tables.CPU_READ_USAGE, reading),
            (tables.CPU_WRITE_USAGE, filling),
        ):
            yield self._one(shown, blocks / slab["capacity_blocks"])

    def _tiering(self, connector: CoreStats) -> Iterator[Metric]:
        """Yield the metrics whose label is a tier's position and name."""
        tiers = connector["tiers"]
        places = {name: f"{i}:{name}" if i else "0:primary" for i, name in enumerate(tiers)}
        for key, shown in tables.LOOKUPS:
            counts = {places[name]: connector[key].get(name, 0) for name in tiers}
            yield self._by_label(shown, "tier", counts)
        for table, by_store in (
            (tables.STORE, {name: tiers[name] for name in connector["traffic"]}),
            (tables.TRAFFIC, connector["traffic"]),
        ):
            for key, shown in table:
                values = {places[name]: figures[key] for name, figures in by_store.items()}
                yield self._by_label(shown, "tier", values)

        yield from self._health(connector["traffic"])

    def _health(self, traffic: Mapping[str, CoreStats]) -> Iterator[Metric]:
        """Yield the health of the stores below the cpu tier, with their circuit breakers."""
        for key, shown in tables.STORE_HEALTH:
            yield self._by_label(shown, "tier", {name: f[key] for name, f in traffic.items()})
        for key, shown in tables.BREAKERS:
            states = [
                ((name, state.value), float(figures[key] == state.value))
                for name, figures in traffic.items()
                for state in BreakerState
            ]
            yield self._family(shown, ("tier", "state"), states)
        skipped = sum(figures["unadmitted_blocks"] for figures in traffic.values())
        yield self._one(tables.STORES_SKIPPED, skipped)

    def _table(self, table: Table, figures: CoreStats) -> Iterator[Metric]:
        for key, shown in table:
            yield self._one(
                shown, figures.get(key, 0) if shown.kind is Kind.COUNTER else figures[key]
            )

    def _info(self, shown: Shown, settings: Mapping[str, str]) -> Metric:
        return self._family(shown, tuple(settings), [(tuple(settings.values()), 1.0)])

    def _by_label(self, shown: Shown, label: str, figures: CoreStats) -> Metric:
        return self._family(shown, (label,), [((value,), n) for value, n in figures.items()])

    def _one(self, shown: Shown, figure: Any) -> Metric:
        return self._family(shown, (), [((), figure)])

    def _family(self, shown: Shown, labels: Iterable[str], samples: Iterable[Sample]) -> Metric:
        family = _FAMILIES[shown.kind](shown.name, shown.text, labels=[*self._names, *labels])
        for values, figure in samples:
            all_values = [*self._values, *values]
            if isinstance(family, HistogramMetricFamily):
                family.add_metric(all_values, _buckets(figure), figure["total"])
            else:
                family.add_metric(all_values, figure)
        return family


def _buckets(histogram: CoreStats) -> list[tuple[str, float]]:
    """Return each bound with the number of observations up to the bound. The last bound is +Inf."""
    buckets = []
    so_far = 0
    for bound, count in zip([*histogram["bounds"], "+Inf"], histogram["counts"], strict=True):
        so_far += count
        buckets.append((str(bound), float(so_far)))
    return buckets
