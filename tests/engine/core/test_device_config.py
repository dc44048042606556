# SPDX-License-Identifier: Apache-2.0
"""Settings in the worker's words, and a pool whose size is known only beside the weights."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from stratakv.engine.cache.group_spec import plan_groups
from stratakv.engine.config.engine_options import EMBEDDED_MODEL, engine_config
from stratakv.engine.core import engine_core
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.setup import model_check
from stratakv.engine.core.setup.model_check import blocks_of_pool
from stratakv.engine.core.setup.resolve_placement import placement_of
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.worker import model_runner
from stratakv.engine.worker.pool_demand import PoolDemand
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.settings.values import GIB, ConfigError

LAYOUT = BlockLayout(32, 16, 8, 128, "bfloat16")


def placed(**given: Any) -> Any:
    return placement_of(engine_config(None, given))


def test_what_suits_the_device():
    assert not placed().uses_kernels
    assert placed(kv_cache_dtype="fp8").uses_kernels
    assert placed(attention_backend="kernels").uses_kernels
    assert placed(load_format="dummy").random_weights
    assert placed(compilation="elementwise").compile_elementwise


def test_what_is_for_gpus_is_said_to_have_no_effect(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        placed(gpu_memory_utilization=0.5, strict_kernels=True)
    assert [record.args for record in caplog.records] == [
        ("--gpu-memory-utilization",), ("--strict-kernels",),
    ]  # fmt: skip
    caplog.clear()
    placed()
    assert not caplog.records


def test_a_gpu_that_is_not_there_is_said():
    with pytest.raises(ConfigError, match=r"--device cuda needs|finds a driver|is not there"):
        placed(device="cuda:77")


def test_a_pools_size_by_settings(monkeypatch: pytest.MonkeyPatch):
    spec = load_model_spec(EMBEDDED_MODEL)

    def asked(**given: Any) -> int | None:
        return blocks_of_pool(
            engine_config(None, given), spec, PoolDemand(plan_groups(LAYOUT), 2048)
        )

    monkeypatch.setattr(model_check, "available_memory_bytes", lambda: 16 * GIB)
    assert asked() == GIB // LAYOUT.page_bytes, "a small model needs no more"
    monkeypatch.setattr(model_check, "available_memory_bytes", lambda: None)
    assert asked() == GIB // LAYOUT.page_bytes, "a machine that does not say what it has left"
    assert asked(device="cuda") is None
    assert asked(device="cuda", num_blocks=7) == asked(num_blocks=7) == 7
    two = asked(device="cuda", kv_cache_memory_bytes="2GiB")
    assert two == asked(kv_cache_memory_bytes="2GiB") == 2 * GIB // LAYOUT.page_bytes


@pytest.mark.parametrize("num_groups", [1, 2])
def test_an_engine_takes_the_blocks_that_are_left(monkeypatch: pytest.MonkeyPatch, num_groups: int):
    class Sizer:
        def blocks(self, model: object, demand: PoolDemand, **limits: object) -> int:
            assert limits == {
                "max_model_len": 64,
                "max_tokens": 128,
                "max_requests": 4,
                "most_drafts": 0,
                "encoder": None,
            }
            return 37

    monkeypatch.setattr(engine_core, "blocks_of_pool", lambda *_: None)
    monkeypatch.setattr(model_runner, "open_sizer", lambda placement: Sizer())
    given = {"max_model_len": 64, "max_num_batched_tokens": 128, "max_num_seqs": 4}
    config = engine_config(None, given)
    core = EngineCore(replace(config, cache=replace(config.cache, num_groups=num_groups)))
    try:
        assert core.num_blocks == core.ready().num_blocks == 37 * num_groups
        assert core.scheduler.manager.pool.num_blocks == 37 * num_groups
        told = core.call("stats", "")["core"]["cache_config"]
        assert told["kv_cache_size_tokens"] == str(36 * config.cache.block_size)
    finally:
        core.shutdown(1.0)
