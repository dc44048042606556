# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities from raw logits, of each row's own token and of the most likely tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..request.logprobs import PositionLogprobs
from .copies import to_host
from .row_states import row_parts

# The lowest log-probability that is reported; JSON has no infinity for a probability of 0.
LOGPROB_FLOOR = -9999.0


def raw_logprobs(logits: Tensor) -> Tensor:
    """Return the natural logarithms of the model's probabilities, in a new tensor: float64 for
    float64 logits, float32 for all others."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return torch.log_softmax(logits, dim=-1, dtype=dtype)


class LogprobTensors(NamedTuple):
    """Log-probabilities of some rows, on the device that computed them. Each row lists its own
    token first, then the most likely tokens."""

    token_ids: Tensor  # int64 [rows, 1 + most]
    values: Tensor  # [rows, 1 + most]
    ranks: Tensor  # int64 [rows], of the row's own token


def position_tensors(
    logprobs: Tensor, token_ids: Tensor, counts: Sequence[int]
) -> list[LogprobTensors]:
    """Gather, for each row i of `logprobs` `[n, vocab]`, token `token_ids[i]` and the `counts[i]`
    most likely tokens. The result is split into parts of rows. Never waits for the device."""
    return [
        _tensors(logprobs[part], token_ids[part], max(counts[part]))
        for part in row_parts(len(logprobs), logprobs.shape[1], logprobs.device.type)
    ]


def position_entries(found: Sequence[Tensor], counts: Sequence[int]) -> list[PositionLogprobs]:
    """Make one entry for each of `counts`, from the results of `position_tensors` in host memory. A
    row of NaN gets LOGPROB_FLOOR as its values."""
    entries: list[PositionLogprobs] = []
    for start in range(0, len(found), len(LogprobTensors._fields)):
        part = LogprobTensors(*found[start : start + len(LogprobTensors._fields)])
        first = len(entries)
        entries += _entries(part, counts[first : first + len(part.ranks)])
    return entries


def prompt_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> list[PositionLogprobs]:
    """Make the entries for a slice of a prompt. Entry i has `token_ids[i]` and the `count` most
    likely tokens of `logits[i]`, computed from the tokens before it. Waits for the device."""
    found: list[LogprobTensors] = []
    for part in row_parts(len(logits), logits.shape[1], logits.device.type):
        logprobs, ids = raw_logprobs(logits[part]), token_ids[part].to(torch.int64)
        found.append(_tensors(logprobs, ids, count))
    return position_entries(to_host([*itertools.chain(*found)]), [count] * len(logits))


def _tensors(logprobs: Tensor, token_ids: Tensor, most: int) -> LogprobTensors:
    own = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    best = logprobs.topk(min(most, logprobs.shape[1]), dim=-1)
    values = torch.cat([own, best.values], dim=-1)
    values = values.nan_to_num_(nan=LOGPROB_FLOOR).clamp_(min=LOGPROB_FLOOR)
    return LogprobTensors(torch.cat([token_ids[:, None], best.indices], dim=-1), values, ranks)


def _entries(part: LogprobTensors, counts: Sequence[int]) -> Iterator[PositionLogprobs]:
    for row_ids, row_values, rank, count in zip(
        part.token_ids.tolist(), part.values.tolist(), part.ranks.tolist(), counts, strict=True
    ):
        yield PositionLogprobs(row_ids[: count + 1], row_values[: count + 1], rank)
