# SPDX-License-Identifier: Apache-2.0
"""The observer that writes a step trace."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from ...connector.base import KVConnectorScheduler
from ..config import SchedulerConfig
from ..observer import Decision, Observer, StepMade, StepSnapshot
from ..request import Request
from .records import (
    VERSION,
    DecisionRecord,
    EventRecord,
    HitRecord,
    SnapshotRecord,
    StartRecord,
)
from .writer import TraceWriter

POOL = "pool"
NO_CONNECTOR = "none"


class StepTrace(Observer):
    """Writes to the file at `path` until it is closed; `num_blocks` are those of the pool.

    Raises ConfigError where the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        config: SchedulerConfig,
        connector: KVConnectorScheduler,
        *,
        model: str = "",
        block_size: int = 0,
        num_blocks: int = 0,
        connector_name: str = NO_CONNECTOR,
    ) -> None:
        self._writer = TraceWriter(path)
        self._began = time.monotonic()
        self._config = config
        self._connector = connector
        self._connector_name = connector_name
        self._step = 0
        self._obstacles: dict[str, str] = {}  # request id → what it was last said to wait for
        self._writer.put(
            StartRecord(
                version=VERSION,
                started=datetime.now(UTC).isoformat(timespec="milliseconds"),
                model=model,
                block_size=block_size,
                num_gpu_blocks=num_blocks,
                connector_name=connector_name,
            )
        )

    def snapshot(self, snapshot: StepSnapshot) -> None:
        self._step = snapshot.step_id
        cpu_blocks = self._connector.cpu_blocks()
        pins = snapshot.pins
        job_ids = [] if pins is None else pins.job_ids()
        free, total = (None, None) if cpu_blocks is None else cpu_blocks
        self._writer.put(
            SnapshotRecord(
                step=self._step,
                time=self._now(),
                running=snapshot.num_running,
                waiting=snapshot.num_waiting,
                gpu_blocks_free=snapshot.num_free_blocks,
                gpu_blocks_total=snapshot.num_blocks,
                gpu_blocks_cached=snapshot.num_cached_blocks,
                cpu_blocks_free=free,
                cpu_blocks_total=total,
                cpu_blocks_cached=None if free is None or total is None else total - free,
                num_pinned=len(job_ids),
                pinned_blocks=0 if pins is None else pins.num_blocks,
                pinned_job_ids=job_ids,
                max_num_running_reqs=self._config.max_num_seqs,
                max_num_scheduled_tokens=self._config.max_num_batched_tokens,
            )
        )

    def hit(self, request: Request, tokens: Mapping[str, int]) -> None:
        external = {name: count for name, count in tokens.items() if name != POOL and count}
        self._writer.put(
            HitRecord(
                step=self._step,
                time=self._now(),
                req_id=request.request_id,
                job_id=request.job_id,
                local_hit_tokens=tokens.get(POOL, 0),
                external_hit_tokens=sum(external.values()),
                tokens_by_tier=external,
                total_prompt_tokens=request.num_prompt_tokens,
                num_tokens=request.num_tokens,
                connector_name=self._connector_name,
                load_kv_async=bool(external),
            )
        )

    def decision(self, request: Request, decision: Decision, cause: str = "") -> None:
        request_id = request.request_id
        if decision is Decision.WAITS:
            if self._obstacles.get(request_id) == cause:
                return
            self._obstacles[request_id] = cause
        else:
            self._obstacles.pop(request_id, None)
        self._writer.put(
            EventRecord(
                step=self._step,
                time=self._now(),
                req_id=request_id,
                event=decision.value,
                cause=cause,
                num_tokens=request.num_tokens,
                num_computed_tokens=request.num_computed_tokens,
            )
        )

    def step(self, made: StepMade) -> None:
        self._writer.put(partial(_decision, made, self._now()))

    def close(self) -> None:
        """Write what is left. Waits for a few seconds at most."""
        self._writer.close()

    def _now(self) -> float:
        return round(time.monotonic() - self._began, 6)


def _decision(made: StepMade, now: float) -> DecisionRecord:
    tokens = made.num_tokens
    others = {*made.new_ids, *made.resumed_ids}
    running = [each for each in tokens if each not in others] if others else list(tokens)
    return DecisionRecord(
        step=made.step_id,
        time=now,
        scheduled_new_ids=list(made.new_ids),
        scheduled_resumed_ids=sorted(made.resumed_ids),
        scheduled_running_ids=running,
        preempted_ids=sorted(made.preempted_ids),
        num_scheduled_tokens=tokens,
        total_scheduled_tokens=sum(tokens.values()),
    )
