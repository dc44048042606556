# SPDX-License-Identifier: Apache-2.0
"""DraftModel: a small model with the same vocabulary that proposes draft tokens.

The K and V of the draft model are in the same blocks as those of the main model
(`cache/group_spec.py`), so a block that is found in the cache, copied or loaded has the K and V of
both. The draft model computes

    prompts     the tokens that the main model computes, in the same step
    answers     each block when it is full; and the missing tokens, to make drafts

The draft model skips the tokens of an answer if no drafts were requested for the answer's last
block. The draft model's K and V in the skipped full blocks are set to zero, so a request that finds
such a block never reads data of another text. Slots beyond the draft model's own context length are
never computed, and are set to zero too.

    tokens      a b c d e f g h i        `i` was chosen last
    K and V     of the model up to h, of the draft model up to f
    propose     g h i ──► j    j ──► k    k ──► l       drafts: j k l

To make several drafts, the draft model writes K and V after the newest token, to blocks that the
scheduler has reserved (`Speculation.looks_ahead`). If fewer blocks are reserved, fewer drafts are
made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...batch.batch_update import IntArray
from ...models.decoder import Decoder
from ...sampling.copies import to_device
from ..block_table import BlockTable
from ..forward.attention_metadata import ranges
from ..forward.forward import LateTokens, StepForward, StepInputs, step_order
from ..input_batch import InputBatch
from ..kv_pool import ModelPages
from .hidden_pages import slot_index
from .proposer import ComputedStep, DraftQuery, Proposer

_FOLLOWED_BLOCKS = 1  # blocks that are still computed after the last request for drafts
_NONE: IntArray = np.zeros(0, np.int64)
BoolArray = npt.NDArray[np.bool_]
StatesBefore = tuple[Tensor, IntArray]  # hidden states, and the indices of the used rows


class DraftRows(NamedTuple):
    """Rows of the batch whose tokens the draft model computes in one forward pass, in the order of
    a step. For an EAGLE head, `before` has the hidden states of the previous drafts. If `before` is
    None, the main model computed the tokens before."""

    rows: IntArray  # [requests]
    starts: IntArray  # [requests] number of tokens before the tokens to compute
    counts: IntArray  # [requests]
    wanted: IntArray  # tokens of the step whose hidden states are returned
    late: LateTokens | None = None
    before: StatesBefore | None = None


class DraftModel(Proposer):
    """A draft model, whose K and V are in the pages of the main model's pool."""

    def __init__(
        self,
        model: Decoder,
        forward: StepForward,
        batch: InputBatch,
        pages: ModelPages,
        *,
        vocab_size: int,
        max_tokens: int,
    ) -> None:
        """`forward` computes this model over `pages`, at most `max_tokens` tokens at once. All
        proposed token ids are below `vocab_size`."""
        self._model, self._forward, self._batch = model, forward, batch
        self._table = batch.tables[pages.places[0].group]
        # For each cache group: its block table, and the pages of the draft's layers.
        self._pages: list[tuple[BlockTable, Tensor]] = []
        for group, places in groupby(pages.places, key=attrgetter("group")):
            own = [place.in_page for place in places]
            layers = pages.tensor[:, own[0] : own[-1] + 1]
            self._pages.append((batch.tables[group], layers))
        self._max_tokens = max_tokens
        self._max_model_len = min(batch.max_model_len, model.spec.max_context)
        self._vocab_size = min(vocab_size, model.spec.vocab_size)

    def follow_step(self, step: ComputedStep) -> None:
        """Compute K and V for the prompt tokens of the step, and for the answers' blocks that
        become full."""
        self._clear_bare_slots(step)
        batch, rows, size = self._batch, step.rows, self._table.given_size
        known, ends = batch.num_draft_computed, step.computed + step.counts
        # K and V after this belong to drafts that the step does not check.
        known[rows] = np.minimum(known[rows], ends)
        is_prompt = step.computed < batch.num_prompt[rows]
        is_full = ends // size > step.computed // size
        is_left = is_full & ~is_prompt & self._leaves(rows, ends)
        if is_left.any():
            self._leave_blocks(rows[is_left], step.computed[is_left] // size, ends[is_left] // size)
        ends = np.minimum(ends, self._max_model_len)
        is_due = (is_prompt | is_full) & ~is_left & (ends > known[rows])
        if is_due.any():
            self._catch_up(rows[is_due], ends[is_due], step.chosen)

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in queries]
        rows = np.array([query.row for query in queries], np.int64)
        most = np.minimum([query.most for query in queries], self._room(rows))
        index = np.flatnonzero(most > 0)
        if len(index) == 0:
            return drafts
        known, lengths = self._batch.num_draft_computed, self._batch.num_tokens[rows]
        self._batch.drafts_asked_at[rows] = lengths
        far = index[(lengths - known[rows])[index] > self._max_tokens]
        if len(far):
            self._catch_up(rows[far], lengths[far] - 1, None)
        index = index[step_order(rows[index], (lengths - known[rows])[index])]
        hidden = self._read_newest(rows[index], lengths[index])
        chosen = self._likeliest(hidden)
        told = [(index, chosen)]
        for place in range(1, int(most.max())):
            goes_on = np.flatnonzero(most[index] > place)
            index, count = index[goes_on], len(goes_on)
            late = LateTokens(np.arange(count), chosen, goes_on)
            ends = lengths[index] + place
            one = np.ones(count, np.int64)
            last = np.arange(count)
            hidden = self._compute(
                DraftRows(rows[index], ends - 1, one, last, late, (hidden, goes_on))
            )
            chosen = self._likeliest(hidden)
            told.append((index, chosen))
        asked = told[0][0]
        known[rows[asked]] = self._known_behind(lengths[asked], most[asked])
        # One wait for the drafts of all places.
        tokens = torch.cat([each for _, each in told]).tolist()
        for query, token_id in zip(np.concatenate([each for each, _ in told]), tokens, strict=True):
            drafts[query].append(token_id)
        return drafts

    def _leaves(self, rows: IntArray, ends: IntArray) -> BoolArray:
        """Return bool `[rows]`: whether the tokens of an answer whose last block is full are
        skipped."""
        behind = ends - self._batch.drafts_asked_at[rows]
        return behind > _FOLLOWED_BLOCKS * self._table.given_size

    def _known_behind(self, lengths: IntArray, most: IntArray) -> IntArray:
        """Return, for rows of these lengths that got `most` drafts each, the number of tokens whose
        K and V stay valid if all drafts are accepted."""
        return lengths + most - 1

    def _catch_up(self, rows: IntArray, ends: IntArray, chosen: Tensor | None) -> None:
        """Compute K and V for the missing tokens among the first `ends` tokens of these rows. Only
        the device may have the last token of a row, in `chosen`."""
        known = self._batch.num_draft_computed
        if chosen is not None:
            chosen = chosen.clamp(max=self._vocab_size - 1)
        while len(rows):
            for piece in self._pieces(rows, np.minimum(ends - known[rows], self._max_tokens)):
                part = rows[piece]
                starts = known[part]
                counts = np.minimum(ends[piece] - starts, self._max_tokens)
                late = self._batch.late_tokens(chosen, part, starts, counts)
                self._compute(DraftRows(part, starts, counts, _NONE, late))
                known[part] += counts
            left = known[rows] < ends
            rows, ends = rows[left], ends[left]

    def _leave_blocks(self, rows: IntArray, firsts: IntArray, ends: IntArray) -> None:
        """Set K and V of the blocks `firsts` to `ends` (exclusive) of these rows to zero."""
        known, size = self._batch.num_draft_computed, self._table.given_size
        known[rows] = np.minimum(known[rows], firsts * size)
        each = size // self._table.block_size
        counts = (ends - firsts) * each
        places = np.repeat(rows, counts), ranges(firsts * each, counts)
        for table, pages in self._pages:
            blocks = to_device(table.array[places].astype(np.int64), pages.device)
            pages.index_fill_(0, blocks, 0)

    def _is_bare(self, positions: IntArray) -> BoolArray:
        """Return bool `[tokens]`: whether the slot at each position is never computed."""
        return positions >= self._max_model_len

    def _clear_bare_slots(self, step: ComputedStep) -> None:
        """Set K and V to zero in those slots of the step that are never computed, so that they keep
        no data of the text that used the block before."""
        rows, positions = np.repeat(step.rows, step.counts), ranges(step.computed, step.counts)
        is_bare = self._is_bare(positions)
        if not is_bare.any():
            return
        rows, positions = rows[is_bare], positions[is_bare]
        for table, pages in self._pages:
            blocks, offsets = slot_index(table, rows, positions, pages.device)
            # As bytes, because torch cannot assign all types of K and V by index.
            nothing = torch.zeros((), dtype=torch.uint8, device=pages.device)
            pages.view(torch.uint8)[blocks, :, :, offsets] = nothing

    def _room(self, rows: IntArray) -> IntArray:
        """Return the number of drafts that fit into each row's blocks and into the draft model's
        context."""
        slots = self._table.num_entries[rows].astype(np.int64) * self._table.block_size
        return np.minimum(slots, self._max_model_len) - self._batch.num_tokens[rows] + 1

    def _read_newest(self, rows: IntArray, lengths: IntArray) -> Tensor:
        """Compute the missing tokens of each row. Return the hidden state of each row's newest
        token, `[rows, hidden]`."""
        starts = self._batch.num_draft_computed[rows]
        counts = lengths - starts
        hidden = []
        for piece in self._pieces(rows, counts):
            last = np.cumsum(counts[piece]) - 1
            hidden.append(self._compute(DraftRows(rows[piece], starts[piece], counts[piece], last)))
        return torch.cat(hidden)

    def _compute(self, step: DraftRows) -> Tensor:
        """Compute a forward pass, and return the hidden states `[wanted, hidden]`."""
        return self._forward.prepare_step(self._inputs(step))()

    def _inputs(self, step: DraftRows) -> StepInputs:
        batch = self._batch
        rows, starts, counts, wanted, late, _ = step
        positions, token_rows = ranges(starts, counts), np.repeat(rows, counts)
        token_ids = batch.token_ids[token_rows, positions].astype(np.int64)
        # Ids that only the main model has cannot be embedded here.
        token_ids[token_ids >= self._vocab_size] = 0
        tables = batch.tables
        slots = tables.slot_mapping(token_rows, positions)
        return StepInputs(
            tables.tables, rows, starts, counts, token_ids, positions, slots, wanted, late=late
        )

    def _likeliest(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)[:, : self._vocab_size].argmax(-1)

    def _pieces(self, rows: IntArray, counts: IntArray) -> Iterator[IntArray]:
        """Yield the rows in the order of a step, in pieces of as many rows as one forward pass can
        compute."""
        order = step_order(rows, counts)
        ends = np.cumsum(counts[order])
        start = 0
        while start < len(order):
            before = ends[start - 1] if start else 0
            end = int(np.searchsorted(ends, before + self._max_tokens, side="right"))
            yield order[start:end]
            start = end
