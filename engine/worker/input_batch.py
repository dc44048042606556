# SPDX-License-Identifier: Apache-2.0
"""InputBatch: the persistent batch, which has the running requests in contiguous rows and is
updated by the changes of each step.

A step removes rows, then adds rows, then calls `condense_rows`, which moves the last rows into the
empty rows and returns a `BatchUpdate`. The sampler applies the same `BatchUpdate` to its rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..batch.batch_update import AddedRow, BatchUpdate, BatchUpdateBuilder, IntArray
from ..cache.kv_block import BlockIds
from ..request.prompt_embeds import EmbedArray
from ..request.request import TokenArray
from ..request.sampling_params import SamplingParams
from ..scheduler.output import NewRequestData
from .block_table import MultiGroupBlockTable
from .forward.forward import HostEmbeds, LateTokens

_KNOWN = -1


@dataclass(slots=True)
class WorkerRequest:
    """The worker's data of a request, kept while the request is preempted."""

    request_id: str
    prompt_token_ids: TokenArray
    params: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    has_prompt_tokens: bool = True  # False: the prompt is embeddings
    pooling: str = ""  # the requested pooled hidden states of the prompt
    cache_salt: bytes = b""  # the salt of the request's tenant
    num_likeliest: int = 0  # see `NewRequestData`
    routed_from: int | None = None  # see `NewRequestData`
    adapter: bytes = b""  # the fingerprint of the request's adapter; b"": none

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class HeldRow(NamedTuple):
    """The row of a request in the batch, as a copy that `refill` takes."""

    request: WorkerRequest
    block_ids: BlockIds
    num_computed: int
    num_draft_computed: int


class ExpectedTokens(NamedTuple):
    """The tokens that the device is still sampling in a step, one for each request."""

    requests: list[WorkerRequest]
    rows: IntArray  # the requests' rows when `expect_tokens` was called
    positions: IntArray  # [requests] positions of the tokens
    num_updates: int  # number of batch updates when `expect_tokens` was called


