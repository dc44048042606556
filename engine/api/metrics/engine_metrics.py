# SPDX-License-Identifier: Apache-2.0
"""The HTTP server's metrics of requests, with vLLM's names, which users' dashboards already read.

A `Watch` records one request; each output of the engine is one observation, for any number of
tokens. Durations are seconds of the monotonic clock. `core_metrics.py` has the core's metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from ...text.output_processor import TextOutput
from .core_metrics import CoreCollector
from .metric_tables import LABELS

ENGINE_INDEX = "0"

_STEP_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0,
    100.0, 250.0, 500.0, 1000.0,
)  # fmt: skip
_TOKENS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0,
    20_000.0, 50_000.0, 100_000.0, 200_000.0,
)  # fmt: skip
# Phases of a request that the engine core times. A request's last output has the phases' seconds.
TIMED_PHASES = ("queue", "prefill", "decode")
COMPUTED = "local_compute"  # the label `source` of prompt tokens that the engine computed


class Metrics:
    """The metrics of one served model, in a separate Prometheus registry."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.label_values = (model_name, ENGINE_INDEX)
        self.core = CoreCollector(dict(zip(LABELS, self.label_values, strict=True)))
        self.registry.register(self.core)

        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From the request's arrival to its first token.",
            _REQUEST_SECONDS,
        )  # fmt: skip
        self.inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two outputs of one request.", _STEP_SECONDS
        )
        self.output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between two tokens, of each request.", _STEP_SECONDS,
        )  # fmt: skip
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
        self.inference = self._histogram(
            "vllm:request_inference_time_seconds", "Time in the prefill and decode phases.",
            _REQUEST_SECONDS,
        )  # fmt: skip
        self.prompt_lengths = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of each request.", _TOKENS
        )
        self.answer_lengths = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated for each request.", _TOKENS
        )
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests.")
        self.cached_tokens = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens that were not computed anew."
        )
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.dropped_fields = self._counter(
            "stratakv:request_fields_dropped",
            "Fields inside messages, tools and stream options that nothing here reads.",
        )
        self.cached_by_source = Counter(
            "vllm:prompt_tokens_cached_by_source", "The same, by the tier that held them.",
            (*LABELS, "source"), registry=self.registry,
        )  # fmt: skip
        self.by_source = Counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.",
            (*LABELS, "source"), registry=self.registry,
        )  # fmt: skip
        self.success = Counter(
            "vllm:request_success", "Requests that ended, by the reason of the end.",
            (*LABELS, "finished_reason"), registry=self.registry,
        )  # fmt: skip

    def show_tiers(self, tiers: Iterable[str]) -> None:
        """Create the metrics of every tier, so that a scrape has them even with the value 0."""
        for tier in tiers:
            self.cached_by_source.labels(*self.label_values, tier)
            self.by_source.labels(*self.label_values, tier)
        self.by_source.labels(*self.label_values, COMPUTED)

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, text, LABELS, buckets=buckets, registry=self.registry)
        # The child metric is kept, because `labels()` costs as much time as an observation.
        return histogram.labels(*self.label_values)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(*self.label_values)


class Watch:
    """Records the metrics of one request."""

    __slots__ = (
        "_arrival", "_first", "_is_closed", "_last", "_metrics", "_num_prompt_tokens",
        "_num_tokens",
    )  # fmt: skip

    def __init__(self, metrics: Metrics, arrival_seconds: float, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrival = arrival_seconds
        self._num_prompt_tokens = num_prompt_tokens
        self._first = self._last = 0.0  # times of the first and last output with tokens; 0: none
        self._num_tokens = 0
        self._is_closed = False

    def record_output(self, output: TextOutput) -> None:
        metrics = self._metrics
        if output.token_ids:
            now = time.monotonic()
            if self._last:
                metrics.inter_token.observe(now - self._last)
            else:
                self._first = now
                metrics.first_token.observe(now - self._arrival)
            self._last = now
            self._num_tokens += len(output.token_ids)
            metrics.generation_tokens.inc(len(output.token_ids))
        if output.num_cached_tokens is not None:  # set in one output, after the prompt is computed
            num_tokens, labels = self._num_prompt_tokens, metrics.label_values
            metrics.prompt_tokens.inc(num_tokens)
            metrics.cached_tokens.inc(output.num_cached_tokens)
            metrics.by_source.labels(*labels, COMPUTED).inc(num_tokens - output.num_cached_tokens)
            for tier, tokens in (output.cached_tokens_by_tier or {}).items():
                metrics.cached_by_source.labels(*labels, tier).inc(tokens)
                metrics.by_source.labels(*labels, tier).inc(tokens)
        if output.finish_reason is not None:
            self._record_finish(output.finish_reason, output.timings or {})

    def close(self) -> None:
        """Stop recording. A request that has not finished counts as aborted."""
        if not self._is_closed:
            self._record_finish("abort", {})

    def _record_finish(self, reason: str, timings: dict[str, float]) -> None:
        self._is_closed = True
        metrics = self._metrics
        metrics.success.labels(*metrics.label_values, reason).inc()
        if reason != "abort":
            metrics.end_to_end.observe(time.monotonic() - self._arrival)
            metrics.prompt_lengths.observe(self._num_prompt_tokens)
            metrics.answer_lengths.observe(self._num_tokens)
            if self._num_tokens > 1:
                metrics.output_token.observe((self._last - self._first) / (self._num_tokens - 1))
        if timings:
            for phase, histogram in metrics.phases.items():
                histogram.observe(timings[f"{phase}_seconds"])
            metrics.inference.observe(timings["prefill_seconds"] + timings["decode_seconds"])
