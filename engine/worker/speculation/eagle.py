# SPDX-License-Identifier: Apache-2.0
"""EagleDrafts: an EAGLE head proposes the model's next tokens from the model's hidden states.

Its K and V lie in the blocks of the model, like a draft model's (`draft_model.py`), and so do the
model's hidden states. Slot i belongs to token i and the hidden state before it:

    slot           0         1          2          3
    token          t0        t1         t2         t3
    hidden state   (h0)      (h1)       (h2)       (h3)       stored there
    K and V of     nothing   t1, h0     t2, h1     t3, h2     slot 0 holds zeros
    proposes                 t2         t3         t4

The content of a slot depends only on the tokens up to this slot. So the content of a block depends
only on the tokens that name the block, and a found block needs no recomputed token: the hidden
state for the next slot is in the block's last slot. Other engines pair token i + 1 with hidden
state i in slot i; the last slot of a block then depends on a token after the block. The drafts are
the same, since rotary positions matter only by their distances.

The first draft comes from a hidden state of the model, later drafts from hidden states of the head.
When the model has confirmed drafts, their K and V are computed again from the model's states. The
head computes every block of an answer, unlike a draft model, because it is small.
"""

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

_FIRST_SLOTS = 1  # slots without a hidden state before them


class EagleDrafts(DraftModel):
    """An EAGLE head over the pages of its model's pool."""

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
        """`pages` are for the head's layers; `states` has the hidden states of the model."""
        super().__init__(head, forward, batch, pages, vocab_size=vocab_size, max_tokens=max_tokens)
        self._head, self._states = head, states

    def follow_step(self, step: ComputedStep) -> None:
        """Store the step's hidden states. Compute missing tokens of prompts and full blocks."""
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