class InputBatch:
    """The persistent batch of running requests. Rows `0 … len(batch)-1` are in use after
    `condense_rows`.

    The number of a row's tokens includes a token that the device is still sampling. Until the host
    has this token, `expected_index` is its index among the step's sampled tokens."""

    def __init__(self, max_rows: int, max_model_len: int, tables: MultiGroupBlockTable) -> None:
        self.tables = tables
        self.max_model_len = max_model_len
        self.requests: list[WorkerRequest | None] = [None] * max_rows
        self.row_of: dict[str, int] = {}
        # Unused rows take no memory, since the system allocates pages at the first write.
        self.token_ids: npt.NDArray[np.int32] = np.zeros((max_rows, max_model_len), np.int32)
        self.num_prompt: npt.NDArray[np.int64] = np.zeros(max_rows, np.int64)  # tokens
        self.num_tokens: npt.NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.num_computed: npt.NDArray[np.int64] = np.zeros(max_rows, np.int64)
        # The number of tokens for which the draft model has K and V too.
        self.num_draft_computed: npt.NDArray[np.int64] = np.zeros(max_rows, np.int64)
        # The number of tokens at the last request for drafts.
        self.drafts_asked_at: npt.NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.expected_index: npt.NDArray[np.int64] = np.full(max_rows, _KNOWN)
        self._num_updates = 0
        self._builder = BatchUpdateBuilder()
        self._end = 0  # all used rows are below; empty rows below exist only during a step

    def __len__(self) -> int:
        return len(self.row_of)

    def remove_request(self, request_id: str) -> None:
        """Empty the row of a request. A request that is not in the batch is ignored."""
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self.requests[row] = None
            self._builder.remove(row)

    def add(self, request: WorkerRequest, block_ids: BlockIds, num_computed: int) -> int:
        """Add a request to an empty row, and return the row. Raises ValueError if the request is in
        the batch already, if it is too long, or if no row is empty."""
        if request.request_id in self.row_of:
            raise ValueError(f"request {request.request_id} is in the batch already")
        if request.num_tokens > self.max_model_len:
            raise ValueError(
                f"request {request.request_id} has {request.num_tokens} tokens and the batch holds "
                f"at most {self.max_model_len}"
            )
        row = self._free_row()
        self.requests[row] = request
        self.row_of[request.request_id] = row
        prompt_length, length = len(request.prompt_token_ids), request.num_tokens
        self.token_ids[row, :prompt_length] = request.prompt_token_ids
        self.token_ids[row, prompt_length:length] = request.output_token_ids
        self.num_prompt[row] = prompt_length
        self.num_tokens[row] = self.drafts_asked_at[row] = length
        self.num_computed[row] = self.num_draft_computed[row] = num_computed
        self.expected_index[row] = _KNOWN
        self.tables.add_row(block_ids, row)
        self._builder.add(
            AddedRow(
                row,
                request.params,
                request.prompt_token_ids,
                request.output_token_ids,
                request.has_prompt_tokens,
                request.num_likeliest,
            )
        )
        return row

    def put_drafts(self, row: int, draft_token_ids: Sequence[int]) -> None:
        """Write draft tokens after a row's tokens, for the step that checks them. `num_tokens` does
        not include draft tokens."""
        start = int(self.num_tokens[row])
        self.token_ids[row, start : start + len(draft_token_ids)] = draft_token_ids

    def expect_tokens(self, rows: IntArray, index: IntArray | None = None) -> ExpectedTokens:
        """Count one more token in each of these rows. `take_tokens` must be called with the tokens
        before the next call of this method. `index` has the index of each row's token among the
        sampled tokens, or -1 while it is unknown. If `index` is None, the tokens have the order of
        the rows."""
        requests = [self.requests[row] for row in rows.tolist()]
        if None in requests:
            raise ValueError(f"row {rows[requests.index(None)]} of the batch is empty")
        positions = self.num_tokens[rows]
        self.num_tokens[rows] += 1
        self.expected_index[rows] = np.arange(len(rows)) if index is None else index
        return ExpectedTokens(
            cast(list[WorkerRequest], requests), rows, positions, self._num_updates
        )

    def late_tokens(
        self, chosen: Tensor | None, rows: IntArray, computed: IntArray, counts: IntArray
    ) -> LateTokens | None:
        """Return the last tokens of rows whose ids only the device has, because the previous step
        has just `chosen` them. Return None if there are none. Each of `rows` computes `counts`
        tokens after its `computed` tokens."""
        if chosen is None:
            return None
        index = self.expected_index[rows]
        late = np.flatnonzero((index >= 0) & (computed + counts == self.num_tokens[rows]))
        if len(late) == 0:
            return None
        return LateTokens((np.cumsum(counts) - 1)[late], chosen, index[late])

    def take_tokens(
        self, expected: ExpectedTokens, token_ids: Sequence[int], lost: Collection[int] = ()
    ) -> None:
        """Write the sampled tokens to the rows of the batch and to the requests' lists of output
        tokens. The requests at the indices `lost` got no token. Requests may have moved to other
        rows or left the batch since `expect_tokens`."""
        requests, rows, positions, num_updates = expected
        for request, token_id in zip(requests, token_ids, strict=True):
            request.output_token_ids.append(token_id)
        for index in lost:
            requests[index].output_token_ids.pop()
        ids = np.asarray(token_ids, np.int32)
        self.expected_index.fill(_KNOWN)
        if num_updates != self._num_updates:
            here = [self.row_of_request(request) for request in requests]
            kept = np.flatnonzero(np.asarray([row is not None for row in here], np.bool_))
            rows = np.asarray([row for row in here if row is not None], np.int64)
            positions, ids = positions[kept], ids[kept]
        # The last token of a full context is never computed, so it needs no place.
        fits = positions < self.max_model_len
        self.token_ids[rows[fits], positions[fits]] = ids[fits]
        for index in lost:
            if (row := self.row_of_request(requests[index])) is not None:
                self.num_tokens[row] -= 1

    def take_accepted(
        self, request: WorkerRequest, token_ids: Sequence[int], num_rejected: int
    ) -> None:
        """Write the accepted tokens of a request that follow the token written by `take_tokens`. K
        and V of the last `num_rejected` computed tokens are invalid, so these tokens no longer
        count as computed."""
        request.output_token_ids.extend(token_ids)
        row = self.row_of_request(request)
        if row is None:
            return
        start = int(self.num_tokens[row])
        fitting = token_ids[: max(0, self.max_model_len - start)]
        self.token_ids[row, start : start + len(fitting)] = fitting
        self.num_tokens[row] += len(token_ids)
        self.num_computed[row] -= num_rejected
        computed = self.num_computed[row]
        self.num_draft_computed[row] = min(self.num_draft_computed[row], computed)

    def trim_row(self, row: int) -> None:
        """Drop the blocks after a row's last token, which rejected drafts have used."""
        num_slots = self.tables.trim_row(row, int(self.num_tokens[row]))
        self.num_draft_computed[row] = min(self.num_draft_computed[row], num_slots)

    def forget_expected(self) -> None:
        """Stop expecting the tokens of a failed step, whose requests must leave the batch."""
        self.expected_index.fill(_KNOWN)

    def condense_rows(self) -> BatchUpdate | None:
        """Fill the empty rows with the last rows. Return the changes since the last call, or
        None."""
        size = len(self)
        while (hole := self._builder.peek_removed()) is not None and hole < size:
            while self.requests[self._end - 1] is None:
                self._end -= 1
            self._builder.pop_removed()
            self._move_request(self._end - 1, hole)
        self._end = size
        update = self._builder.get_and_reset(size)
        self._num_updates += update is not None
        return update

    def held_rows(self) -> list[HeldRow]:
        """Return the row of every request in the batch. If an update of the batch has failed
        midway, only complete rows are returned; a request that was being added may be missing."""
        held = []
        for request_id, row in self.row_of.items():
            request = self.requests[row]
            if request is not None and request.request_id == request_id:
                blocks = self.tables.block_ids(row)
                computed = int(self.num_computed[row]), int(self.num_draft_computed[row])
                held.append(HeldRow(request, blocks, *computed))
        return held

    def refill(self, held: Iterable[HeldRow]) -> None:
        """Replace the content of the batch by the requests in `held`, instead of a step's removals.
        The next `BatchUpdate` empties all rows and fills them again."""
        self.requests = [None] * len(self.requests)
        self.row_of.clear()
        self._num_updates += 1
        self._builder = BatchUpdateBuilder()
        self._end = len(self.requests)
        for row in range(self._end):
            self._builder.remove(row)
        for request, block_ids, num_computed, num_draft_computed in held:
            row = self.add(request, block_ids, num_computed)
            self.num_draft_computed[row] = num_draft_computed

    def row_of_request(self, request: WorkerRequest) -> int | None:
        """Return the row of `request`, not of another with its id; None if `request` has left."""
        row = self.row_of.get(request.request_id)
        return row if row is not None and self.requests[row] is request else None

    def _free_row(self) -> int:
        row = self._builder.pop_removed()
        if row is not None:
            return row
        if self._end == len(self.requests):
            raise ValueError(f"the batch is full with {self._end} requests")
        self._end += 1
        return self._end - 1

    def _move_request(self, source: int, target: int) -> None:
        request = self.requests[source]
        if request is None:
            raise ValueError(f"row {source} of the batch is empty")
        length = min(int(self.num_tokens[source]), self.max_model_len)
        self.token_ids[target, :length] = self.token_ids[source, :length]
        self.num_prompt[target] = self.num_prompt[source]
        self.num_tokens[target] = self.num_tokens[source]
        self.num_computed[target] = self.num_computed[source]
        self.num_draft_computed[target] = self.num_draft_computed[source]
        self.drafts_asked_at[target] = self.drafts_asked_at[source]
        self.expected_index[target] = self.expected_index[source]
        self.tables.move_row(source, target)
        self.requests[source], self.requests[target] = None, request
        self.row_of[request.request_id] = target
        self._builder.move(source, target)


