# SPDX-License-Identifier: Apache-2.0
"""Logs a line of statistics every few seconds while the engine has requests.

    running 12, waiting 3, prompts 3,410 tok/s (62 % cached), computed 1,800 tok/s, pool 43 %

Rates and preemptions are differences of two replies to `stats`; other values are the latest."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...client.base import EngineClient, EngineDead

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 10.0

Stats = Mapping[str, Any]  # the engine core's reply to the call `stats`


class StatsLog:
    """Writes the line of statistics, in the event loop of the engine's client."""

    def __init__(self, client: EngineClient, period_seconds: float = PERIOD_SECONDS) -> None:
        self._client = client
        self._period = period_seconds
        self._last: Stats | None = None
        self._last_seconds = 0.0

    async def run(self) -> None:
        """Log a line every period until cancelled or until the engine core has ended."""
        while self._client.is_alive:
            await self._look()
            await asyncio.sleep(self._period)

    async def _look(self) -> None:
        try:
            stats = await self._client.call("stats", timeout_seconds=self._period)
        except (TimeoutError, EngineDead, ValueError) as error:
            logger.debug("the core gave no figures: %s", error)
            return
        now = time.monotonic()
        if self._last is not None:
            line = describe(self._last, stats, now - self._last_seconds)
            if line:
                logger.info("%s", line)
        self._last, self._last_seconds = stats, now


def describe(before: Stats, after: Stats, seconds: float) -> str:
    """Return a line about the work between two replies to `stats`; "" if there was no work."""
    scheduler = after["scheduler"]
    gained = _gained(before["scheduler"], scheduler)
    waiting = scheduler["num_waiting"]  # includes requests whose KV blocks are being loaded
    if not (gained("steps") or scheduler["num_running"] or waiting):
        return ""
    prompts = gained("prompt_tokens")
    cached = sum(gained(name) for name in scheduler if name.startswith("cached_tokens_"))
    share = f" ({100 * cached / prompts:.0f} % cached)" if prompts else ""
    parts = [
        f"running {scheduler['num_running']:,}",
        f"waiting {waiting:,}",
        f"prompts {prompts / seconds:,.0f} tok/s{share}",
        f"computed {gained('scheduled_tokens') / seconds:,.0f} tok/s",
        f"generated {gained('generated_tokens') / seconds:,.0f} tok/s",
        f"pool {100 * scheduler['pool_usage']:.0f} %",
        *_tiers(after["connector"]),
    ]
    if preemptions := gained("preemptions"):
        parts.append(f"preempted {preemptions:,.0f}")
    return ", ".join(parts)


def _gained(before: Mapping[str, float], after: Mapping[str, float]) -> Callable[[str], float]:
    # `stats` lacks a counter until its first count.
    return lambda name: after.get(name, 0) - before.get(name, 0)


def _tiers(connector: Stats | None) -> Iterator[str]:
    """Yield the used share of each tier with a capacity, as text."""
    if connector is None:
        return
    for name, figures in connector["tiers"].items():
        if figures.get("capacity_bytes"):
            yield f"{name} {100 * figures['used_bytes'] / figures['capacity_bytes']:.0f} %"
