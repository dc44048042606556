# SPDX-License-Identifier: Apache-2.0
"""StepBatch: the worker's requests and the rows of its batch, updated by the changes of each
step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ..batch.batch_update import BatchUpdate, IntArray
from ..scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from .input_batch import HeldRow, InputBatch, WorkerRequest


class StepBatch:
    """All requests of the worker, and its batch. `requests` has all requests by id, including
    preempted requests, which are not in the batch.

    If an update fails midway, the step fails, and the scheduler ends the requests of this step. The
    batch is then incomplete, so the next step first gives every other request a row again."""

    def __init__(self, batch: InputBatch) -> None:
        self.batch = batch
        self.requests: dict[str, WorkerRequest] = {}
        self._is_dirty = False
        # After a failed update: the rows to restore, for requests in no failed step.
        self._held: list[HeldRow] | None = None

    def apply_step(self, output: SchedulerOutput, take: Callable[[BatchUpdate], None]) -> None:
        """Apply the changes of a step. If rows of the batch have changed, call `take` with the
        `BatchUpdate`. After an exception, the next step must name this step's requests as finished,
        and its preempted requests as preempted."""
        was_dirty, self._is_dirty = self._is_dirty, True
        if was_dirty:
            gone = output.finished_request_ids | output.preempted_request_ids
            held = self.batch.held_rows() if self._held is None else self._held
            self._held = [row for row in held if row.request.request_id not in gone]
            self.batch.refill(self._held)
        for request_id in output.finished_request_ids:
            self.batch.remove_request(request_id)
            self.requests.pop(request_id, None)
        for request_id in output.preempted_request_ids:
            self.batch.remove_request(request_id)
        for new in output.new_requests:
            request = self.requests[new.request_id] = WorkerRequest(
                new.request_id,
                new.prompt_token_ids,
                new.sampling_params,
                list(new.output_token_ids),
                new.prompt_embeds is None,
                new.pooling,
                new.cache_salt,
                new.num_likeliest,
                new.routed_from,
                new.adapter,
            )
            self.batch.add(request, new.block_ids, new.num_computed_tokens)
        self._follow_cached(output.cached_requests)
        for copy in output.block_copies:
            table = self.batch.tables[copy.group_id]
            table.replace_block(self.batch.row_of[copy.request_id], copy.place, copy.target)
        update = self.batch.condense_rows()
        if update is not None:
            take(update)
        self._is_dirty, self._held = False, None

    def with_forks(
        self, new: Iterable[NewRequestData], rows: IntArray, places: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Add the forks among the `new` requests to the `rows` of the batch that get a token and to
        the `places` of their logits, and return both. The token of a fork is sampled from the
        logits of its parent. Raises ValueError if the parent gets no token in this step."""
        forks = [each for each in new if each.fork_of]
        if not forks:
            return rows, places
        row_of = self.batch.row_of
        index = {row: index for index, row in enumerate(rows.tolist())}
        parents = [index.get(row_of.get(each.fork_of, -1)) for each in forks]
        if None in parents:
            each = forks[parents.index(None)]
            raise ValueError(
                f"request {each.request_id} chooses a token with {each.fork_of}, which chooses none"
            )
        own = [row_of[each.request_id] for each in forks]
        at = np.array(parents, np.int64)
        return np.append(rows, np.array(own, np.int64)), np.append(places, places[at])

    def _follow_cached(self, cached: CachedRequestData) -> None:
        batch = self.batch
        for request_id, block_ids, computed in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_request_ids:
                request = self.requests[request_id]
                if request_id in cached.output_token_ids:
                    request.output_token_ids[:] = cached.output_token_ids[request_id]
                batch.add(request, block_ids or batch.tables.no_blocks, computed)
                continue
            row = batch.row_of[request_id]
            if computed > batch.num_computed[row]:  # a load has added computed tokens
                batch.num_draft_computed[row] = computed
            batch.num_computed[row] = computed
            if block_ids is not None:
                batch.tables.append_row(block_ids, row)
