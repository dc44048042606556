# SPDX-License-Identifier: Apache-2.0
"""ModelSlots: the slots for LoRA adapters in all matrix products of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..model_spec import ModelSpec
from .adapted_names import ranks_of
from .low_rank import Adaptable, LayerAdapter, Target
from .row_slots import RowSlots

# For each layer: its products, each with the adapter in the form that the product takes.
PreparedAdapter = Sequence[Mapping[Target, Any]]


class ModelSlots:
    """The products of a model that adapters can change, all with the same number of slots."""

    def __init__(
        self,
        spec: ModelSpec,
        products: Sequence[Mapping[Target, Adaptable]],
        num_slots: int,
        max_rank: int,
    ) -> None:
        """`products` has the matrix products of each layer."""
        self.rows = RowSlots(num_slots)
        self._products = products
        for number, of_layer in enumerate(products):
            ranks = ranks_of(spec, number, max_rank)
            for target, product in of_layer.items():
                # Gate and up of an expert may be separate modules, each with `max_rank`.
                product.allow_adapters(self.rows, ranks.get(target, 2 * max_rank))

    @property
    def num_slots(self) -> int:
        return self.rows.num_slots

    def prepare_adapter(self, layers: Sequence[LayerAdapter]) -> PreparedAdapter:
        """Convert the additions to the form that the products take. Thread-safe."""
        return [
            {target: products[target].prepare_adapter(low) for target, low in own.items()}
            for products, own in zip(self._products, layers, strict=True)
        ]

    def put_adapter(self, slot: int, prepared: PreparedAdapter | None) -> None:
        """Put an adapter into a slot for all later steps; `prepared` None empties the slot."""
        for number, products in enumerate(self._products):
            own = {} if prepared is None else prepared[number]
            for target, product in products.items():
                product.put_adapter(slot, own.get(target))
