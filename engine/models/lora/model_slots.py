# SPDX-License-Identifier: Apache-2.0
"""ModelSlots: the slots for adapters in all products of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..model_spec import ModelSpec
from .adapted_names import ranks_of
from .low_rank import Adaptable, LayerAdapter, Target
from .row_slots import RowSlots

# For each layer, the additions in the form of its products.
PreparedAdapter = Sequence[Mapping[Target, Any]]


class ModelSlots:
    """The products of a model that adapters change, each with the same number of slots."""

    def __init__(
        self,
        spec: ModelSpec,
        products: Sequence[Mapping[Target, Adaptable]],
        num_slots: int,
        max_rank: int,
    ) -> None:
        """`products` has those of each layer."""
        self.rows = RowSlots(num_slots)
        self._products = products
        for number, of_layer in enumerate(products):
            ranks = ranks_of(spec, number, max_rank)
            for target, product in of_layer.items():
                # The two matrices into an expert may have modules of their own.
                product.allow_adapters(self.rows, ranks.get(target, 2 * max_rank))

    @property
    def num_slots(self) -> int:
        return self.rows.num_slots

    def prepare_adapter(self, layers: Sequence[LayerAdapter]) -> PreparedAdapter:
        """Put the additions to each layer into the form of its products. Any thread may call it."""
        return [
            {target: products[target].prepare_adapter(low) for target, low in own.items()}
            for products, own in zip(self._products, layers, strict=True)
        ]

    def put_adapter(self, slot: int, prepared: PreparedAdapter | None) -> None:
        """Put an adapter into a slot for the steps from now on; None empties the slot."""
        for number, products in enumerate(self._products):
            own = {} if prepared is None else prepared[number]
            for target, product in products.items():
                product.put_adapter(slot, own.get(target))
