# SPDX-License-Identifier: Apache-2.0
"""EagleDrafts: an EAGLE head that proposes draft tokens from the model's hidden states.

The head's K and V are in the blocks of the model, like those of a draft model (`draft_model.py`),
and the model's hidden states are in these blocks too. Slot i belongs to token i and to the hidden
state of the token before:

    slot           0         1          2          3
    token          t0        t1         t2         t3
    hidden state   (h0)      (h1)       (h2)       (h3)       stored there
    K and V of     nothing   t1, h0     t2, h1     t3, h2     slot 0 holds zeros
    proposes                 t2         t3         t4

The content of a slot depends only on the tokens up to its own token. So a block's content depends
only on the tokens that its key covers. After a cache hit the model need not compute the last cached
token again: the block's last slot has this token's hidden state, which the next slot needs. Other
engines combine token i + 1 and hidden state i in slot i; the last slot of a block then depends on a
token after the block. The drafts are the same with either pairing, since only distances between
rotary positions matter.

The first draft is computed from a hidden state of the model, later drafts from hidden states of the
head. After the model has accepted drafts, their K and V in the head are computed again from the
model's hidden states. The head computes every block of an answer, because it is small; a draft
model skips blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from ...batch.batch_update import IntArray
from ...models.decoder import Embeds
from ...models.eagle.eagle_head import EagleHead
from ...sampling.copies import to_device
from ..forward.attention_metadata import ranges
from ..forward.forward import StepForward
from ..input_batch import InputBatch
from ..kv_pool import ModelPages
from .draft_model import BoolArray, DraftModel, DraftRows
from .hidden_pages import HiddenPages
from .proposer import ComputedStep

_FIRST_SLOTS = 1  # slots without a preceding hidden state


class EagleDrafts(DraftModel):
    """An EAGLE head, whose K and V are in the pages of its model's pool."""

    reads_hidden = True

    def __init__(
        self,
        head: EagleHead,
        forward: StepForward,
        batch: InputBatch,
        pages: ModelPages,
        states: HiddenPages,
        *,
        vocab_size: int,
        max_tokens: int,
    ) -> None:
        """`pages` are the pages of the head's layers; `states` stores the model's hidden states."""
        super().__init__(head, forward, batch, pages, vocab_size=vocab_size, max_tokens=max_tokens)
        self._head, self._states = head, states

    def follow_step(self, step: ComputedStep) -> None:
        """Store the hidden states, and compute the missing tokens of prompts and of full blocks."""
        if step.hidden is None:
            raise ValueError("an EAGLE head follows steps by their hidden states; none were given")
        rows, positions = np.repeat(step.rows, step.counts), ranges(step.computed, step.counts)
        self._states.write_states(rows, positions, step.hidden)
        known, first = self._batch.num_draft_computed, step.rows[step.computed == 0]
        known[first] = np.maximum(known[first], _FIRST_SLOTS)
        super().follow_step(step)

    def _is_bare(self, positions: IntArray) -> BoolArray:
        return (positions < _FIRST_SLOTS) | super()._is_bare(positions)

    def _leaves(self, rows: IntArray, ends: IntArray) -> BoolArray:
        return np.zeros(len(rows), np.bool_)

    def _known_behind(self, lengths: IntArray, most: IntArray) -> IntArray:
        return lengths

    def _compute(self, step: DraftRows) -> Tensor:
        inputs = self._inputs(step)
        device = self._states.device
        tokens = to_device(inputs.token_ids, device)
        if step.late is not None:
            step.late.put(tokens)
        if step.before is None:
            rows = np.repeat(step.rows, step.counts)
            hidden = self._states.read_states(rows, inputs.positions - 1)
        else:
            states, meant = step.before
            hidden = states[to_device(meant, device)]
        fused = Embeds(None, self._head.fuse(tokens, hidden))
        return self._forward.prepare_step(replace(inputs, embeds=fused, late=None))()
