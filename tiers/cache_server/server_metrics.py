# SPDX-License-Identifier: Apache-2.0
"""The cache server's Prometheus metrics: for each tenant store, for each call and for the server.
Label values come from the tenants file, the protocol and grpc, so the number of label values is
limited. Each scrape reads the statistics of the tenant stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..base import TierStats
from ..errors import TierClosed
from ..wire.rpc import METHODS
from .access.call_connections import REASONS
from .served_store import ServedStore
from .transports.session_server import REFUSALS

PREFIX = "stratakv_cache:"
_OTHER = "other"  # label of calls of other services
_CALL_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip

# Rows: metric name, whether the metric is a counter, help text, field of TierStats.
_TIERS = (
    ("tier_capacity_bytes", False, "Bytes the tier may hold.", "capacity_bytes"),
    ("tier_used_bytes", False, "Bytes it holds.", "used_bytes"),
    ("tier_blocks", False, "Blocks it holds.", "blocks"),
    ("tier_hits", True, "Blocks asked for and there.", "hits"),
    ("tier_misses", True, "Blocks asked for and not there.", "misses"),
    ("tier_stored_blocks", True, "Blocks taken in.", "stored_blocks"),
    ("tier_loaded_blocks", True, "Blocks given out.", "loaded_blocks"),
    ("tier_stored_bytes", True, "Bytes taken in.", "stored_bytes"),
    ("tier_loaded_bytes", True, "Bytes given out.", "loaded_bytes"),
    ("tier_evicted_blocks", True, "Blocks displaced by others.", "evicted_blocks"),
    ("tier_dropped_stores", True, "Blocks refused or lost.", "dropped_stores"),
)


class ServerMetrics:
    """All metrics of the server, in a separate registry. `tenant_stores` returns the open stores.
    `gauges` returns the other gauges: name without prefix → help text and value."""

    def __init__(
        self,
        tenant_stores: Callable[[], Mapping[str, ServedStore]],
        gauges: Callable[[], Mapping[str, tuple[str, float]]],
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_State(tenant_stores, gauges))
        ProcessCollector(registry=self.registry)
        self._turned_away = Counter(
            PREFIX + "connections_turned_away",
            "Connections for calls that were ended: of strangers who showed no credentials in "
            "time, or were too many, and of tenants beyond their share.",
            ("reason",), registry=self.registry,
        )  # fmt: skip
        for reason in REASONS:  # every counter is shown as 0 from the start
            self._turned_away.labels(reason)
        self._refused = Counter(
            PREFIX + "data_connections_refused",
            "Data connections that were refused or ended: without a good ticket, with one of a "
            "tenant who had no place, silent where others waited, or of credentials that are gone.",
            ("reason",), registry=self.registry,
        )  # fmt: skip
        for reason in REFUSALS:
            self._refused.labels(reason)
        self._reloads = Counter(
            PREFIX + "reloads",
            "Times that tenants and certificates were to be read anew: applied, or refused and "
            "left as they were.",
            ("result",), registry=self.registry,
        )  # fmt: skip
        for result in ("applied", "refused"):
            self._reloads.labels(result)
        self._names = {method.path: method.name for method in METHODS}
        self._calls = Counter(
            PREFIX + "calls", "Calls that ended.", ("method", "code"), registry=self.registry
        )
        seconds = Histogram(
            PREFIX + "call_seconds", "From a call's arrival to its end.", ("method",),
            buckets=_CALL_SECONDS, registry=self.registry,
        )  # fmt: skip
        # Labelled histograms are kept: finding one by label costs as much as an observation.
        self._seconds = {name: seconds.labels(name) for name in (*self._names.values(), _OTHER)}
        self._received = Counter(
            PREFIX + "stream_received_bytes", "Bytes of blocks that came by gRPC streams.",
            ("tenant",), registry=self.registry,
        )  # fmt: skip
        self._sent = Counter(
            PREFIX + "stream_sent_bytes", "Bytes of blocks that went by gRPC streams.",
            ("tenant",), registry=self.registry,
        )  # fmt: skip

    def call_ended(self, path: str, code: str, seconds: float) -> None:
        """Count a call that ended with the status `code` after `seconds`."""
        name = self._names.get(path, _OTHER)
        self._calls.labels(name, code).inc()
        self._seconds[name].observe(seconds)

    def turned_away(self, reason: str) -> None:
        self._turned_away.labels(reason).inc()

    def data_refused(self, reason: str) -> None:
        """Count a data connection that was refused or ended. `reason` is one of REFUSALS."""
        self._refused.labels(reason).inc()

    def reloaded(self, result: str) -> None:
        """Count a reload of tenants and certificates: `applied` or `refused`."""
        self._reloads.labels(result).inc()

    def received(self, tenant: str, num_bytes: int) -> None:
        self._received.labels(tenant).inc(num_bytes)

    def sent(self, tenant: str, num_bytes: int) -> None:
        self._sent.labels(tenant).inc(num_bytes)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class _State(Collector):
    """A collector that computes the metrics of tenant stores and the gauges at each scrape."""

    def __init__(
        self,
        tenant_stores: Callable[[], Mapping[str, ServedStore]],
        gauges: Callable[[], Mapping[str, tuple[str, float]]],
    ) -> None:
        self._tenant_stores = tenant_stores
        self._gauges = gauges
        self._started = time.time()  # wall-clock time, as Prometheus expects

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield every metric family. The registry calls this at each scrape."""
        started = GaugeMetricFamily(PREFIX + "start_time_seconds", "When the server started.")
        started.add_metric((), self._started)
        yield started
        for name, (text, value) in self._gauges().items():
            family = GaugeMetricFamily(PREFIX + name, text)
            family.add_metric((), value)
            yield family
        yield from _of_tenant_stores(self._tenant_stores())


def _of_tenant_stores(
    tenant_stores: Mapping[str, ServedStore],
) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
    leases = GaugeMetricFamily(PREFIX + "leases", "Leases that run.", labels=("room",))
    corrupt = CounterMetricFamily(
        PREFIX + "corrupt_blocks", "Blocks refused for their bytes were wrong.", labels=("room",)
    )
    expired = CounterMetricFamily(
        PREFIX + "expired_leases", "Leases that ended by their time.", labels=("room",)
    )
    late = CounterMetricFamily(
        PREFIX + "late_writers",
        "Writers of shared memory who were late: nothing of theirs was kept.", labels=("room",),
    )  # fmt: skip
    aborted = CounterMetricFamily(
        PREFIX + "aborted_blocks",
        "Blocks whose sender broke off before they had come whole.", labels=("room",),
    )  # fmt: skip
    families = [
        (CounterMetricFamily if is_counter else GaugeMetricFamily)(
            PREFIX + name, text, labels=("room", "tier")
        )
        for name, is_counter, text, _ in _TIERS
    ]
    for name, tenant_store in tenant_stores.items():
        try:
            tiers: Mapping[str, TierStats] = tenant_store.stats()
        except TierClosed:
            continue
        leases.add_metric((name,), tenant_store.num_leases)
        corrupt.add_metric((name,), tenant_store.corrupt_blocks)
        expired.add_metric((name,), tenant_store.expired_leases)
        late.add_metric((name,), tenant_store.late_writers)
        aborted.add_metric((name,), tenant_store.aborted_blocks)
        for tier, stats in tiers.items():
            for family, (*_, field) in zip(families, _TIERS, strict=True):
                family.add_metric((name, tier), getattr(stats, field))
    return [leases, corrupt, aborted, expired, late, *families]
