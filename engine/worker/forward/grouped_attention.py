# SPDX-License-Identifier: Apache-2.0
"""Attention for models whose layers differ in cache group or window. Each layer reads its part of a
page, by the attention plan of its view:

    view = (cache group, window)     one plan for each view; most models have one view"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

from torch import Tensor

from ....kernels.layer.rotate_write import Rotary
from ...cache.group_spec import LayerPlace
from ...models.decoder import Attention, Plan, QkvAttention
from ...models.layer_attention import LayerAttention


class View(NamedTuple):
    """The cache group and the window of the layers that share an attention plan."""

    group: int
    window: int | None  # positions that a token sees, including its own; None: all


class LayerViews:
    """The views of a model, and for each layer the index of its view and of its part of a page."""

    def __init__(self, places: Sequence[LayerPlace], attention: Sequence[LayerAttention]) -> None:
        """`places` and `attention` have an entry for each layer. Layers of one cache group may
        differ in their attention. Layers without K and V have no view. Raises ValueError for a kind
        of attention that the worker cannot compute."""
        of_layers = []
        for place, kind in zip(places, attention, strict=True):
            if kind.has_kv and not kind.is_full and kind.window is None:
                raise ValueError(f"no attention of the worker computes {kind}")
            of_layers.append(View(place.group, kind.window) if kind.has_kv else None)
        self.views = tuple(dict.fromkeys(view for view in of_layers if view is not None))
        index = {view: number for number, view in enumerate(self.views)}
        self.places = [
            (-1 if view is None else index[view], place.in_page)
            for view, place in zip(of_layers, places, strict=True)
        ]
        # Whether all layers share one plan, and each layer's place is its number.
        self._is_plain = self.places == [(0, layer) for layer in range(len(self.places))]

    def attention_over(self, attention: Attention[Plan]) -> Attention[Any]:
        """Return an attention whose plan is the result of `plan_of`."""
        return attention if self._is_plain else GroupedAttention(attention, self)

    def plan_of(self, plans: Sequence[Plan]) -> Plan | Sequence[Plan]:
        """Combine the plans of all views, in the order of `views`, to the plan of a step."""
        return plans[0] if self._is_plain else plans


class GroupedAttention(Generic[Plan]):
    """Attention that passes to each layer the plan of its view. `attention` computes over the pages
    of all groups."""

    def __init__(self, attention: Attention[Plan], views: LayerViews) -> None:
        self._attention = attention
        self._places = views.places
        self._of_qkv: QkvAttention[Plan] | None = getattr(attention, "of_qkv", None)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, plans: Sequence[Plan], /
    ) -> Tensor:
        view, index = self._places[layer]
        return self._attention(q, k, v, index, plans[view])

    @property
    def of_qkv(self) -> QkvAttention[Sequence[Plan]] | None:
        """The function that also rotates queries and keys; None if `attention` has none."""
        return None if self._of_qkv is None else self._attend_qkv

    def _attend_qkv(
        self, qkv: Tensor, rotary: Rotary, layer: int, plans: Sequence[Plan], /
    ) -> Tensor:
        assert self._of_qkv is not None
        view, index = self._places[layer]
        return self._of_qkv(qkv, rotary, index, plans[view])
