# SPDX-License-Identifier: Apache-2.0
"""CausalConv: a causal convolution over the rows of a sequence, separate for each channel.

The products with the columns of the convolution's window are always added in the same order. So the
results of a sequence are equal to the last bit, however the sequence is divided into steps."""

from __future__ import annotations

import torch
from torch import Tensor

from .state_plan import LongSequence, RowBatch, StatePlan


class CausalConv:
    """The convolution of one layer."""

    __slots__ = ("_bias", "_columns", "_width")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` is `[channels, 1, width]`; `bias` is `[channels]` or None."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        # One contiguous vector for each column of the window.
        self._columns = weight[:, 0].to(wide).t().contiguous()
        self._width = len(self._columns)
        self._bias = None if bias is None else bias.to(wide)

    def __call__(self, x: Tensor, plan: StatePlan, states: Tensor) -> Tensor:
        """Compute the convolution of `x` `[rows, channels]`, and return `[rows, channels]` in
        float32 or wider. The results for rows that belong to no sequence are zeros. The new states
        are written to `states` `[slots, channels, width - 1]`."""
        if len(plan.long) == 1 and plan.long[0].rows == slice(0, len(x)):
            return self._sequence(x, plan.long[0], states)
        out = x.new_zeros(x.shape, dtype=self._columns.dtype)
        for batch in plan.batches:
            if batch.rows is None:
                return self._batch(x, batch, states)
            out[batch.rows] = self._batch(x[batch.rows], batch, states)
        for sequence in plan.long:
            out[sequence.rows] = self._sequence(x[sequence.rows], sequence, states)
        return out

    def _batch(self, x: Tensor, batch: RowBatch, states: Tensor) -> Tensor:
        """Compute the rows of a batch, and return `[batch, channels]`."""
        before = states.index_select(0, batch.sources)
        if batch.fresh is not None:
            before[batch.fresh] = 0
        window = torch.cat((before, x[:, :, None]), 2)
        states[batch.slots] = window[:, :, 1:]
        return self._sum([window[:, :, column] for column in range(self._width)])

    def _sequence(self, x: Tensor, sequence: LongSequence, states: Tensor) -> Tensor:
        """Compute the rows of one sequence, and return `[rows, channels]`."""
        kept = self._width - 1
        if sequence.source is None:
            before = x.new_zeros((kept, x.shape[1]))
        else:
            before = states[sequence.source].t()
        padded = torch.cat((before, x))
        first = sequence.pieces[0].start
        for piece in sequence.pieces:
            if piece.slot is not None:
                end = piece.end - first
                states[piece.slot] = padded[end : end + kept].t()
        return self._sum([padded[column : column + len(x)] for column in range(self._width)])

    def _sum(self, columns: list[Tensor]) -> Tensor:
        """Multiply each column of the window by its weights, and add all columns and the bias."""
        out = columns[0] * self._columns[0]
        for column, weight in zip(columns[1:], self._columns[1:], strict=True):
            out.addcmul_(column, weight)
        return out if self._bias is None else out.add_(self._bias)
