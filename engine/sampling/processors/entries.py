# SPDX-License-Identifier: Apache-2.0
"""Single logits named in bulk: a few tokens of a few rows, reached with one operation for all.

Knows nothing of why they are changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...worker.block_table import IntArray
from ..copies import to_device


class Entries(NamedTuple):
    """Positions in `[rows, vocab]`, one of each pair."""

    indices: Tensor  # of rows
    token_ids: Tensor


def entries_of(parts: Sequence[tuple[int, IntArray]], device: torch.device) -> Entries:
    """The positions of `(index of a row, token ids there)`, on the device of the logits."""
    sizes = [len(ids) for _, ids in parts]
    indices = np.repeat(np.array([index for index, _ in parts], np.int64), sizes)
    token_ids = np.concatenate([np.empty(0, np.int64), *(ids for _, ids in parts)])
    return Entries(to_device(indices, device), to_device(token_ids, device))


def ban(logits: Tensor, parts: Sequence[tuple[int, IntArray]]) -> Tensor:
    """Make these tokens impossible, in place."""
    if parts:
        banned = logits.new_full((), -torch.inf)
        logits.index_put_(tuple(entries_of(parts, logits.device)), banned)
    return logits


def known_ids(token_ids: Iterable[int], vocab_size: int) -> IntArray:
    """Those in the vocabulary, ascending, each once."""
    return np.array(sorted({i for i in token_ids if 0 <= i < vocab_size}), np.int64)
