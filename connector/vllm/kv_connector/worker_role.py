# SPDX-License-Identifier: Apache-2.0
"""StrataConnector's role in vLLM's worker: StrataKV's worker side on vLLM's KV cache.

    register       registers vLLM's tensors
    begin_step     before the step runs: blocks that it overwrites are copied out; loads and other
                   stores begin, and run in parallel with the step
    results        the requests whose loads have ended or failed, each once

vLLM writes to blocks on one stream, so a copy waits for the earlier work of that stream. During the
copy of a load, a thread compares the digests of the load's bytes in the slab with the stored
digests; if the digests differ, the load fails.

vLLM's worker ends if a connector raises, so no call after `register` raises. A copy that cannot
begin counts as failed; if the slab cannot be mapped, all copies count as failed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ....tiers.settings.values import ConfigError
from ....tiers.tag import payload_digest
from ...device.base import CopyDevice
from ...device.cpu import CpuCopyDevice, slab_pages
from ...device.device_choice import make_device
from ...messages import ConnectorMetadata, ConnectorWorkerOutput
from ...offload_worker import OffloadWorker
from .pages import PagePlan, buffer_of, parts_of, pool_of
from .steps import PartLoad, SlabPlace, StepPlan, StepReport

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
STOPPED = "vLLM's worker moves nothing any more; everything is computed from now on"


@dataclass(slots=True)
class Results:
    """The results for vLLM after a step."""

    finished: set[str] = field(default_factory=set)  # requests whose loads ended or failed
    failed: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Waiting:
    """A request whose load is under way."""

    missing: list[int]
    jobs: set[int]  # jobs that have not ended
    has_failed: bool = False


class _Checked(NamedTuple):
    request_id: str
    part: PartLoad
    damaged: Future[list[int]]


class WorkerRole:
    """Copies between the slab and vLLM's KV cache on this rank, which has the layout `plan`."""

    def __init__(self, plan: PagePlan, rank: int = 0) -> None:
        self._plan = plan
        self._rank = rank
        self._buffer: torch.Tensor | None = None
        self._worker: OffloadWorker | None = None
        self._slots: Any = None
        self._checker: ThreadPoolExecutor | None = None
        self._waiting: dict[str, _Waiting] = {}  # by request id
        self._loads: dict[int, _Checked] = {}  # by job id, until reported
        self._num_ended = 0
        self._given_up: set[str] = set()
        # Jobs whose copy has ended and whose blocks are still being hashed.
        self._copied: list[int] = []
        self._output = ConnectorWorkerOutput()
        self._damaged: dict[int, list[int]] = {}
        self._invalid: set[int] = set()
        self._number = 0
        self._error: str | None = None

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Register vLLM's tensors by layer. Raises ConfigError if they do not match the plan."""
        self._buffer = buffer_of(self._plan, kv_caches)
        if self._buffer.device.type != "cpu":
            pool_of(self._plan, self._buffer)

    def begin_step(self, plan: StepPlan) -> None:
        """Queue the step's copies, and return when the step may overwrite its blocks."""
        self._number = plan.number
        if self._worker is None and self._error is None:
            self._attach(plan.place)
        for load in plan.loads:
            mine = [part for part in load.parts if part.rank == self._rank]
            self._waiting[load.request_id] = _Waiting(load.missing, {each.job_id for each in mine})
            for part in mine:
                self._loads[part.job_id] = _Checked(
                    load.request_id, part, self._verify_loaded_part(part)
                )
        self._given_up.update(plan.given_up)
        moves = self._of_this_rank(plan.moves)
        if self._worker is None:
            self._fail_all(moves)
            return
        try:
            self._worker.start_step(moves)
            self._worker.wait_before_forward()
        except Exception as error:
            log.exception(STOPPED)
            self._abandon(error)

    def results(self) -> Results:
        """Return the loads that have ended since the last call."""
        results = Results(failed=self._given_up)
        self._given_up = set()
        if self._worker is not None:
            try:
                self._merge(self._worker.poll())
            except Exception as error:
                log.exception(STOPPED)
                self._abandon(error)
        copied, self._copied = self._copied, []
        for job_id in copied:
            if not self._loads[job_id].damaged.done():
                self._copied.append(job_id)
                continue
            self._end_copied(job_id)
        for job_id in self._output.failed_loads:
            each = self._loads.pop(job_id, None)
            if each is not None:
                self._end_job(each, has_failed=True)
        # A load is reported once no copy writes to the request's blocks.
        for request_id, waiting in [*self._waiting.items()]:
            if waiting.jobs:
                continue
            del self._waiting[request_id]
            results.finished.add(request_id)
            if waiting.has_failed:
                results.failed.add(request_id)
            else:
                results.invalid_blocks.update(waiting.missing)
        results.finished |= results.failed
        self._invalid = results.invalid_blocks
        return results

    def invalid_blocks(self) -> set[int]:
        """Return the blocks that the loads of the last `results` did not fill."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> StepReport:
        """Return the step's report for the scheduler role; call it after `results`."""
        self._output.num_ended = self._num_ended
        report = StepReport(self._number, self._output, self._damaged, self._error)
        self._output, self._damaged = ConnectorWorkerOutput(), {}
        return report

    def shutdown(self) -> None:
        """Wait until copies have ended, and release vLLM's memory. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(CLOSE_SECONDS)
        if self._checker is not None:
            self._checker.shutdown(wait=True, cancel_futures=True)
            self._checker = None
        self._buffer = self._slots = None

    def _attach(self, place: SlabPlace) -> None:
        device: CopyDevice | None = None
        try:
            slab = place.map_slab()
            if slab.layout.page_bytes != self._plan.block_bytes:
                raise ConfigError(
                    f"a block has {self._plan.block_bytes} bytes in this worker and "
                    f"{slab.layout.page_bytes} in vLLM's scheduler"
                )
            if self._buffer is None:
                raise ConfigError("vLLM has registered no KV cache")
            device = make_device(str(self._buffer.device))
            device.register_slab(slab)
            device.make_digests()
            if isinstance(device, CpuCopyDevice):
                device.register_parts(parts_of(self._plan, self._buffer))
            else:
                device.register_pool(pool_of(self._plan, self._buffer))
            self._slots = slab_pages(slab)
            self._checker = ThreadPoolExecutor(1, thread_name_prefix="stratakv-vllm-check")
            # vLLM runs steps while copies run, so no wake-up is needed.
            self._worker = OffloadWorker(device, lambda _num_ended: None)
        except Exception as error:
            log.exception("vLLM's worker cannot reach StrataKV's slab; everything is computed")
            self._error = f"a worker cannot reach the slab: {error}"
            if device is not None:
                device.close(0.0)

    def _abandon(self, error: Exception) -> None:
        """Handle an error of the connector: wait for the copies, and fail every load."""
        self._error = f"a worker has failed: {error}"
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(CLOSE_SECONDS)
        self._copied = []
        reported = {*self._output.failed_loads, *self._output.finished_loads}
        self._output.failed_loads += [job for job in self._loads if job not in reported]

    def _of_this_rank(self, moves: ConnectorMetadata) -> ConnectorMetadata:
        rank = self._rank
        return ConnectorMetadata(
            [job for job in moves.stores if job.part.rank == rank],
            [job for job in moves.loads if job.part.rank == rank],
            [job for job in moves.ahead if job.part.rank == rank],
            moves.overtaken,
        )

    def _verify_loaded_part(self, part: PartLoad) -> Future[list[int]]:
        """Return the positions with wrong digests. Slots stay pinned until the job is reported."""
        if self._checker is None or self._slots is None:
            done: Future[list[int]] = Future()
            done.set_result([])
            return done
        return self._checker.submit(_damaged, self._slots, part)

    def _end_copied(self, job_id: int) -> None:
        each = self._loads.pop(job_id)
        future = each.damaged
        damaged = [*range(len(each.part.digests))] if future.exception() else future.result()
        if damaged:
            self._damaged[job_id] = damaged
            self._output.failed_loads.append(job_id)
        else:
            self._output.finished_loads.append(job_id)
        self._end_job(each, has_failed=bool(damaged))

    def _end_job(self, job: _Checked, *, has_failed: bool) -> None:
        waiting = self._waiting[job.request_id]
        waiting.jobs.discard(job.part.job_id)
        waiting.has_failed |= has_failed

    def _merge(self, output: ConnectorWorkerOutput) -> None:
        """Add the worker side's output to the report; copied loads only once they are hashed."""
        ours = self._output
        ours.finished_stores += output.finished_stores
        ours.failed_stores += output.failed_stores
        ours.failed_loads += output.failed_loads
        ours.store_digests |= output.store_digests
        self._num_ended = max(self._num_ended, output.num_ended)
        ours.store_copy_seconds += output.store_copy_seconds
        ours.load_copy_seconds += output.load_copy_seconds
        ours.store_wait_seconds += output.store_wait_seconds
        for job_id in output.finished_loads:
            if job_id in self._loads:
                self._copied.append(job_id)
            else:
                ours.finished_loads.append(job_id)

    def _fail_all(self, moves: ConnectorMetadata) -> None:
        self._output.failed_stores += [job.job_id for job in (*moves.stores, *moves.ahead)]
        self._output.failed_loads += [job.job_id for job in moves.loads]


def _damaged(slots: np.ndarray[Any, Any], part: PartLoad) -> list[int]:
    pairs = enumerate(zip(part.slots, part.digests, strict=True))
    return [
        position
        for position, (slot, digest) in pairs
        if digest is None or payload_digest(slots[slot].data) != digest
    ]
