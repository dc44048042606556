# SPDX-License-Identifier: Apache-2.0
"""An engine with every tier lives through what it is made for: each figure moves as it must, and no
other does. What it shows is what `docs/metrics.md` says."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from stratakv.engine.api.metrics.engine_metrics import Metrics, Watch
from stratakv.engine.client.base import EngineClient
from stratakv.engine.config.engine_options import engine_config
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import AddRequest
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.text.output_processor import OutputProcessor

from ..written_adapters import write_adapter

DOCS = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
SIZE = 8
BLOCK_BYTES = 2 * 2 * SIZE * 2 * 8 * 8  # layers, K and V, tokens, heads, head size, float64
WAIT_SECONDS = 20.0
# Ten blocks, of which nine can be found again: one token is always computed.
PROMPT = random.Random(3).choices(range(256), k=80)
FOUND = 72

Samples = Mapping[str, float]
SSD = "tier=1:ssd"

# What moves whenever a request runs cold or warm.
ALWAYS = {
    "stratakv:scheduled_tokens_total", "stratakv:steps_total", "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_count", "vllm:iteration_tokens_total_sum",
    "vllm:prefix_cache_queries_total", "vllm:prompt_tokens_by_source_total{source=local_compute}",
    "vllm:prompt_tokens_total", "vllm:request_success_total{finished_reason=length}",
}  # fmt: skip
OBSERVED = {
    "e2e_request_latency_seconds", "inter_token_latency_seconds", "request_decode_time_seconds",
    "request_generation_tokens", "request_inference_time_seconds", "request_params_max_tokens",
    "request_prefill_time_seconds", "request_prompt_tokens", "request_queue_time_seconds",
    "request_time_per_output_token_seconds", "time_to_first_token_seconds",
}  # fmt: skip
ALWAYS |= {f"vllm:{name}_{part}" for name in OBSERVED for part in ("count", "sum")}
CACHED = {"vllm:prompt_tokens_cached_total"}
LOOKED_UP = {
    "vllm:external_prefix_cache_queries_total",
    "vllm:kv_offload_tiering_chunk_queries_total{tier=0:primary}",
}
LOADED = LOOKED_UP | CACHED | {
    "stratakv:load_seconds_paid_total", "stratakv:loads_total",
    "stratakv:tier_hits_total{tier=cpu}", "stratakv:tier_loaded_blocks_total{tier=cpu}",
    "stratakv:tier_loaded_bytes_total{tier=cpu}", "vllm:external_prefix_cache_hits_total",
    "vllm:kv_offload_load_bytes_total", "vllm:kv_offload_load_size_count",
    "vllm:kv_offload_load_size_sum", "vllm:kv_offload_load_time_total",
    "vllm:kv_offload_tiering_chunk_hits_total{tier=0:primary}",
}  # fmt: skip
WAITED = "stratakv:store_wait_seconds_total"
EVICTED = {
    "stratakv:pool_evicted_blocks_total", "stratakv:stored_blocks_total", "stratakv:stores_total",
    "stratakv:tier_stored_blocks_total{tier=cpu}", "stratakv:tier_stored_bytes_total{tier=cpu}",
    "vllm:kv_block_idle_before_evict_seconds_count", "vllm:kv_block_idle_before_evict_seconds_sum",
    "vllm:kv_block_lifetime_seconds_count", "vllm:kv_block_lifetime_seconds_sum",
    "vllm:kv_offload_store_bytes_total", "vllm:kv_offload_store_size_count",
    "vllm:kv_offload_store_size_sum", "vllm:kv_offload_store_time_total",
}  # fmt: skip


def from_source(source: str) -> set[str]:
    return {
        f"vllm:prompt_tokens_by_source_total{{source={source}}}",
        f"vllm:prompt_tokens_cached_by_source_total{{source={source}}}",
        f"stratakv:prefill_seconds_saved_total{{source={source}}}",
    }


class Life:
    """An engine core stepped by hand, and the metrics of a front before it."""

    def __init__(self, model: Path, ssd_path: Path, **more: Any) -> None:
        options = {
            "dtype": "float64", "block_size": SIZE, "num_blocks": 24, "max_num_seqs": 8,
            "max_model_len": 184, "max_num_batched_tokens": 128, "num_threads": 1,
            "kv_offload": "cpu,ssd", "kv_offload_cpu_bytes": "1MiB", "kv_offload_load": "always",
            "kv_offload_ssd_path": str(ssd_path), "kv_offload_ssd_bytes": "16MiB",
        }  # fmt: skip
        self.core = EngineCore(engine_config(model, options | more))
        self.metrics = Metrics("tiny")
        self.is_alive = True
        self._watches: dict[str, tuple[Watch, OutputProcessor]] = {}
        self._last: Samples = {}
        self.scrape()

    async def call(self, name: str, timeout_seconds: float) -> Any:
        """Play the client: figures go through JSON, as between processes."""
        return json.loads(json.dumps(self.core.call(name, "")))

    def run(self, *prompts: list[int], max_tokens: int = 4) -> None:
        """Requests at the same time, to their ends."""
        for index, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            request = AddRequest(str(index), pack_token_ids(prompt), params)
            watch = Watch(self.metrics, time.monotonic(), len(prompt))
            self._watches[str(index)] = (watch, OutputProcessor(None, params))
            assert self.core.add(request) == []
        deadline = time.monotonic() + WAIT_SECONDS
        while self._watches:
            assert time.monotonic() < deadline, "the requests did not end"
            if not self.core.has_work():
                time.sleep(0.0005)
                continue
            for output in self.core.step():
                watch, processor = self._watches[output.request_id]
                watch.record_output(processor.process(output))
                if output.finish_reason is not None:
                    del self._watches[output.request_id]

    def families(self) -> list[Metric]:
        asyncio.run(self.metrics.core.refresh(cast("EngineClient", self), 1.0))
        return list(text_string_to_metric_families(self.metrics.exposition().decode()))

    def scrape(self) -> tuple[Samples, Samples]:
        """What grew since the last time (buckets and gauges left out), and the gauges now."""
        counters: dict[str, float] = {}
        gauges: dict[str, float] = {}
        for family in self.families():
            for sample in family.samples:
                own = own_labels(sample.labels)
                name = f"{sample.name}{{{own}}}" if own else sample.name
                if family.type == "gauge" and not sample.name.endswith("_created"):
                    gauges[name] = sample.value
                elif family.type != "gauge" and not sample.name.endswith("_bucket"):
                    counters[name] = sample.value
        last, self._last = self._last, counters
        grown = {name: value - last.get(name, 0.0) for name, value in counters.items()}
        return {name: value for name, value in grown.items() if value}, gauges

    def close(self) -> None:
        self.core.shutdown(10.0)


def own_labels(labels: Mapping[str, str]) -> str:
    """The labels of one metric alone, as text."""
    return ",".join(
        f"{name}={value}"
        for name, value in sorted(labels.items())
        if name not in ("model_name", "engine")
    )


def others(seed: int) -> list[int]:
    """A prompt that, with its answer, takes the whole pool."""
    return random.Random(seed).choices(range(256), k=178)


@pytest.fixture
def life(tiny_model: Path, tmp_path: Path) -> Iterator[Life]:
    life = Life(tiny_model, tmp_path / "ssd")
    yield life
    life.close()


def test_cold_then_warm_in_the_pool_then_in_the_cpu_tier(life: Life) -> None:
    life.run(PROMPT)
    grown, gauges = life.scrape()
    assert set(grown) == ALWAYS | LOOKED_UP | {
        f"vllm:kv_offload_tiering_chunk_queries_total{{{SSD}}}"
    }
    assert grown["vllm:prompt_tokens_by_source_total{source=local_compute}"] == 80
    assert grown["vllm:prefix_cache_queries_total"] == 80
    assert grown["vllm:external_prefix_cache_queries_total"] == 80
    assert grown["vllm:generation_tokens_total"] == 4
    assert grown["stratakv:scheduled_tokens_total"] == 83
    assert grown["vllm:iteration_tokens_total_count"] == 4
    assert grown["vllm:iteration_tokens_total_sum"] == 83
    assert grown["vllm:request_params_max_tokens_sum"] == 4
    price = gauges["stratakv:prefill_seconds_per_token"]
    assert 0 < price < 0.1
    assert gauges["stratakv:pool_free_blocks"] == 23

    life.run(PROMPT)
    grown, gauges = life.scrape()
    # Too few tokens were computed to measure anew.
    assert gauges["stratakv:prefill_seconds_per_token"] == price
    gap = "vllm:kv_block_reuse_gap_seconds"
    assert set(grown) == ALWAYS | CACHED | from_source("pool") | {
        f"{gap}_count", f"{gap}_sum", "vllm:external_prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
    }  # fmt: skip
    assert grown["vllm:prefix_cache_hits_total"] == FOUND
    assert grown["vllm:prompt_tokens_cached_by_source_total{source=pool}"] == FOUND
    assert grown["vllm:prompt_tokens_by_source_total{source=pool}"] == FOUND
    saved = grown["stratakv:prefill_seconds_saved_total{source=pool}"]
    # Tokens at the beginning of a prompt are no dearer than the average one.
    assert 0 < saved <= FOUND * price * (1 + 1e-9)
    assert grown[f"{gap}_count"] == FOUND // SIZE

    life.run(others(1))
    grown, gauges = life.scrape()
    assert set(grown) == ALWAYS | LOOKED_UP | EVICTED | {
        WAITED,
        f"vllm:kv_offload_tiering_chunk_queries_total{{{SSD}}}",
    }
    # The prompt's ten blocks; both runs computed the last one, and it is stored once.
    assert grown["stratakv:pool_evicted_blocks_total"] == 11
    assert grown["vllm:kv_block_lifetime_seconds_count"] == 11
    assert grown["stratakv:stored_blocks_total"] == 10
    assert grown["vllm:kv_offload_store_bytes_total"] == 10 * BLOCK_BYTES

    price = gauges["stratakv:prefill_seconds_per_token"]
    life.run(PROMPT)
    grown, gauges = life.scrape()
    # A step waits for a store only if its blocks were not stored ahead.
    assert set(grown) - {WAITED} == ALWAYS | LOADED | EVICTED | from_source("cpu")
    assert grown["vllm:external_prefix_cache_hits_total"] == FOUND
    assert grown["vllm:prompt_tokens_by_source_total{source=cpu}"] == FOUND
    assert grown["vllm:kv_offload_load_bytes_total"] == FOUND // SIZE * BLOCK_BYTES
    assert grown["vllm:kv_offload_tiering_chunk_queries_total{tier=0:primary}"] == 9
    assert grown["vllm:kv_offload_tiering_chunk_hits_total{tier=0:primary}"] == 9
    # Tokens at the beginning of a prompt are no dearer than the average one.
    assert 0 < grown["stratakv:prefill_seconds_saved_total{source=cpu}"] <= FOUND * price
    paid = grown["stratakv:load_seconds_paid_total"]
    assert 0 < grown["vllm:kv_offload_load_time_total"] < paid < WAIT_SECONDS
    # Nothing but, perhaps, what is being stored ahead.
    assert gauges["vllm:kv_offload_cpu_cache_read_usage_perc"] == 0


def test_a_preemption_is_recomputed_and_nothing_else_is(life: Life) -> None:
    prompts = [random.Random(seed).choices(range(256), k=60) for seed in (8, 9)]
    life.run(*prompts, max_tokens=80)
    grown, gauges = life.scrape()
    preemptions = grown["vllm:num_preemptions_total"]
    assert preemptions >= 1
    assert 1 <= grown["stratakv:recomputes_total{cause=preemption}"] <= preemptions
    computed_again = grown["stratakv:recomputed_tokens_total{cause=preemption}"]
    assert not [name for name in grown if "cause=load" in name]
    # All that was computed: the prompts and the answers but their last tokens, and this.
    assert grown["stratakv:scheduled_tokens_total"] == 2 * (60 + 79) + computed_again
    assert grown["vllm:prompt_tokens_by_source_total{source=local_compute}"] == 120
    assert not [name for name in grown if "checksum" in name or "failures" in name]
    assert gauges["vllm:num_requests_waiting"] == 0


def test_warm_on_the_ssd_then_damaged_there(tiny_model: Path, tmp_path: Path) -> None:
    first = Life(tiny_model, tmp_path / "ssd")
    first.run(PROMPT)
    first.close()

    warm = Life(tiny_model, tmp_path / "ssd")
    # Something to measure a price with.
    warm.run(others(2)[:40])
    warm.scrape()
    warm.run(PROMPT)
    grown, _ = warm.scrape()
    warm.close()
    # No block of the cpu tier had been used, so there are misses and no hits.
    of_ssd = {
        f"vllm:kv_offload_tiering_{name}{{{SSD}}}"
        for name in (
            "chunk_queries_total", "chunk_hits_total", "read_bytes_total", "read_time_total",
            "promotion_latency_seconds_count", "promotion_latency_seconds_sum",
        )
    } | {
        f"stratakv:tier_{name}_total{{tier={tier}}}"
        for name, tier in (
            ("hits", "ssd"), ("loaded_blocks", "ssd"), ("loaded_bytes", "ssd"), ("misses", "cpu"),
            ("stored_blocks", "cpu"), ("stored_bytes", "cpu"),
        )
    }  # fmt: skip
    of_cpu = {name for name in LOADED if "tier=cpu" in name or "chunk_hits" in name}
    # Where reading ahead was quicker than the request, the cpu tier has the blocks by then.
    assert set(grown) - of_cpu == ALWAYS | (LOADED - of_cpu) | of_ssd | from_source("ssd")
    assert grown["vllm:prompt_tokens_cached_by_source_total{source=ssd}"] == FOUND
    assert grown[f"vllm:kv_offload_tiering_read_bytes_total{{{SSD}}}"] == 9 * BLOCK_BYTES
    assert grown[f"vllm:kv_offload_tiering_chunk_hits_total{{{SSD}}}"] == 9
    assert grown[f"vllm:kv_offload_tiering_promotion_latency_seconds_count{{{SSD}}}"] == 1

    damage(tmp_path / "ssd" / "blocks")
    hurt = Life(tiny_model, tmp_path / "ssd")
    hurt.run(PROMPT)
    grown, _ = hurt.scrape()
    hurt.close()
    assert grown["stratakv:corrupt_records_dropped_total{tier=ssd}"] == 9
    rejects = [n for name, n in grown.items() if name.startswith("stratakv:checksum_rejects")]
    assert sum(rejects) == 9
    # Read ahead, the damage may be found before the request's turn, and then nothing is loaded.
    failed = "stratakv:loads_failed_total" in grown
    assert grown.get("stratakv:offload_failures_total{reason=unavailable}", 0) == failed
    assert grown.get("stratakv:recomputes_total{cause=load_failed}", 0) == failed
    assert grown.get("stratakv:recomputed_tokens_total{cause=load_failed}", 0) == failed * FOUND
    assert grown["vllm:prompt_tokens_by_source_total{source=local_compute}"] == 80
    assert not set(grown) & (
        CACHED | from_source("ssd") | {"vllm:external_prefix_cache_hits_total"}
    )
    assert not [name for name in grown if "load_bytes" in name or "read_bytes" in name]


def damage(path: Path) -> None:
    """Flip a bit in every record's first page, where the header is."""
    content = np.memmap(path, np.uint8, "r+")
    for page in range(0, len(content), 4096):
        content[page + 40] ^= 1
    content.flush()


