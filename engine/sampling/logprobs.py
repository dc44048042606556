# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities out of raw logits: of the tokens that stand there and of the likeliest ones.

Knows nothing of rows, requests or of what was done to the logits afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..logprobs import PositionLogprobs
from .row_parts import row_parts

# Reported for anything below it: JSON has no infinity, and a model may rule a token out.
LOGPROB_FLOOR = -9999.0


def raw_logprobs(logits: Tensor) -> Tensor:
    """Natural logarithms of the model's own distribution, in a new tensor: float64 for float64
    logits, float32 for all others."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return torch.log_softmax(logits, dim=-1, dtype=dtype)


def position_logprobs(
    logprobs: Tensor, token_ids: Tensor, counts: Sequence[int]
) -> list[PositionLogprobs]:
    """One entry for each row of `logprobs` `[n, vocab]`: its token of `token_ids` `[n]`, and its
    count of the likeliest. A row that has no numbers gets the floor, which means nothing there."""
    entries: list[PositionLogprobs] = []
    for part in row_parts(*logprobs.shape):
        entries += _entries(logprobs[part], token_ids[part], counts[part])
    return entries


def prompt_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> list[PositionLogprobs]:
    """For a slice of a prompt: entry i is of `token_ids[i]`, whose distribution is `logits[i]`
    (computed at the token before it), and of the `count` likeliest there."""
    entries: list[PositionLogprobs] = []
    for part in row_parts(*logits.shape):
        logprobs, ids = raw_logprobs(logits[part]), token_ids[part].to(torch.int64)
        entries += _entries(logprobs, ids, [count] * len(logprobs))
    return entries


def _entries(
    logprobs: Tensor, token_ids: Tensor, counts: Sequence[int]
) -> Iterator[PositionLogprobs]:
    own = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    best = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    values = torch.cat([own, best.values], dim=-1)
    values = values.nan_to_num_(nan=LOGPROB_FLOOR).clamp_(min=LOGPROB_FLOOR)
    ids = torch.cat([token_ids[:, None], best.indices], dim=-1)
    for row_ids, row_values, rank, count in zip(
        ids.tolist(), values.tolist(), ranks.tolist(), counts, strict=True
    ):
        yield PositionLogprobs(row_ids[: count + 1], row_values[: count + 1], rank)
