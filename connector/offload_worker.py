# SPDX-License-Identifier: Apache-2.0
"""The worker side of offloading: turns one step's jobs into copies in the right order.

    store job   after the last writer of the pool; a device without streams copies at once
    load job    after the last writer, and after every store queued before, because the load may
                overwrite blocks that are being stored
    ahead job   after the store jobs of the step, in parallel with the forward pass
    forward     after every store of the step, and after the ahead jobs whose blocks it overwrites

This module handles no keys and no requests: blocks and slots are numbers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .base import CLOSE_SECONDS, KVConnectorWorker
from .device.base import CopyDevice, Event, Stream
from .messages import NOTHING_FINISHED, ConnectorMetadata, ConnectorWorkerOutput, CopyJob

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# The longest wait for stores. Copies take milliseconds; a longer one means a stuck stream.
STORE_WAIT_SECONDS = 30.0


class OffloadWorker(KVConnectorWorker):
    """Runs copy jobs on a device on which the slab is registered already. Any thread may call
    `wakeup`, with the number of jobs that have ended since the start. `wakeup` must return at once.
    Calls may be lost or reordered, as long as the last number arrives."""

    def __init__(
        self,
        device: CopyDevice,
        wakeup: Callable[[int], None],
        *,
        store_wait_seconds: float = STORE_WAIT_SECONDS,
    ) -> None:
        self._device = device
        self._wakeup = wakeup
        self._counting = threading.Lock()
        self._num_ended = 0
        self._store_wait_seconds = store_wait_seconds
        self._stores: dict[int, Event] = {}
        self._ahead: set[int] = set()  # ids of jobs in `_stores` for which no forward pass waits
        self._loads: dict[int, Event] = {}
        self._torn: set[int] = set()  # stores whose blocks were overwritten during the copy
        self._unreported: ConnectorWorkerOutput | None = None
        device.set_notify(self._job_ended)

    def register_pool(self, pool: torch.Tensor) -> None:
        self._device.register_pool(pool)

    def start_step(self, meta: ConnectorMetadata) -> None:
        if not meta:
            return
        if meta.overtaken:
            self._ahead.difference_update(meta.overtaken)
        try:
            self._start_copy_jobs(meta)
        except Exception:
            log.exception("the copies of a step could not begin")
            news = self._news()
            known = {*self._stores, *self._loads, *news.failed_stores, *news.failed_loads}
            for stream, jobs in (
                (Stream.STORE, [*meta.stores, *meta.ahead]), (Stream.LOAD, meta.loads)
            ):  # fmt: skip
                for job in jobs:
                    if job.job_id not in known:
                        self._report_failed_job(job, stream)

    def _start_copy_jobs(self, meta: ConnectorMetadata) -> None:
        after = [self._device.writer_event()]
        if meta.stores:
            began = time.monotonic()
            for job in meta.stores:
                self._submit_copy(Stream.STORE, job, after, is_held=True)
            self._news().store_wait_seconds += time.monotonic() - began
        if meta.loads:
            # Running stores end in order, so that waiting for the newest is enough.
            newest = [event for event in self._stores.values() if not event.done()][-1:]
            for job in meta.loads:
                self._submit_copy(Stream.LOAD, job, after + newest)
        for job in meta.ahead:
            self._submit_copy(Stream.STORE, job, after)
            if job.job_id in self._stores:  # the store job has begun
                self._ahead.add(job.job_id)

    def wait_before_forward(self) -> None:
        if len(self._stores) == len(self._ahead):
            return  # no running store has blocks that this pass overwrites
        due = {
            job_id: event
            for job_id, event in self._stores.items()
            if job_id not in self._ahead and job_id not in self._torn and not event.done()
        }
        if not due:
            return
        began = time.monotonic()
        late = self._device.hold_compute(list(due.values()), self._store_wait_seconds)
        for job_id, event in due.items():
            if event in late:
                # The forward pass must not wait longer, and overwrites the block during the copy.
                # The slot's bytes are then invalid, and the job fails once the copy has ended.
                self._torn.add(job_id)
                log.error("a store has not left the pool within %s s", self._store_wait_seconds)
        self._news().store_wait_seconds += time.monotonic() - began

    def poll(self) -> ConnectorWorkerOutput:
        if not (self._stores or self._loads or self._unreported is not None):
            return NOTHING_FINISHED
        output, self._unreported = self._news(), None
        output.num_ended = self._num_ended
        if self._stores:
            ended = self._pop_ended_copies(
                self._stores, output.finished_stores, output.failed_stores
            )
            for job_id in output.finished_stores:
                event = ended.get(job_id)
                digests = None if event is None else self._device.digests(event)
                if digests is not None:
                    output.store_digests[job_id] = digests
            self._torn.difference_update(ended)
            self._ahead.difference_update(ended)
            output.store_copy_seconds = _seconds_of(ended)
        if self._loads:
            ended = self._pop_ended_copies(self._loads, output.finished_loads, output.failed_loads)
            output.load_copy_seconds = _seconds_of(ended)
        return output

    def shutdown(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        if not self._device.close(timeout_seconds):
            log.error("copies are still running %.1f s after the shutdown began", timeout_seconds)

    def _news(self) -> ConnectorWorkerOutput:
        if self._unreported is None:
            self._unreported = ConnectorWorkerOutput()
        return self._unreported

    def _job_ended(self) -> None:
        with self._counting:
            self._num_ended += 1
            num_ended = self._num_ended
        self._wakeup(num_ended)

    def _submit_copy(
        self, stream: Stream, job: CopyJob, after: list[Event], *, is_held: bool = False
    ) -> None:
        running = self._stores if stream is Stream.STORE else self._loads
        try:
            if is_held:
                event = self._device.copy_held(job.block_ids, job.slots, after)
            else:
                event = self._device.copy(stream, job.block_ids, job.slots, after)
            running[job.job_id] = event
        except Exception:
            log.exception("a %s of %d blocks could not begin", stream.value, len(job.slots))
            self._report_failed_job(job, stream)

    def _report_failed_job(self, job: CopyJob, stream: Stream) -> None:
        """Report a job that could not begin as failed."""
        output = self._news()
        failed = output.failed_stores if stream is Stream.STORE else output.failed_loads
        failed.append(job.job_id)
        self._job_ended()

    def _pop_ended_copies(
        self, running: dict[int, Event], finished: list[int], failed: list[int]
    ) -> dict[int, Event]:
        """Remove the jobs that have ended from `running`. Return the jobs' events by id."""
        ended = {job_id: event for job_id, event in running.items() if event.done()}
        for job_id, event in ended.items():
            del running[job_id]
            error = event.error()
            if error is not None:
                log.error("a copy failed: %s", error)
            good = error is None and job_id not in self._torn
            (finished if good else failed).append(job_id)
        return ended


def _seconds_of(ended: dict[int, Event]) -> float:
    return sum(event.seconds() for event in ended.values())
