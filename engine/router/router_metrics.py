# SPDX-License-Identifier: Apache-2.0
"""The router's Prometheus metrics. No label value comes from a request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .nodes import Nodes, Role

CLIENT = "client"  # the `leg` label of a client's whole request
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# The possible outcomes of each leg. Every outcome has a time series from the start of the router.
OUTCOMES = {
    Role.PREFILL: ("ok", "refused", "unreachable", "lost", "timeout", "no_node", "gone"),
    Role.DECODE: ("ok", "refused", "unreachable", "lost", "timeout", "no_node", "gone"),
    CLIENT: ("ok", "error", "cut", "gone", "too_many"),
}


class RouterMetrics:
    def __init__(self, nodes: Nodes, num_open: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "stratakv_router_requests", "Requests by leg and outcome.", ("leg", "outcome"),
            registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "stratakv_router_leg_seconds", "Seconds of each leg, to its end.", ("leg",),
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self._retries = Counter(
            "stratakv_router_retries", "Requests tried on another node.", ("leg",),
            registry=self._registry,
        )  # fmt: skip
        up = Gauge(
            "stratakv_router_nodes_up", "Nodes that are up, neither drained nor refused.",
            ("role",), registry=self._registry,
        )  # fmt: skip
        refused = Gauge(
            "stratakv_router_nodes_refused",
            "Nodes that are up and not used, because they do not fit the others.", ("role",),
            registry=self._registry,
        )  # fmt: skip
        in_flight = Gauge(
            "stratakv_router_in_flight", "Requests at nodes of this role.", ("role",),
            registry=self._registry,
        )  # fmt: skip
        waiting = Gauge(
            "stratakv_router_open_requests", "Requests of clients that are not answered yet.",
            registry=self._registry,
        )  # fmt: skip
        waiting.set_function(num_open)
        for role in Role:
            up.labels(role).set_function(partial(nodes.num_up, role))
            refused.labels(role).set_function(partial(nodes.num_refused, role))
            in_flight.labels(role).set_function(partial(nodes.num_in_flight, role))
            self._retries.labels(role)
        for leg, outcomes in OUTCOMES.items():
            self._seconds.labels(leg)
            for outcome in outcomes:
                self._requests.labels(leg, outcome)

    def record_outcome(self, leg: str, outcome: str, seconds: float | None = None) -> None:
        self._requests.labels(leg, outcome).inc()
        if seconds is not None:
            self._seconds.labels(leg).observe(seconds)

    def count_retry(self, leg: str) -> None:
        self._retries.labels(leg).inc()

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