class PromptEmbeds:
    """The prompt embeddings of all requests that have not ended."""

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._embeds: dict[str, EmbedArray] = {}

    def __bool__(self) -> bool:
        return bool(self._embeds)

    def add(self, new: NewRequestData) -> None:
        """Keep the embeddings of a new request, if it has any. Raises ValueError, which fails the
        step, if the embeddings do not have one row for each token of the prompt; the engine checks
        this when it accepts a request."""
        embeds = new.prompt_embeds
        if embeds is None:
            return
        expected = (len(new.prompt_token_ids), self._hidden_size)
        if embeds.shape != expected:
            raise ValueError(
                f"request {new.request_id} has prompt embeddings of the shape {embeds.shape}, not "
                f"{expected}"
            )
        self._embeds[new.request_id] = embeds

    def remove_embeds(self, request_id: str) -> None:
        """Drop the embeddings of an ended request. A request without embeddings is ignored."""
        self._embeds.pop(request_id, None)

    def rows_of(
        self, batch: InputBatch, rows: IntArray, computed: IntArray, counts: IntArray
    ) -> HostEmbeds | None:
        """Return the embeddings for the tokens of a step in which each of `rows` of the batch
        computes `counts` tokens after its `computed` tokens. Return None if no token of the step
        has an embedding."""
        row_index = {row: index for index, row in enumerate(rows.tolist())}
        first_rows = np.cumsum(counts) - counts
        places, values = [], []
        for request_id, embeds in self._embeds.items():
            index = row_index.get(batch.row_of.get(request_id, -1))
            if index is None:
                continue
            start = int(computed[index])
            part = embeds[start : start + int(counts[index])]  # shorter at the prompt's end
            if len(part):
                places.append(first_rows[index] + np.arange(len(part)))
                values.append(part)
        if not places:
            return None
        return HostEmbeds(np.concatenate(places), np.concatenate(values))
