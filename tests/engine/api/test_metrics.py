# SPDX-License-Identifier: Apache-2.0
"""/metrics: the names that dashboards read, and that the figures are those of the requests."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stratakv.connector.counters import OffloadCounters
from stratakv.engine.api.metrics.engine_metrics import Metrics
from stratakv.engine.cache.block_pool import BlockPool
from stratakv.engine.client.base import EngineClient
from stratakv.engine.config.engine_config import EngineConfig, ModelConfig
from stratakv.engine.core.core_stats import CoreStats
from stratakv.engine.core.handover import HandOverCounts
from stratakv.tiers.base import TierStats
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.hierarchy.guarded_store import Traffic
from stratakv.tiers.settings.values import MIB

from ...offload_config import offload_config

EXPECTED = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:prompt_tokens",
    "vllm:prompt_tokens_cached", "vllm:prompt_tokens_cached_by_source", "vllm:generation_tokens",
    "vllm:num_preemptions", "vllm:request_success", "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds", "vllm:request_inference_time_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens", "vllm:request_params_max_tokens",
    "vllm:iteration_tokens_total", "vllm:num_requests_waiting_by_reason",
    "vllm:prompt_tokens_by_source", "vllm:cache_config_info", "stratakv:engine_up",
    "stratakv:pool_blocks",
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
    assert grown("vllm:prompt_tokens_by_source_total{source=local_compute}") == 12
    assert grown("vllm:prompt_tokens_by_source_total{source=pool}") == 128
    assert grown("vllm:request_success_total{finished_reason=length}") == 2
    for name, total in (("prompt", 140), ("generation", 200)):
        assert grown(f"vllm:request_{name}_tokens_count") == 2
        assert grown(f"vllm:request_{name}_tokens_sum") == total
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert grown(f"vllm:{name}_seconds_count") == 2
        assert 0 < grown(f"vllm:{name}_seconds_sum") < 20
    for phase in ("queue", "prefill", "decode", "inference"):
        assert grown(f"vllm:request_{phase}_time_seconds_count") == 2
    parts = sum(grown(f"vllm:request_{phase}_time_seconds_sum") for phase in ("prefill", "decode"))
    assert grown("vllm:request_inference_time_seconds_sum") == pytest.approx(parts)
    each = grown("vllm:request_time_per_output_token_seconds_sum")
    assert grown("vllm:request_time_per_output_token_seconds_count") == 2
    assert 0 < each < grown("vllm:e2e_request_latency_seconds_sum") / 99
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
    cpu = TierStats(
        capacity_bytes=1000, used_bytes=250, capacity_blocks=8, pinned_blocks=2, reserved_blocks=1,
        hits=3, evicted_blocks=2,
    )  # fmt: skip
    traffic = Traffic(
        active_promotions=1,
        lost_blocks=7,
        unadmitted_blocks=5,
        breaker="open",
        breaker_opened=2,
        write_breaker="probing",
        write_breaker_opened=3,
        late_write_blocks=4,
    )
    for seconds in (0.0001, 0.002, 99.0):
        traffic.promotion_seconds.observe_value(seconds)
    ssd = TierStats(misses=4, rejected={"checksum": 5, "key": 1}, errors={"busy": 2})
    counters = OffloadCounters(seconds_loaded=1.5, failures={"late": 1})
    counters.count_prefill_wait("stalled", 0.7)
    counters.count_lookup(["cpu", "ssd"], ["cpu", "ssd", "ssd"], 9)
    tiers = {"cpu": asdict(cpu), "ssd": asdict(ssd)}
    scheduler = {
        "num_running": 2, "num_waiting": 5, "num_parked": 1, "num_deferred": 3,
        "num_pinned": 0, "pinned_blocks": 0, "num_blocks": 9,
        "num_free_blocks": 4, "pool_usage": 0.5, "prompt_tokens": 100,
        "prefix_queried_tokens": 90, "external_queried_tokens": 68, "cached_tokens_pool": 32,
        "cached_tokens_cpu": 16, "cached_tokens_ssd": 20, "recomputed_tokens_load_failed": 6,
    }  # fmt: skip
    config = EngineConfig(ModelConfig(Path("none"), "tiny"))
    layout = BlockLayout(2, 16, 2, 8, "float32")
    connector = {
        **asdict(counters), "tiers": tiers, "traffic": {"ssd": asdict(traffic)},
        "loads_in_flight": 1, "stores_in_flight": 0, "probes": 2, "declined_tokens": {"ssd": 64},
        "awaiting_prefill": 3,
        "estimates": {
            "break_even_tokens": {"cpu": 48, "ssd": None}, "bytes_per_second": {"cpu": 2e9},
            "fixed_seconds": {"cpu": 1e-3}, "prefill_tokens_per_second": 9000.0,
        },
    }  # fmt: skip
    return {
        "scheduler": scheduler,
        "connector": connector,
        "pool": BlockPool(9).residency.stats(),
        "core": CoreStats(config, layout, 9).stats(),
        "speculation": None,
        "sessions": {"num_open": 4, "num_timed_out": 1},
        "adapters": {
            "running": {"a": 2},
            "waiting": {"b": 1},
            "loaded": ["a", "b"],
            "max_adapters": 1,
        },
        "handover": {"num_held": 1, **asdict(HandOverCounts(5, 2, 0.5))},
    }


def test_tiers_are_shown_by_name(
    offload_stats: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_790_000_000.5)
    metrics = Metrics("tiny")
    client = cast("EngineClient", OneAnswer(offload_stats))
    asyncio.run(metrics.core.refresh(client, 1.0))
    names, samples = read(metrics.exposition().decode())
    assert names >= EXTERNAL
    assert samples["vllm:external_prefix_cache_queries_total"] == 68
    assert samples["vllm:external_prefix_cache_hits_total"] == 36
    assert samples["vllm:prefix_cache_queries_total"] == 90
    assert samples["stratakv:open_sessions"] == 4
    lora = {name: value for name, value in samples.items() if "lora" in name}
    info = "max_lora=1,running_lora_adapters=a,waiting_lora_adapters=b"
    assert lora.pop(f"vllm:lora_requests_info{{{info}}}") == 1_790_000_000.5
    assert lora == {
        f"stratakv:lora_requests{{adapter={name},state={state}}}": count
        for name, state, count in (
            ("a", "running", 2), ("a", "waiting", 0), ("b", "running", 0), ("b", "waiting", 1),
        )
    }  # fmt: skip
    assert samples["stratakv:sessions_timed_out_total"] == 1
    assert samples["vllm:kv_offload_cpu_cache_usage_perc"] == 0.375
    assert samples["vllm:kv_offload_cpu_cache_read_usage_perc"] == 0.25
    assert samples["vllm:kv_offload_cpu_cache_write_usage_perc"] == 0.125
    assert samples["vllm:num_requests_waiting_by_reason{reason=deferred}"] == 3
    assert samples["vllm:num_requests_waiting_by_reason{reason=capacity}"] == 2
    assert samples["stratakv:recomputed_tokens_total{cause=load_failed}"] == 6
    assert samples["stratakv:recomputed_tokens_total{cause=preemption}"] == 0
    assert samples["stratakv:prefill_waiting"] == 3
    assert samples["stratakv:prefill_waits_total{end=stalled}"] == 1
    assert samples["stratakv:prefill_wait_seconds_sum"] == 0.7
    assert samples["stratakv:tier_capacity_bytes{tier=cpu}"] == 1000
    assert samples["stratakv:tier_misses_total{tier=ssd}"] == 4
    assert samples["stratakv:checksum_rejects_total{defect=checksum,tier=ssd}"] == 5
    assert samples["stratakv:checksum_rejects_total{defect=key,tier=ssd}"] == 1
    assert samples["stratakv:tier_errors_total{kind=busy,tier=ssd}"] == 2
    assert samples["stratakv:load_seconds_paid_total"] == 1.5
    assert samples["stratakv:offload_failures_total{reason=late}"] == 1
    assert samples["vllm:num_preemptions_total"] == 0
    assert samples["stratakv:break_even_tokens{tier=cpu}"] == 48
    assert "stratakv:break_even_tokens{tier=ssd}" not in samples, "it never pays"
    assert samples["stratakv:tier_estimated_fixed_seconds{tier=cpu}"] == 1e-3
    assert samples["stratakv:prefill_estimated_tokens_per_second"] == 9000


def test_what_lies_between_tiers_is_shown_by_their_place(offload_stats: dict[str, Any]) -> None:
    metrics = Metrics("tiny")
    client = cast("EngineClient", OneAnswer(offload_stats))
    asyncio.run(metrics.core.refresh(client, 1.0))
    _, samples = read(metrics.exposition().decode())
    tiering = {
        name.removeprefix("vllm:kv_offload_tiering_"): value
        for name, value in samples.items()
        if name.startswith("vllm:kv_offload_tiering_")
    }
    assert tiering["chunk_queries_total{tier=0:primary}"] == 4
    assert tiering["chunk_hits_total{tier=0:primary}"] == 1
    assert tiering["chunk_queries_total{tier=1:ssd}"] == 3
    assert tiering["chunk_hits_total{tier=1:ssd}"] == 2
    assert tiering["active_promotion_jobs{tier=1:ssd}"] == 1
    assert tiering["backpressure_blocks_dropped_total{tier=1:ssd}"] == 7
    assert samples["stratakv:tier_unadmitted_blocks_total{tier=ssd}"] == 5
    assert samples["vllm:kv_offload_stores_skipped_total"] == 5
    assert samples["stratakv:tier_breaker_opened_total{tier=ssd}"] == 2
    states = {
        state: f"stratakv:tier_breaker{{state={state},tier=ssd}}" for state in ("closed", "open")
    }
    assert (samples[states["closed"]], samples[states["open"]]) == (0, 1)
    assert samples["stratakv:tier_write_breaker{state=probing,tier=ssd}"] == 1
    assert samples["stratakv:tier_write_breaker_opened_total{tier=ssd}"] == 3
    assert samples["stratakv:tier_late_write_blocks{tier=ssd}"] == 4
    # Buckets hold what is at most their bound, and all those before them.
    latency = "promotion_latency_seconds"
    buckets = {
        name.split("le=")[1].split(",")[0]: value
        for name, value in tiering.items()
        if name.startswith(f"{latency}_bucket")
    }
    assert buckets["0.0001"] == buckets["0.001"] == 1
    assert buckets["0.005"] == buckets["10.0"] == 2
    assert buckets["+Inf"] == tiering[f"{latency}_count{{tier=1:ssd}}"] == 3
    assert tiering[f"{latency}_sum{{tier=1:ssd}}"] == pytest.approx(99.0021)


def test_nothing_is_credited_without_a_price(offload_stats: dict[str, Any]) -> None:
    def shown() -> dict[str, float]:
        metrics = Metrics("tiny")
        client = cast("EngineClient", OneAnswer(offload_stats))
        asyncio.run(metrics.core.refresh(client, 1.0))
        samples = read(metrics.exposition().decode())[1]
        return {name: value for name, value in samples.items() if "prefill_seconds" in name}

    assert shown() == {}
    offload_stats["core"]["seconds_per_token"] = 0.5
    offload_stats["core"]["saved_seconds"] = {"ssd": 4.0}
    assert shown() == {
        "stratakv:prefill_seconds_per_token": 0.5,
        "stratakv:prefill_seconds_saved_total{source=pool}": 0,
        "stratakv:prefill_seconds_saved_total{source=cpu}": 0,
        "stratakv:prefill_seconds_saved_total{source=ssd}": 4,
    }


def test_an_engine_with_tiers_shows_them(server: Any, model_path: Path) -> None:
    live = type(server)(model_path, offload=offload_config(tiers=("cpu",), cpu_bytes=4 * MIB))
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
