# SPDX-License-Identifier: Apache-2.0
"""DraftModel: a small model with the same vocabulary proposes what it would say itself.

Its K and V lie in the blocks of the model that it proposes to (`cache/group_spec.py`), so a block
that is found, copied or loaded brings both. Before a block is named it has both, too:

    prompts     the draft model computes what the model computes, in the same step
    answers     it computes a block at once, when that is full; and for drafts what it lacks

    tokens      a b c d e f g h i        `i` was chosen last
    K and V     of the model up to h, of the draft model up to f
    propose     g h i ──► j    j ──► k    k ──► l       drafts: j k l

Behind the newest token the draft model writes to blocks that the scheduler has set aside
(`Speculation.looks_ahead`); where it had none to give, there are fewer drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ...batch.batch_update import IntArray
from ...models.decoder import Decoder
from ..block_table import BlockTable
from ..forward.attention_metadata import ranges
from ..forward.forward import LateTokens, StepForward, StepInputs, step_order
from ..input_batch import InputBatch
from .proposer import ComputedStep, DraftQuery, Proposer

_NONE: IntArray = np.zeros(0, np.int64)


class DraftModel(Proposer):
    """A model over the pages of another one's pool."""

    def __init__(
        self,
        model: Decoder,
        forward: StepForward,
        batch: InputBatch,
        table: BlockTable,
        *,
        vocab_size: int,
        max_tokens: int,
    ) -> None:
        """`forward` is of this model, and computes up to `max_tokens` at once: those of a step,
        and a block. `table` names its blocks. Tokens are below `vocab_size`."""
        self._model, self._forward = model, forward
        self._batch, self._table = batch, table
        self._max_tokens = max_tokens
        self._max_model_len = min(batch.max_model_len, model.spec.max_context)
        self._vocab_size = min(vocab_size, model.spec.vocab_size)

    def follow_step(self, step: ComputedStep) -> None:
        """Compute prompts with the model, and blocks that become full."""
        rows, ends, size = step.rows, step.computed + step.counts, self._table.given_size
        known = self._batch.num_draft_computed
        # Behind that lie drafts which the step does not check.
        known[rows] = np.minimum(known[rows], ends)
        is_prompt = step.counts - step.num_drafts > 1
        is_due = is_prompt | (ends // size > known[rows] // size)
        is_due &= (ends <= self._max_model_len) & (ends > known[rows])
        if not is_due.any():
            return
        rows, ends, chosen = rows[is_due], ends[is_due], step.chosen
        if chosen is not None:
            chosen = chosen.clamp(max=self._vocab_size - 1)
        for piece in self._pieces(rows, ends - known[rows]):
            part, starts = rows[piece], known[rows[piece]]
            counts = ends[piece] - starts
            late = self._batch.late_tokens(chosen, part, starts, counts)
            self._compute(part, starts, counts, _NONE, late)
        known[rows] = ends

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in queries]
        rows = np.array([query.row for query in queries], np.int64)
        most = np.minimum([query.most for query in queries], self._room(rows))
        index = np.flatnonzero(most > 0)
        if len(index) == 0:
            return drafts
        known, lengths = self._batch.num_draft_computed, self._batch.num_tokens[rows]
        index = index[step_order(rows[index], (lengths - known[rows])[index])]
        chosen = self._choose_first(rows[index], lengths[index])
        told = [(index, chosen)]
        for place in range(1, int(most.max())):
            goes_on = np.flatnonzero(most[index] > place)
            index, count = index[goes_on], len(goes_on)
            late = LateTokens(np.arange(count), chosen, goes_on)
            ends = lengths[index] + place
            one = np.ones(count, np.int64)
            hidden = self._compute(rows[index], ends - 1, one, np.arange(count), late)
            chosen = self._likeliest(hidden)
            told.append((index, chosen))
        known[rows[told[0][0]]] = (lengths + most - 1)[told[0][0]]
        # One wait for all of them.
        tokens = torch.cat([each for _, each in told]).tolist()
        for query, token_id in zip(np.concatenate([each for each, _ in told]), tokens, strict=True):
            drafts[query].append(token_id)
        return drafts

    def _room(self, rows: IntArray) -> IntArray:
        """Drafts that the blocks of each row, and the draft model's context, have room for."""
        slots = self._table.num_entries[rows].astype(np.int64) * self._table.block_size
        return np.minimum(slots, self._max_model_len) - self._batch.num_tokens[rows] + 1

    def _choose_first(self, rows: IntArray, lengths: IntArray) -> Tensor:
        """The token behind each row's newest, once all before it have been computed: int64
        `[rows]`, on the device."""
        starts = self._batch.num_draft_computed[rows]
        counts = lengths - starts
        hidden = []
        for piece in self._pieces(rows, counts):
            last = np.cumsum(counts[piece]) - 1
            hidden.append(self._compute(rows[piece], starts[piece], counts[piece], last, None))
        return self._likeliest(torch.cat(hidden))

    def _compute(
        self,
        rows: IntArray,
        starts: IntArray,
        counts: IntArray,
        wanted: IntArray,
        late: LateTokens | None,
    ) -> Tensor:
        """Hidden states `[wanted, hidden]` of tokens of these rows; in the order of a step."""
        batch = self._batch
        positions, token_rows = ranges(starts, counts), np.repeat(rows, counts)
        token_ids = batch.token_ids[token_rows, positions].astype(np.int64)
        # One that only the model has is nothing that a tokenizer says.
        token_ids[token_ids >= self._vocab_size] = 0
        tables = batch.tables
        slots = tables.slot_mapping(token_rows, positions)
        inputs = StepInputs(
            tables.tables, rows, starts, counts, token_ids, positions, slots, wanted, late=late
        )
        return self._forward.prepare_step(inputs)()

    def _likeliest(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)[:, : self._vocab_size].argmax(-1)

    def _pieces(self, rows: IntArray, counts: IntArray) -> Iterator[IntArray]:
        """The rows in the order of a step, so many at a time as may be computed at once."""
        order = step_order(rows, counts)
        ends = np.cumsum(counts[order])
        start = 0
        while start < len(order):
            before = ends[start - 1] if start else 0
            end = int(np.searchsorted(ends, before + self._max_tokens, side="right"))
            yield order[start:end]
            start = end
