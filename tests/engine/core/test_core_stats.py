# SPDX-License-Identifier: Apache-2.0
"""What the core measures of its steps, and what it tells of its settings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stratakv.connector.messages import ConnectorWorkerOutput
from stratakv.engine.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
)
from stratakv.engine.config.offload_config import OffloadConfig
from stratakv.engine.core.core_stats import CoreStats
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler.output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from stratakv.tiers.block import BlockLayout

from ...offload_config import offload_config

LAYOUT = BlockLayout(2, 16, 2, 8, "float32")


def figures(offload: OffloadConfig | None = None) -> CoreStats:
    config = EngineConfig(
        ModelConfig(Path("none"), "tiny"),
        cache=CacheConfig(block_hash="sha256_cbor"),
        offload=offload or offload_config(),
    )
    return CoreStats(config, LAYOUT, 9)


def step(num_tokens: int) -> SchedulerOutput:
    """A step that starts one request."""
    prompt = np.zeros(num_tokens, np.int32)
    new = NewRequestData("a", prompt, SamplingParams(max_tokens=20), ([1],), 0)
    tokens = {"a": num_tokens} if num_tokens else {}
    return SchedulerOutput([new], CachedRequestData(), tokens, num_tokens, set(), set())


def test_waiting_for_stores_is_no_part_of_computing() -> None:
    measured = figures()
    waited = ConnectorWorkerOutput(store_wait_seconds=3.0)
    measured.note_step(step(100), ModelRunnerOutput({}, connector_output=waited), 5.0)
    stats = measured.stats()
    assert stats["seconds_per_token"] == pytest.approx(0.02)
    assert stats["iteration_tokens"]["total"] == 100
    assert sum(stats["iteration_tokens"]["counts"]) == 1
    assert stats["request_max_tokens"]["total"] == 20


def test_empty_steps_are_not_observed() -> None:
    measured = figures()
    measured.note_step(step(0), ModelRunnerOutput({}), 5.0)
    stats = measured.stats()
    assert stats["seconds_per_token"] is None
    assert sum(stats["iteration_tokens"]["counts"]) == 0


def test_settings_are_those_of_the_engine() -> None:
    stats = figures().stats()
    assert stats["offload_config"] is None
    assert stats["cache_config"] == {
        "block_size": "16", "cache_dtype": "float32", "enable_prefix_caching": "True",
        "kv_cache_size_tokens": "128", "num_cpu_blocks": "0", "num_gpu_blocks": "9",
        "prefix_caching_hash_algo": "sha256_cbor",
    }  # fmt: skip
    offload = offload_config(
        tiers=("cpu", "ssd"), cpu_bytes=2**20, ssd_path=Path("x"), ssd_bytes=2**25
    )
    stats = figures(offload).stats()
    assert stats["cache_config"]["num_cpu_blocks"] == "256"
    assert stats["offload_config"] == {
        "blocks_per_chunk": "1", "cpu_bytes": "1048576", "kv_bytes_per_chunk": "4096",
        "num_chunks": "256", "ssd_bytes": "33554432", "tiers": "cpu,ssd",
    }  # fmt: skip
    assert figures(offload_config(tiers=("cpu",))).stats()["offload_config"]["ssd_bytes"] == "0"
