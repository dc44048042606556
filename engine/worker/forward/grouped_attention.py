# SPDX-License-Identifier: Apache-2.0
"""Attention of a model whose layers lie in several cache groups: each layer reads its group's plan,
at its place within a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

from torch import Tensor

from ...cache.group_spec import CacheGroups
from ...models.decoder import Attention, Plan


class GroupedAttention(Generic[Plan]):
    """`attention` is over the pages of the pool, whichever group they belong to."""

    def __init__(self, attention: Attention[Plan], groups: CacheGroups) -> None:
        self._attention = attention
        self._places = groups.places()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, plans: Sequence[Plan], /
    ) -> Tensor:
        group, index = self._places[layer]
        return self._attention(q, k, v, index, plans[group])


def attention_over(attention: Attention[Plan], groups: CacheGroups) -> Attention[Any]:
    """What computes a step that `plan_of` has put together; for one group that is `attention`."""
    return attention if len(groups) == 1 else GroupedAttention(attention, groups)


def plan_of(plans: Sequence[Plan]) -> Plan | Sequence[Plan]:
    """The plan of a step from those of its groups."""
    return plans[0] if len(plans) == 1 else plans
