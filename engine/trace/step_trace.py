# SPDX-License-Identifier: Apache-2.0
"""The scheduler's observer that writes a step trace."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...connector.base import KVConnectorScheduler
from ..config.engine_config import SchedulerConfig
from ..observer import Decision, Observer, StepMade, StepSnapshot
from ..request.request import Request
from .records import VERSION, EncodedDecision, EventRecord, HitRecord, SnapshotRecord, StartRecord
from .trace_writer import TraceWriter

POOL = "pool"
NO_CONNECTOR = "none"


class StepTrace(Observer):
    """Writes a step trace to the file at `path` until `close`. `num_blocks` is the KV pool's size.

    Raises ConfigError if the file cannot be opened."""

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
        self._num_running = 0  # running requests before the step
        # The requests of the last step, if it gave a token to each running request alone.
        self._going_on: dict[str, int] | None = None
        self._decisions = _Decisions()
        self._obstacles: dict[str, str] = {}  # request id → its last recorded obstacle
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
        self._num_running = snapshot.num_running
        pins = snapshot.pins
        job_ids = () if pins is None else tuple(pins.job_ids())
        estimates = self._connector.estimates
        free, total = (None, None) if estimates is None else estimates.cpu_blocks()
        self._writer.put(
            SnapshotRecord(
                step=snapshot.step_id,
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
        tokens = made.num_tokens
        if not (
            made.total_tokens == len(tokens) == self._num_running
            and not (made.new_ids or made.resumed_ids or made.preempted_ids)
        ):
            self._going_on = None
            self._writer.put(partial(self._decisions.encode_decision, made, self._now()))
            return
        # Two steps in a row that only decode equally many requests have the same requests, since a
        # request that joins is new or resumed. So this step's dictionary can be freed at once, and
        # the next step allocates the same memory, which is still in the processor's cache.
        if self._going_on is None or len(self._going_on) != len(tokens):
            self._going_on = tokens
        self._writer.put(_GoingOn(self._decisions, made.step_id, self._now(), self._going_on))

    def wait_until_written(self, timeout_seconds: float) -> bool:
        return self._writer.wait_until_written(timeout_seconds)

    def close(self) -> None:
        """Write the remaining records. `close` waits a few seconds at most."""
        self._writer.close()

    def _now(self) -> float:
        return round(time.monotonic() - self._began, 6)


class _Decisions:
    """Encodes decision records on the writer's thread. Most steps have the same requests as the
    step before, with one token each; the ids of such requests are encoded only once."""

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()
        self._known: dict[str, int] | None = None
        self._encoded = _Ids(msgspec.Raw(b"[]"), msgspec.Raw(b"{}"))

    def encode_decision(self, made: StepMade, now: float) -> EncodedDecision:
        """Return the record of any step."""
        others = {*made.new_ids, *made.resumed_ids}
        running = [each for each in made.num_tokens if each not in others]
        encoded = self._encode(running, made.num_tokens)
        return EncodedDecision(
            step=made.step_id,
            time=now,
            scheduled_new_ids=list(made.new_ids),
            scheduled_resumed_ids=sorted(made.resumed_ids),
            scheduled_running_ids=encoded.running,
            preempted_ids=sorted(made.preempted_ids),
            num_scheduled_tokens=encoded.tokens,
            total_scheduled_tokens=made.total_tokens,
        )

    def going_on(self, step_id: int, now: float, tokens: dict[str, int]) -> EncodedDecision:
        """Return the record of a step that gave one token to each running request. Steps with the
        same requests must pass the same `tokens` object."""
        if tokens is not self._known:
            self._known, self._encoded = tokens, self._encode(list(tokens), tokens)
        return EncodedDecision(
            step=step_id,
            time=now,
            scheduled_new_ids=(),
            scheduled_resumed_ids=(),
            scheduled_running_ids=self._encoded.running,
            preempted_ids=(),
            num_scheduled_tokens=self._encoded.tokens,
            total_scheduled_tokens=len(tokens),
        )

    def _encode(self, running: list[str], tokens: dict[str, int]) -> _Ids:
        encode = self._encoder.encode
        return _Ids(msgspec.Raw(encode(running)), msgspec.Raw(encode(tokens)))


class _Ids(NamedTuple):
    """A step's request ids and token counts as JSON."""

    running: msgspec.Raw
    tokens: msgspec.Raw


class _GoingOn(msgspec.Struct, gc=False, frozen=True):
    """A step that gave one token to each running request, from which the writer's thread makes the
    record. `gc=False` keeps this object and the records from the garbage collector, which would
    otherwise scan a step's hundreds of live objects whenever about ten steps are queued."""

    decisions: _Decisions
    step_id: int
    now: float
    tokens: dict[str, int]

    def __call__(self) -> EncodedDecision:
        return self.decisions.going_on(self.step_id, self.now, self.tokens)
