# SPDX-License-Identifier: Apache-2.0
"""/metrics: the names that dashboards read, and that the figures are those of the requests."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stratakv.connector.counters import OffloadCounters
from stratakv.engine.api.metrics import Metrics
from stratakv.engine.client.base import EngineClient
from stratakv.engine.config import MIB, OffloadConfig
from stratakv.tiers.base import TierStats

EXPECTED = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:prompt_tokens",
    "vllm:prompt_tokens_cached", "vllm:prompt_tokens_cached_by_source", "vllm:generation_tokens",
    "vllm:num_preemptions", "vllm:request_success", "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds", "stratakv:engine_up", "stratakv:pool_blocks",
}  # fmt: skip
EXTERNAL = {
    "vllm:external_prefix_cache_queries", "vllm:external_prefix_cache_hits",
    "vllm:kv_offload_cpu_cache_usage_perc", "stratakv:tier_capacity_bytes",
    "stratakv:tier_used_bytes", "stratakv:tier_hits", "stratakv:tier_misses",
    "stratakv:tier_evicted_blocks", "stratakv:tier_dropped_stores", "stratakv:checksum_rejects",
    "stratakv:load_seconds_paid", "stratakv:offload_failures",
}  # fmt: skip


def read(text: str) -> tuple[set[str], dict[str, float]]:
    """Names of families, and each sample by its name and its own labels."""
    names, samples = set(), {}
    for family in text_string_to_metric_families(text):
        names.add(family.name)
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            assert labels.pop("engine") == "0"
            own = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            samples[f"{sample.name}{{{own}}}" if own else sample.name] = sample.value
    return names, samples


def scrape(http: httpx.Client) -> tuple[set[str], dict[str, float]]:
    response = http.get("/metrics")
    assert response.status_code == 200
    assert re.match("text/plain; version=", response.headers["content-type"])
    return read(response.text)


def test_names_and_figures(http: httpx.Client) -> None:
    prompt = [7 + i % 100 for i in range(70)]
    body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "cache_salt": "metrics"}
    http.post("/v1/completions", json=body)  # so that every label is there
    http.post("/v1/completions", json=body)
    names, before = scrape(http)
    assert names >= EXPECTED
    http.post("/v1/completions", json=body)
    http.post("/v1/completions", json={**body, "stream": True})
    _, after = scrape(http)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("vllm:prompt_tokens_total") == 140
    assert grown("vllm:generation_tokens_total") == 200
    assert grown("vllm:prompt_tokens_cached_total") == 128
    assert grown("vllm:prompt_tokens_cached_by_source_total{source=pool}") == 128
    assert grown("vllm:prefix_cache_queries_total") == 140
    assert grown("vllm:prefix_cache_hits_total") == 128
    assert grown("vllm:request_success_total{finished_reason=length}") == 2
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert grown(f"vllm:{name}_seconds_count") == 2
        assert 0 < grown(f"vllm:{name}_seconds_sum") < 20
    for phase in ("queue", "prefill", "decode"):
        assert grown(f"vllm:request_{phase}_time_seconds_count") == 2
    # Outputs that wait for their reader are merged, so there may be fewer than there are tokens.
    assert 1 <= grown("vllm:inter_token_latency_seconds_count") <= 198
    assert after["vllm:num_requests_running"] == 0
    assert after["stratakv:engine_up"] == 1


def test_health_version_and_ping(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ping").status_code == 200
    assert http.get("/version").json()["version"].count(".") == 2


class OneAnswer:
    """A core that is asked for its figures once."""

    is_alive = True

    def __init__(self, stats: dict[str, Any]) -> None:
        self._stats = stats

    async def call(self, name: str, timeout_seconds: float) -> dict[str, Any]:
        assert name == "stats"
        return self._stats


@pytest.fixture
def offload_stats() -> dict[str, Any]:
    """The figures of an engine with tiers, in the classes that the tiers and connector fill."""
    cpu = TierStats(capacity_bytes=1000, used_bytes=250, hits=3, evicted_blocks=2)
    ssd = TierStats(misses=4, rejected={"checksum": 5, "key": 1}, errors={"busy": 2})
    counters = OffloadCounters(seconds_loaded=1.5, failures={"late": 1})
    tiers = {"cpu": asdict(cpu), "ssd": asdict(ssd)}
    scheduler = {
        "num_running": 2, "num_waiting": 1, "pool_usage": 0.5, "prompt_tokens": 100,
        "cached_tokens_pool": 32, "cached_tokens_cpu": 16, "cached_tokens_ssd": 20,
    }  # fmt: skip
    return {"scheduler": scheduler, "connector": {**asdict(counters), "tiers": tiers}}


def test_tiers_are_shown_by_name(offload_stats: dict[str, Any]) -> None:
    metrics = Metrics("tiny")
    client = cast("EngineClient", OneAnswer(offload_stats))
    asyncio.run(metrics.core.refresh(client, 1.0))
    names, samples = read(metrics.exposition().decode())
    assert names >= EXTERNAL
    assert samples["vllm:external_prefix_cache_queries_total"] == 68
    assert samples["vllm:external_prefix_cache_hits_total"] == 36
    assert samples["vllm:kv_offload_cpu_cache_usage_perc"] == 0.25
    assert samples["stratakv:tier_capacity_bytes{tier=cpu}"] == 1000
    assert samples["stratakv:tier_misses_total{tier=ssd}"] == 4
    assert samples["stratakv:checksum_rejects_total{defect=checksum,tier=ssd}"] == 5
    assert samples["stratakv:checksum_rejects_total{defect=key,tier=ssd}"] == 1
    assert samples["stratakv:tier_errors_total{kind=busy,tier=ssd}"] == 2
    assert samples["stratakv:load_seconds_paid_total"] == 1.5
    assert samples["stratakv:offload_failures_total{reason=late}"] == 1
    assert samples["vllm:num_preemptions_total"] == 0


def test_an_engine_with_tiers_shows_them(server: Any, model_path: Path) -> None:
    live = type(server)(model_path, offload=OffloadConfig(tiers=("cpu",), cpu_bytes=4 * MIB))
    with httpx.Client(base_url=live.url, verify=False) as http:
        http.post("/v1/completions", json={"prompt": [4] * 40, "max_tokens": 2})
        names, samples = scrape(http)
    assert names >= EXPECTED - {"vllm:prompt_tokens_cached_by_source"} | EXTERNAL
    assert 0 < samples["stratakv:tier_capacity_bytes{tier=cpu}"] <= 4 * MIB
    assert samples["vllm:external_prefix_cache_queries_total"] == 40
    live.stop()


def test_without_figures_there_is_still_an_answer() -> None:
    names, samples = read(Metrics("tiny").exposition().decode())
    assert samples["stratakv:engine_up"] == 1
    assert "vllm:num_requests_running" not in names
