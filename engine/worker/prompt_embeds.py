# SPDX-License-Identifier: Apache-2.0
"""Prompts that come as embeddings: which rows of a step take theirs instead of a token's.

They are kept until the request ends, for one that was preempted computes its prompt again.
"""

from __future__ import annotations

import numpy as np

from ..batch.batch_update import IntArray
from ..request.prompt_embeds import EmbedArray
from ..scheduler.output import NewRequestData
from .forward.forward import HostEmbeds
from .input_batch import InputBatch


class PromptEmbeds:
    """Those of all requests that the worker remembers."""

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._embeds: dict[str, EmbedArray] = {}

    def __bool__(self) -> bool:
        return bool(self._embeds)

    def add(self, new: NewRequestData) -> None:
        """Note a new request, if it brings any. Raises ValueError where they are not one row for
        each token of its prompt, which fails the step: whoever takes in requests checks that."""
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

    def forget(self, request_id: str) -> None:
        """A request has ended; one that brought none is ignored."""
        self._embeds.pop(request_id, None)

    def rows_of(
        self, batch: InputBatch, rows: IntArray, computed: IntArray, counts: IntArray
    ) -> HostEmbeds | None:
        """For a step that computes `counts` tokens of each of these rows of the batch, after
        `computed` ones; None where it has no position of such a prompt."""
        row_index = {row: index for index, row in enumerate(rows.tolist())}
        first_rows = np.cumsum(counts) - counts
        places, values = [], []
        for request_id, embeds in self._embeds.items():
            index = row_index.get(batch.row_of.get(request_id, -1))
            if index is None:
                continue
            start = int(computed[index])
            part = embeds[start : start + int(counts[index])]  # none behind the prompt
            if len(part):
                places.append(first_rows[index] + np.arange(len(part)))
                values.append(part)
        if not places:
            return None
        return HostEmbeds(np.concatenate(places), np.concatenate(values))
