# SPDX-License-Identifier: Apache-2.0
"""What the front measures of requests, under the names that users' dashboards already read.

One `Watch` follows one request; it does one observation for each output of the engine, whatever
the number of tokens in it. What the core counts is in core_metrics.py. Durations are in seconds
on the monotonic clock. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from ..text.output_processor import TextOutput
from .core_metrics import CoreCollector

LABELS = ("model_name", "engine")
ENGINE_INDEX = "0"

_STEP_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0,
    100.0, 250.0, 500.0, 1000.0,
)  # fmt: skip
# Phases of a request that the core times and gives with the last output.
TIMED_PHASES = ("queue", "prefill", "decode")


class Metrics:
    """The figures of one served model, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._label_values = (model_name, ENGINE_INDEX)
        self.core = CoreCollector(dict(zip(LABELS, self._label_values, strict=True)))
        self.registry.register(self.core)

        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From the request's arrival to its first token.",
            _REQUEST_SECONDS,
        )  # fmt: skip
        self.inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two outputs of one request.", _STEP_SECONDS
        )
        self.end_to_end = self._histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to its last token.",
            _REQUEST_SECONDS,
        )  # fmt: skip
        self.phases = {
            phase: self._histogram(
                f"vllm:request_{phase}_time_seconds", f"Time in the {phase} phase.",
                _REQUEST_SECONDS,
            )
            for phase in TIMED_PHASES
        }  # fmt: skip
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests.")
        self.cached_tokens = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens that were not computed anew."
        )
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._cached_by_source = Counter(
            "vllm:prompt_tokens_cached_by_source", "The same, by the tier that held them.",
            (*LABELS, "source"), registry=self.registry,
        )  # fmt: skip
        self._success = Counter(
            "vllm:request_success", "Requests that ended, by the reason of the end.",
            (*LABELS, "finished_reason"), registry=self.registry,
        )  # fmt: skip

    def watch(self, arrival_seconds: float, num_prompt_tokens: int) -> Watch:
        """Begin to follow a request."""
        self.prompt_tokens.inc(num_prompt_tokens)
        return Watch(self, arrival_seconds)

    def count_cached(self, total: int, by_tier: dict[str, int]) -> None:
        """The cached prompt tokens of one request."""
        self.cached_tokens.inc(total)
        for tier, tokens in by_tier.items():
            if tokens:
                self._cached_by_source.labels(*self._label_values, tier).inc(tokens)

    def count_end(self, reason: str) -> None:
        """One request has ended."""
        self._success.labels(*self._label_values, reason).inc()

    def exposition(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, text, LABELS, buckets=buckets, registry=self.registry)
        # Looked up once: a look-up by label values costs as much as the observation.
        return histogram.labels(*self._label_values)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(*self._label_values)


class Watch:
    """The figures of one request."""

    __slots__ = ("_arrival", "_is_closed", "_last", "_metrics")

    def __init__(self, metrics: Metrics, arrival_seconds: float) -> None:
        self._metrics = metrics
        self._arrival = arrival_seconds
        self._last = 0.0  # when the last output with tokens came; 0: none has
        self._is_closed = False

    def observe(self, output: TextOutput) -> None:
        """One output of the engine."""
        metrics = self._metrics
        if output.token_ids:
            now = time.monotonic()
            if self._last:
                metrics.inter_token.observe(now - self._last)
            else:
                metrics.first_token.observe(now - self._arrival)
            self._last = now
            metrics.generation_tokens.inc(len(output.token_ids))
        if output.num_cached_tokens is not None:
            metrics.count_cached(output.num_cached_tokens, output.cached_tokens_by_tier or {})
        if output.finish_reason is not None:
            self._end(output.finish_reason, output.timings or {})

    def close(self) -> None:
        """The end of a request in any case; one that was not finished counts as aborted."""
        if not self._is_closed:
            self._end("abort", {})

    def _end(self, reason: str, timings: dict[str, float]) -> None:
        self._is_closed = True
        metrics = self._metrics
        metrics.count_end(reason)
        if reason != "abort":
            metrics.end_to_end.observe(time.monotonic() - self._arrival)
        for phase, seconds in timings.items():
            histogram = metrics.phases.get(phase.removesuffix("_seconds"))
            if histogram is not None:
                histogram.observe(seconds)
