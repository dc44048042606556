# SPDX-License-Identifier: Apache-2.0
"""The scheduler's exchange with the connector: passes blocks to store to the connector, and takes
the connector's reports of ended loads."""

from __future__ import annotations

from collections.abc import Sequence

from ...connector.messages import (
    NOTHING_FINISHED,
    ConnectorMetadata,
    ConnectorWorkerOutput,
    EvictedBlock,
)
from ..observer import Decision
from ..request.core_messages import TokenOutput
from ..request.request import Request, RequestStatus
from .output import OutputWriter
from .request_states import RequestStates

# Below this many blocks, storing at eviction is cheaper than waking the copy thread early.
MIN_AHEAD_BLOCKS = 8
NONE_AHEAD: list[EvictedBlock] = []  # for most steps; read only
LOAD_FAILED = (
    "blocks of this prompt could not be loaded: {}. It was not computed instead because of "
    "--kv-offload-load-failure fail"
)


class ConnectorExchange:
    """Exchanges data with the connector when a step is scheduled and when its result comes."""

    def __init__(
        self,
        states: RequestStates,
        writer: OutputWriter,
        *,
        fails_with_load: bool = False,
    ) -> None:
        """`fails_with_load`: whether requests whose load failed end with an error."""
        self._states = states
        self._writer = writer
        context = states.context
        config, manager = context.config, context.manager
        self._connector = context.connector
        self._stores_ahead = context.connector.stores_ahead
        self._pool = manager.pool
        self._fails_with_load = fails_with_load
        # The most blocks that two steps can allocate (except one block per running request), but at
        # most a quarter of the pool.
        two_steps = 2 * -(-config.max_num_batched_tokens // manager.block_size) * manager.num_groups
        self._soon_taken = min(two_steps, self._pool.num_blocks // 4)
        # Half of `_soon_taken` blocks are stored at a time, so that stored blocks for one step
        # remain at the front of the queue.
        self._least_ahead = max(MIN_AHEAD_BLOCKS, self._soon_taken // 2)

    def build_meta(self, evicted: Sequence[EvictedBlock]) -> ConnectorMetadata:
        """Return this step's copies, including copies of blocks that are not evicted yet."""
        pool, ahead = self._pool, NONE_AHEAD
        # Most steps skip this slow code, as they find no fresh and no cold blocks.
        if pool.fresh or pool.has_cold(self._least_ahead):
            wanted = 0 if self._stores_ahead is None else self._stores_ahead.num_wanted_ahead()
            ahead = pool.take_fresh(wanted) if wanted and pool.fresh else []
            if wanted > len(ahead):
                count = wanted - len(ahead)
                ahead += pool.take_cold(count, self._soon_taken, min(count, self._least_ahead))
        return self._connector.build_meta(evicted, ahead)

    def take_reports(
        self, worker_output: ConnectorWorkerOutput | None, now: float
    ) -> tuple[bool, list[TokenOutput]]:
        """Queue the requests whose loads have ended; with `fails_with_load`, end the requests whose
        load failed. Return whether there were reports, and the outputs of the ended requests."""
        context = self._states.context
        failures: list[tuple[Request, str]] = []
        if worker_output is None:
            worker_output = NOTHING_FINISHED
        reports = self._connector.update_from_worker(worker_output)
        for request, report in self._states.take_reports(reports):
            context.observer.decision(request, Decision.LOADED, report.failure or "")
            progress = request.progress
            progress.load_seconds += report.seconds
            progress.loaded_by_tier = dict(report.tokens_by_tier)
            if request.num_cached_tokens < 0:
                request.cached_tokens_by_tier = dict(report.tokens_by_tier)
            is_failed = request.external_load_failed or report.shorter_tokens > 0
            context.counts["loads_failed"] += is_failed
            if report.failure:
                failures.append((request, report.failure))
        if self._states.loads.failures:
            failures += self._states.loads.take_failures()
        if not (self._fails_with_load and failures):
            return bool(reports), []
        ended = RequestStatus.FINISHED_ERROR
        return bool(reports), [
            self._writer.finish_request(request, ended, now, LOAD_FAILED.format(failure))
            for request, failure in dict(failures).items()
            if not request.is_finished
        ]