class Row(NamedTuple):
    """What the documentation says of one metric."""

    kind: str
    labels: frozenset[str]


def documented() -> dict[str, Row]:
    rows = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 5 and (name := re.fullmatch(r"`([a-z]+:\w+)`", cells[0])):
            assert name[1] not in rows, f"{name[1]} has two rows"
            assert all(cells[i] for i in (1, 3, 4)), f"a cell is empty: {line}"
            labels = frozenset(filter(None, (label.strip() for label in cells[2].split(","))))
            rows[name[1]] = Row(cells[1], labels)
    return rows


def test_the_documentation_names_every_metric_with_its_type_and_labels(
    tiny_model: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "lora", tiny_model)
    more = {
        "kv_serve": "127.0.0.1:0",
        "speculative_method": "ngram",
        "lora_modules": {"a": adapter},
    }
    life = Life(tiny_model, tmp_path / "ssd", **more)
    try:
        life.run(PROMPT)
        check_documented(life)
    finally:
        life.close()


def check_documented(life: Life) -> None:
    shown: dict[str, str] = {}
    labels: dict[str, set[frozenset[str]]] = {}
    for family in life.families():
        if family.name.endswith("_created"):
            continue
        shown[family.name] = family.type
        for sample in family.samples:
            own = frozenset(sample.labels) - {"model_name", "engine", "le"}
            labels.setdefault(family.name, set()).add(own)
    rows = documented()
    assert shown == {name: row.kind for name, row in rows.items()}
    for name, seen in labels.items():
        assert seen == {rows[name].labels}, name
