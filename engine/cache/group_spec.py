# SPDX-License-Identifier: Apache-2.0
"""The cache groups of a model: which layers share a block table, and so the pages of the pool.

A page is a block of the pool: K and V of `block_size` tokens in the layers of one group. A block of
tokens has a page in each group, with an id of its own; all ids come from the one pool.

    group 0   layers 0 … n-1     table: 7 3 8
    group 1   layers n … 2n-1    table: 2 9 4

Today all groups are of one kind, full attention, and of equal size, so that their pages are too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ...tiers.block import BlockLayout
from ...tiers.settings.values import MAX_BLOCKS, ConfigError


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The layers of one group, in the order in which they lie in a page."""

    layers: range


class LayerPlace(NamedTuple):
    """Where a layer's K and V lie."""

    group: int
    in_page: int


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """All groups of a model, and the layout of their pages."""

    groups: tuple[CacheGroup, ...]
    layout: BlockLayout

    def __len__(self) -> int:
        return len(self.groups)

    def num_pages(self, num_blocks: int) -> int:
        """The pages that take the memory of `num_blocks` over all layers. Raises ConfigError for
        more than a pool may have."""
        pages = num_blocks * len(self.groups)
        if pages > MAX_BLOCKS:
            raise ConfigError(
                f"{num_blocks} blocks in {len(self.groups)} cache groups are {pages} of the KV "
                f"pool, which has at most {MAX_BLOCKS}; lower --num-blocks or "
                "--kv-cache-memory-bytes"
            )
        return pages

    def places(self) -> list[LayerPlace]:
        """The place of every layer of the model."""
        found = {
            layer: LayerPlace(number, place)
            for number, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }
        return [found[layer] for layer in range(len(found))]


def plan_groups(layout: BlockLayout, num_groups: int) -> CacheGroups:
    """Split the layers of a model, whose blocks over all layers have this layout, into groups of
    equal size. Raises ConfigError where that is not possible."""
    size, rest = divmod(layout.num_layers, num_groups)
    if rest or not size:
        raise ConfigError(
            f"{num_groups} cache groups of equal size cannot be made of {layout.num_layers} "
            f"layers; take a divisor of {layout.num_layers}"
        )
    starts = range(0, layout.num_layers, size)
    groups = tuple(CacheGroup(range(start, start + size)) for start in starts)
    return CacheGroups(groups, replace(layout, num_layers=size))
