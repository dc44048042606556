# SPDX-License-Identifier: Apache-2.0
"""LowRank: the addition of a LoRA adapter to a matrix product, and the products that accept it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from .row_slots import RowSlots


class Target(Enum):
    """A product of a layer that adapters can change."""

    QKV = "queries, keys and values"
    ATTENTION_GATE = "the gate of the attention"
    STATE_IN = "the matrix into a state"
    OUT = "the output matrix of the mixer"
    GATE_UP = "gate and up of the MLP"  # up alone in an MLP without a gate
    DOWN = "down of the MLP"
    SHARED_GATE_UP = "gate and up of the shared expert"
    SHARED_DOWN = "down of the shared expert"
    EXPERTS_GATE_UP = "gate and up of the experts"
    EXPERTS_DOWN = "down of the experts"


class LowRank(NamedTuple):
    """The addition `(x @ ins.T) @ outs.T` to the output of one or two matrices with one input."""

    ins: Tensor  # [rank, in], multiplied by the adapter's scale; experts: [experts, rank, in]
    outs: tuple[Tensor, ...]  # one or two [out, rank]; experts: [experts, out, rank]

    @property
    def num_bytes(self) -> int:
        return self.ins.nbytes + sum(each.nbytes for each in self.outs)


LayerAdapter = Mapping[Target, LowRank]


class Adaptable(Protocol):
    """A matrix product that can add to each row the adapter in one of several slots."""

    def allow_adapters(self, rows: RowSlots, rank: int) -> None:
        """Make the adapter slots. `rows` has each row's slot; `rank` is the largest rank."""

    def prepare_adapter(self, adapter: LowRank, /) -> Any:
        """Return the adapter in the form that `put_adapter` takes. Thread-safe."""

    def put_adapter(self, slot: int, prepared: Any, /) -> None:
        """Put a prepared adapter into a slot for later steps; None empties the slot."""
