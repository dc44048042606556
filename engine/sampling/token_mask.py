# SPDX-License-Identifier: Apache-2.0
"""Which tokens each of some requests may choose from, one bit a token, as grammars give it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .copies import to_device


@dataclass(frozen=True, slots=True)
class TokenMask:
    """`allowed[i]` belongs to `request_ids[i]`: bit `t % 32` of word `t // 32` is set where token
    `t` may follow. Requests that are not named choose freely; tokens beyond the words are banned.
    """

    request_ids: Sequence[str]
    allowed: npt.NDArray[np.uint32]  # [requests, words]

    def apply(self, logits: Tensor, indices: Sequence[int]) -> None:
        """Ban what is not allowed, in place: row `indices[i]` of `logits` `[rows, vocab]` is that
        of `request_ids[i]`. Raises ValueError where the mask is not one row for each request."""
        if self.allowed.shape[:1] != (len(self.request_ids),) or self.allowed.ndim != 2:
            raise ValueError(
                f"a mask of {len(self.request_ids)} requests has a row of words for each, not the "
                f"shape {self.allowed.shape}"
            )
        words = np.ascontiguousarray(self.allowed, "<u4")
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        banned = np.ones((len(bits), logits.shape[1]), np.bool_)
        count = min(bits.shape[1], logits.shape[1])
        banned[:, :count] = bits[:, :count] == 0
        rows = to_device(np.asarray(indices, np.int64), logits.device)
        logits[rows] = logits[rows].masked_fill_(to_device(banned, logits.device), -torch.inf)
