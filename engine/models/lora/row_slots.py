# SPDX-License-Identifier: Apache-2.0
"""RowSlots: the LoRA adapter of each row of a matrix product.

A model has a number of slots, each with one adapter or empty. A step has a slot number for each of
its rows. Some products compute only a part of the rows, or rows in another order; the slot numbers
are then selected alike: by the decoder for the wanted rows after the last mixer, and by experts for
the rows of each expert."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

NO_SLOT = -1


class RowSlots:
    """The slot numbers of the rows that are being computed. Only one thread may use an instance."""

    __slots__ = ("_others", "_others_of", "num_slots", "slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slots: Tensor | None = None  # int32 [rows]; -1: no adapter. None: no adapters at all
        self._others: Tensor | None = None
        self._others_of: Tensor | None = None

    @contextmanager
    def replaced(self, slots: Tensor | None) -> Iterator[None]:
        """Replace the slot numbers by `slots` inside the `with` body."""
        before, self.slots = self.slots, slots
        try:
            yield
        finally:
            self.slots = before

    def narrow(self, rows: Tensor) -> None:
        """Keep only the slot numbers of `rows` (int64), in the order of `rows`."""
        if self.slots is not None:
            self.slots = self.slots[rows]

    def others(self) -> Tensor:
        """Return bool `[rows, slots]`: True for each slot that is not the row's slot."""
        slots = self.slots
        assert slots is not None
        if self._others is None or self._others_of is not slots:
            numbers = torch.arange(self.num_slots, device=slots.device, dtype=slots.dtype)
            self._others, self._others_of = slots[:, None] != numbers, slots
        return self._others


class SlotMatrices:
    """The adapters of one matrix, as two tensors `[slots * rank, in]` and `[slots * rank, out]`.

    A row is multiplied by the adapters of all slots, and the results of other slots are masked out.
    The cost is about `slots * rank / in` of the matrix's own product. Rows need no order and the
    device never waits for the host, so a CUDA graph can capture a step."""

    __slots__ = ("_filled", "_ins", "_outs", "_rank", "_rows")

    def __init__(self, rows: RowSlots, weight: Tensor, shape: tuple[int, ...], rank: int) -> None:
        """`weight` has the type and the device of the matrix, and `shape` is the matrix's shape,
        `[out, in]`; `rank` is an adapter's largest rank."""
        self._rows, self._rank = rows, rank
        count = rows.num_slots * rank
        # `weight.new_zeros` would make oneDNN blocks if `weight` is in oneDNN blocks.
        like = torch.empty(0, dtype=weight.dtype, device=weight.device)
        self._ins = like.new_zeros(count, shape[1])
        self._outs = like.new_zeros(count, shape[0])
        self._filled: set[int] = set()

    def put_adapter(self, slot: int, adapter: tuple[Tensor, tuple[Tensor, ...]] | None) -> None:
        """Put an adapter's `[rank, in]` and `[out, rank]` into a slot; None empties the slot."""
        own = slice(slot * self._rank, (slot + 1) * self._rank)
        self._ins[own], self._outs[own] = 0, 0
        self._filled.discard(slot)
        if adapter is not None:
            ins, (outs,) = adapter
            used = slice(own.start, own.start + len(ins))
            self._ins[used].copy_(ins)
            self._outs[used].copy_(outs.T)
            self._filled.add(slot)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Multiply `x` `[rows, in]` by each row's adapter; add to `out` `[rows, out]`."""
        if not self._filled or not len(x):  # no row of a chunk in the middle of a prompt is wanted
            return
        inner = x @ self._ins.T
        # The mask sets zeros: a product with 0 would keep the NaN of a slot with infinite numbers.
        by_slot = inner.view(len(x), self._rows.num_slots, self._rank)
        by_slot.masked_fill_(self._rows.others()[:, :, None], 0)
        out.addmm_(inner, self._outs)
