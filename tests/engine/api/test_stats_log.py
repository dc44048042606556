# SPDX-License-Identifier: Apache-2.0
"""The line of figures: what it says, when it is silent, and that it ends with the core."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.api.metrics.stats_log import StatsLog, describe
from stratakv.engine.client.in_process import InProcessClient
from stratakv.engine.config.engine_options import engine_config
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import AddRequest
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams

IDLE: dict[str, Any] = {
    "scheduler": {"num_running": 0, "num_waiting": 0, "num_parked": 0, "pool_usage": 0.0},
    "connector": None,
}


def stats(connector: Any = None, **scheduler: float) -> dict[str, Any]:
    return {"scheduler": {**IDLE["scheduler"], **scheduler}, "connector": connector}


def test_nothing_is_said_where_nothing_happened() -> None:
    assert describe(IDLE, IDLE, 10.0) == ""
    assert describe(stats(steps=9), stats(steps=9), 10.0) == ""


def test_the_line() -> None:
    tiers = {"cpu": {"capacity_bytes": 200, "used_bytes": 50}, "ssd": {"blocks": 3}}
    before = stats(steps=10, prompt_tokens=1000, cached_tokens_pool=500, scheduled_tokens=700)
    after = stats(
        {"tiers": tiers}, num_running=12, num_waiting=3, num_parked=1, pool_usage=0.429,
        steps=60, prompt_tokens=35_100, cached_tokens_pool=20_000, cached_tokens_cpu=1_642,
        scheduled_tokens=18_700, generated_tokens=5_120, preemptions=2,
    )  # fmt: skip
    assert describe(before, after, 10.0) == (
        "running 12, waiting 3, prompts 3,410 tok/s (62 % cached), computed 1,800 tok/s, "
        "generated 512 tok/s, pool 43 %, cpu 25 %, preempted 2"
    )


def test_what_only_waits_is_work_too() -> None:
    assert describe(IDLE, stats(num_waiting=1, num_parked=1), 10.0).startswith(
        "running 0, waiting 1, prompts 0"
    )


def test_beside_a_core_until_it_is_gone(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stratakv.engine.api.metrics.stats_log")
    config = engine_config(tiny_model, {"num_blocks": 60, "num_threads": 1})

    async def live() -> None:
        client = InProcessClient(EngineCore(config))
        log = asyncio.ensure_future(StatsLog(client, period_seconds=0.05).run())
        try:
            async with asyncio.timeout(20):
                await asyncio.sleep(0.2)
                assert not caplog.messages, "nothing happened yet"
                params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
                request = AddRequest("a", pack_token_ids([7] * 40), params)
                async for _ in client.generate(request):
                    pass
                while not caplog.messages:
                    await asyncio.sleep(0.02)
        finally:
            await client.close()
        async with asyncio.timeout(5):
            await log

    asyncio.run(live())
    assert all(message.startswith("running ") for message in caplog.messages)
    assert any("tok/s" in message for message in caplog.messages)
