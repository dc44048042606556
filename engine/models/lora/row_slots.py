# SPDX-License-Identifier: Apache-2.0
"""RowSlots: which adapter each row of a product has.

A model has a number of slots, each with one adapter or empty. A step has a slot for each of its
rows. A product may see a part of the rows, or rows in another order, so the slots follow: the
decoder narrows them to the wanted rows of the last layer, and experts take those of their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

NO_SLOT = -1


class RowSlots:
    """The slots of the rows that a model's products see at the moment. One thread uses it."""

    __slots__ = ("_others", "_others_of", "num_slots", "slots")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slots: Tensor | None = None  # int32 [rows]; -1: no adapter. None: no row has one
        self._others: Tensor | None = None
        self._others_of: Tensor | None = None

    @contextmanager
    def replaced(self, slots: Tensor | None) -> Iterator[None]:
        """Use other slots inside the block."""
        before, self.slots = self.slots, slots
        try:
            yield
        finally:
            self.slots = before

    def narrow(self, rows: Tensor) -> None:
        """Keep the slots of `rows` (int64), in their order."""
        if self.slots is not None:
            self.slots = self.slots[rows]

    def others(self) -> Tensor:
        """Return bool `[rows, slots]`: True for all slots but the one of each row."""
        slots = self.slots
        assert slots is not None
        if self._others is None or self._others_of is not slots:
            numbers = torch.arange(self.num_slots, device=slots.device, dtype=slots.dtype)
            self._others, self._others_of = slots[:, None] != numbers, slots
        return self._others


class SlotMatrices:
    """The adapters of one matrix in tensors that never move: `[slots * rank]` inputs and outputs.

    A row is multiplied by the adapters of all slots, and what other slots give is masked out. That
    costs `slots * rank / size` of the matrix, needs no order of rows and never waits for the host,
    so a step can be recorded.
    """

    __slots__ = ("_filled", "_ins", "_outs", "_rank", "_rows")

    def __init__(self, rows: RowSlots, weight: Tensor, shape: tuple[int, ...], rank: int) -> None:
        """`weight` has the type and the device of the matrix, and `shape` is its shape, `[out,
        in]`; `rank` is the most of an adapter."""
        self._rows, self._rank = rows, rank
        count = rows.num_slots * rank
        # Not by `weight.new_zeros`: from oneDNN's blocks that makes blocks.
        like = torch.empty(0, dtype=weight.dtype, device=weight.device)
        self._ins = like.new_zeros(count, shape[1])
        self._outs = like.new_zeros(count, shape[0])
        self._filled: set[int] = set()

    def put_adapter(self, slot: int, adapter: tuple[Tensor, tuple[Tensor, ...]] | None) -> None:
        """Put an adapter of `[rank, in]` and one `[out, rank]` into a slot; None empties it."""
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
        """Add the adapters of the rows `x` `[rows, in]` to `out` `[rows, out]`."""
        if not self._filled:
            return
        inner = x @ self._ins.T
        # Filled and not multiplied: a number that is not finite must not reach another row.
        inner.view(len(x), -1, self._rank).masked_fill_(self._rows.others()[:, :, None], 0)
        out.addmm_(inner, self._outs)
