# SPDX-License-Identifier: Apache-2.0
"""A logits processor that makes a model quote a given text.

The embedded model, unlike larger models, is too small to quote its prompt by itself. The two
engines of a comparison have the processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...engine.batch.batch_update import AddedRow, IntArray
from ...engine.request.sampling_params import SamplingParams
from ...engine.sampling.processors.base import Drafts, StatefulProcessor

QUOTE = "quote"  # the key of the text in `extra_args`
_RAISED = 1e4  # added to a logit, which is then above every other logit


class _Quoted(NamedTuple):
    token_ids: Sequence[int]
    output_token_ids: Sequence[int]


class Quotes(StatefulProcessor[_Quoted]):
    """A processor that makes the next token of a request's `extra_args["quote"]` the likeliest."""

    @classmethod
    def applies_to(cls, params: SamplingParams) -> bool:
        return QUOTE in (params.extra_args or {})

    def _state_of(self, added: AddedRow) -> _Quoted | None:
        if not self.applies_to(added.params) or added.params.extra_args is None:
            return None
        return _Quoted(added.params.extra_args[QUOTE], added.output_token_ids)

    def apply(
        self,
        logits: Tensor,
        rows: IntArray,
        offsets: IntArray | None = None,
        drafts: Drafts | None = None,
    ) -> Tensor:
        places, tokens = [], []
        for index, state in self._states.of(rows):
            at = len(state.output_token_ids) + (0 if offsets is None else int(offsets[index]))
            if at < len(state.token_ids):
                places.append(index)
                tokens.append(state.token_ids[at])
        logits[np.array(places, np.int64), np.array(tokens, np.int64)] = _RAISED
        return logits
