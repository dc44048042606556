# SPDX-License-Identifier: Apache-2.0
"""No end before `min_tokens`: ids that would end a request are banned until then.

Knows nothing of stop strings, which whoever sees the text looks for.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...batch.batch_update import AddedRow
from ...worker.block_table import IntArray
from .entries import ban, known_ids
from .stateful import StatefulProcessor


class Minimum(NamedTuple):
    """Ids that must not be sampled before the output has `length` tokens."""

    length: int
    banned: IntArray
    output_token_ids: list[int]


class MinTokens(StatefulProcessor[Minimum]):
    """Bans stop ids, and the model's own end unless it is ignored."""

    def apply(self, logits: Tensor, rows: IntArray) -> Tensor:
        parts = []
        for index, minimum in self._states.of(rows):
            if len(minimum.output_token_ids) < minimum.length:
                parts.append((index, minimum.banned))
            else:
                self._states.discard(int(rows[index]))
        return ban(logits, parts)

    def _state_of(self, added: AddedRow) -> Minimum | None:
        params, output = added.params, added.output_token_ids
        if len(output) >= params.min_tokens:
            return None
        eos = () if params.ignore_eos else self.context.eos_token_ids
        banned = known_ids((*params.stop_token_ids, *eos), self.context.vocab_size)
        return Minimum(params.min_tokens, banned, output) if len(banned) else None
