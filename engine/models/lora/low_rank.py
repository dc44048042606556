# SPDX-License-Identifier: Apache-2.0
"""LowRank: the addition of an adapter to one product, and the products of a layer that take one."""

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
    GATE_UP = "gate and up of the MLP"  # or up alone, in an MLP without a gate
    DOWN = "down of the MLP"
    SHARED_GATE_UP = "gate and up of the shared expert"
    SHARED_DOWN = "down of the shared expert"
    EXPERTS_GATE_UP = "gate and up of the experts"
    EXPERTS_DOWN = "down of the experts"


class LowRank(NamedTuple):
    """`(x @ ins.T) @ outs.T`, added to the output of one matrix, or of two with the same input."""

    ins: Tensor  # [rank, in], times the adapter's scale; [experts, rank, in] for experts
    outs: tuple[Tensor, ...]  # one or two of [out, rank]; [experts, out, rank] for experts

    @property
    def num_bytes(self) -> int:
        return self.ins.nbytes + sum(each.nbytes for each in self.outs)


LayerAdapter = Mapping[Target, LowRank]


class Adaptable(Protocol):
    """A product that can add an adapter to each row, out of several slots."""

    def allow_adapters(self, rows: RowSlots, rank: int) -> None:
        """Make the slots. `rows` tells the slot of each row; `rank` is the most of an adapter."""

    def prepare_adapter(self, adapter: LowRank, /) -> Any:
        """Return the adapter in the form that `put_adapter` takes. Any thread may call this."""

    def put_adapter(self, slot: int, prepared: Any, /) -> None:
        """Put a prepared adapter into a slot for the products from now on; None empties it."""
