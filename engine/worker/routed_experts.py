# SPDX-License-Identifier: Apache-2.0
"""RoutedExpertsCollector: the experts that the router chose for the tokens of requests, for each
layer.

Each step writes the experts of all its rows to `Decoder.chosen_experts`. The collector stores the
experts of a request by position. When a request gets a token, the experts of all earlier positions
that were not delivered yet are delivered. If a position is computed again, after a preemption or a
rejected draft, its experts are overwritten."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..batch.batch_update import IntArray
from ..request.routed_rows import RoutedRows
from ..scheduler.output import ModelRunnerOutput
from .input_batch import InputBatch, WorkerRequest

_ONE_BYTE = 256  # the most experts whose numbers fit into one byte


@dataclass(slots=True)
class _Record:
    request: WorkerRequest
    first: int  # position of the first row
    rows: npt.NDArray[np.uint16]  # [positions, layers, experts of a token]; grows
    num_told: int  # positions before this one have been delivered


class RoutedExpertsCollector:
    """The present requests for experts. Each step calls `record_step`, then `deliver_rows`."""

    def __init__(self, chosen: Tensor, num_experts: int, max_model_len: int) -> None:
        """`chosen` is int32 `[layers, tokens, experts of a token]`; each step overwrites it."""
        self._chosen, self._max_model_len = chosen, max_model_len
        self._dtype = np.dtype(np.uint8 if num_experts <= _ONE_BYTE else "<u2")
        self._records: dict[str, _Record] = {}

    def add_request(self, request: WorkerRequest) -> None:
        """Add a new request that requests its experts. If it has output tokens (after a
        preemption), the experts before its last token were delivered."""
        first = request.routed_from
        if first is None:
            return
        layers, _, each = self._chosen.shape
        told = first if not request.output_token_ids else max(first, request.num_tokens - 1)
        capacity = max(0, min(2 * request.num_tokens, self._max_model_len) - first)
        rows = np.zeros((capacity, layers, each), np.uint16)
        self._records[request.request_id] = _Record(request, first, rows, told)

    def remove_request(self, request_id: str) -> None:
        """Drop a request that has ended. A request without experts to report is ignored."""
        self._records.pop(request_id, None)

    def record_step(
        self, batch: InputBatch, rows: IntArray, computed: IntArray, counts: IntArray
    ) -> None:
        """Store the experts of a step in which each of `rows` of the batch has computed `counts`
        tokens after its `computed` tokens."""
        if not self._records:
            return
        ends = np.cumsum(counts)
        chosen = self._chosen[:, : int(ends[-1])].cpu().numpy()
        row_index = {row: index for index, row in enumerate(rows.tolist())}
        for request_id, record in self._records.items():
            index = row_index.get(batch.row_of.get(request_id, -1))
            if index is None:
                continue
            start, count, end = int(computed[index]), int(counts[index]), int(ends[index])
            skipped = max(0, record.first - start)
            if skipped < count:
                at = start + skipped - record.first
                new = chosen[:, end - count + skipped : end].transpose(1, 0, 2)
                _grow(record, at + len(new))
                record.rows[at : at + len(new)] = new

    def deliver_rows(self, requests: Iterable[WorkerRequest], result: ModelRunnerOutput) -> None:
        """Add the experts to the result, for those of `requests` (the requests that the step
        samples) that got tokens in this step. Another request with the same id gets no experts."""
        for request in requests:
            request_id = request.request_id
            record = self._records.get(request_id)
            if record is None or record.request is not request:
                continue
            if not result.sampled_token_ids.get(request_id):
                continue
            start, end = record.num_told, max(record.num_told, request.num_tokens - 1)
            rows = record.rows[start - record.first : end - record.first].astype(self._dtype)
            result.routed_experts[request_id] = RoutedRows(start, rows.shape, rows.tobytes())
            record.num_told = end


def _grow(record: _Record, num_rows: int) -> None:
    if num_rows > len(record.rows):
        grown = np.zeros((2 * num_rows, *record.rows.shape[1:]), np.uint16)
        grown[: len(record.rows)] = record.rows
        record.rows = grown
