# SPDX-License-Identifier: Apache-2.0
"""The cache groups of a model: the layers of a group share a block table.

A page holds K and V of `block_size` tokens in the layers of one group. A block of tokens has one
page in each group; each page has its own id. All ids come from one pool, so all pages have the same
size. All layers of a group have the same kind of attention, as pages are released whole.

    group 0   full attention      layers 5 11          table: 7 3 8
    group 1   window of 512       layers 0 1           table: 0 9 4    (0: outside the window)
    group 2   window of 512       layers 2 3           table: 0 1 5
    group 3   window of 512       layers 4             table: 0 6 2    (its pages have a place free)

K and V of a draft model's layers (speculation) lie in the same pool, and are found, copied and
loaded together with the model's K and V. If all layers of the model have full attention, each page
ends with the draft's layers; otherwise the draft's layers have groups of their own. The draft model
divides a page into places of its own layer size, so the page size is a multiple of that size.

    page                  | model 0 | model 1 | model 2 | model 3 | free |
    as the draft sees it  |    |    |    |    |    |    |    |    | 0 | 1|

Layers that only carry a state, or only have an MLP, have no K and V and no table. A checkpoint of a
sequence's states is cut into pieces. Each piece takes a page, whose key is like that of a page of
an additional group (`state_checkpoints.py`):

    D|0   K and V of the block that ends here      D|1 D|2 D|3   the states behind it"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from ...tiers.block import BlockLayout
from ...tiers.settings.values import MAX_BLOCKS, ConfigError
from ..models.layer_attention import LayerAttention, full
from ..models.states.state_spec import StateSpec

# The largest ratio of layer counts at which a page has as many places as the larger count. The
# smaller kind then wastes less than one place in five, and needs one group and table less.
_NEARLY_EQUAL = 1.25
# Spare state slots, beside the slots of requests, for one step's checkpoints in the middle of
# chunks. A chunk ends at the first checkpoint without a slot.
NUM_SPARE_STATES = 4


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The layers of a cache group, in the order of their places in a page, and their kind of
    attention. If the group has fewer layers than places, the last places are empty."""

    layers: tuple[int, ...]
    attention: LayerAttention
    num_draft_places: int = 0  # places of a page that a draft model uses

    @property
    def num_places(self) -> int:
        """The number of places of a page that hold layers of the model or of a draft model."""
        return len(self.layers) + self.num_draft_places

    @property
    def window(self) -> int | None:
        """The size of the sliding window in tokens; None for other kinds of attention."""
        return self.attention.window


class LayerPlace(NamedTuple):
    """The place of a layer's K and V: the cache group, and the index within its pages."""

    group: int
    in_page: int


NO_PLACE = LayerPlace(-1, -1)  # of a layer without K and V


def states_of_request(most_drafts: int) -> int:
    """Return the number of states per request if a step checks up to `most_drafts` drafts: the
    state before the step, and one after each token of the step."""
    return most_drafts + 2 if most_drafts else 1


def num_state_slots(num_requests: int, most_drafts: int = 0) -> int:
    """Return the number of state slots that a worker needs for `num_requests` running requests."""
    return num_requests * states_of_request(most_drafts) + NUM_SPARE_STATES


@dataclass(frozen=True, slots=True)
class DraftPages:
    """The pages of a pool as a draft model divides them."""

    layout: BlockLayout  # the layout of a page: `num_layers` places of the draft's place size
    places: tuple[LayerPlace, ...]  # the place of each layer of the draft model


class StateBytes(NamedTuple):
    """The size and the layout of one sequence's states in all layers."""

    num_bytes: int
    plan: str  # layers, shapes and number types; differs if the bytes of a state differ


def state_bytes(state: StateSpec | None, dtype: str) -> StateBytes | None:
    """Return the size of a model's states if it computes in `dtype`; None without state layers."""
    if state is None:
        return None
    return StateBytes(state.slot_bytes(dtype), f"{state} {dtype}")


@dataclass(frozen=True, slots=True)
class StatePages:
    """The pages of a state checkpoint, one for each piece."""

    states: StateBytes
    num_pages: int
    first_group: int  # the number of a group, in the key of the first piece


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """All groups of a model, and the layout of their pages (`layout.num_layers` places each)."""

    groups: tuple[CacheGroup, ...]
    layout: BlockLayout
    num_layers: int  # all layers of the model, including layers without K and V
    draft: DraftPages | None = None
    state: StatePages | None = None

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def num_places(self) -> int:
        """The number of places of a block of tokens, summed over all groups."""
        return sum(group.num_places for group in self.groups)

    @property
    def attention(self) -> tuple[LayerAttention, ...]:
        return tuple(group.attention for group in self.groups)

    @property
    def forgets(self) -> bool:
        """Whether some group releases blocks of a running sequence, as sliding windows do."""
        return not all(group.attention.is_full for group in self.groups)

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes of a state checkpoint's pages; 0 without states."""
        return 0 if self.state is None else self.state.num_pages * self.layout.page_bytes

    def bound(self, fingerprint: str, draft_fingerprint: str = "") -> str:
        """Return a model's fingerprint combined with this plan of groups, as 64 hexadecimal digits.
        The fingerprint is unchanged if all layers have full attention and there is no draft model
        and no state. Engines with different plans of groups, or different draft models, must not
        find each other's blocks."""
        if not self.forgets and self.draft is None and self.state is None:
            return fingerprint
        plan: list[object] = [[str(group.attention), *group.layers] for group in self.groups]
        if self.draft is not None:
            plan.append([draft_fingerprint, *map(tuple, self.draft.places)])
        if self.state is not None:
            plan.append([*self.state.states, self.state.num_pages])
        return hashlib.sha256(f"{fingerprint} {plan}".encode()).hexdigest()

    def num_pages(self, num_blocks: int) -> int:
        """Return the number of pages that fit into the memory of `num_blocks` blocks over all
        layers. Raises ConfigError if the number exceeds MAX_BLOCKS."""
        pages = num_blocks * self.num_places // self.layout.num_layers
        if pages > MAX_BLOCKS:
            raise ConfigError(
                f"{num_blocks} blocks in {len(self.groups)} cache groups are {pages} of the KV "
                f"pool, which has at most {MAX_BLOCKS}; lower --num-blocks or "
                "--kv-cache-memory-bytes"
            )
        return pages

    def most_pages(self, num_tokens: int, most_step_tokens: int) -> int:
        """Return the most pages that a request of `num_tokens` holds at once
        (`LayerAttention.most_blocks`), including a checkpoint that it may load."""
        size = self.layout.block_size
        pages = sum(kind.most_blocks(num_tokens, size, most_step_tokens) for kind in self.attention)
        return pages if self.state is None else pages + self.state.num_pages

    def places(self) -> list[LayerPlace]:
        """Return the place of every layer of the model; NO_PLACE for a layer without K and V."""
        found = {
            layer: LayerPlace(number, place)
            for number, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }
        return [found.get(layer, NO_PLACE) for layer in range(self.num_layers)]


def pages_per_block(attention: Sequence[LayerAttention]) -> int:
    """Return the number of pages of a pool block, one for each group that shares it. Consecutive
    groups with the same kind of attention share blocks, because they hold and release the same
    tokens. All blocks of a pool have the same number of pages.

        full full                             2
        full full window window window window    2
        full window window                    1"""
    runs = [len(list(run)) for _, run in groupby(attention)]
    return math.gcd(*runs)


def plan_groups(
    layout: BlockLayout,
    num_groups: int = 1,
    attention: Sequence[LayerAttention] = (),
    draft: BlockLayout | None = None,
    states: StateBytes | None = None,
) -> CacheGroups:
    """Divide the layers of a model into groups with pages of equal size. `layout` is a block over
    all layers with K and V; other layers are in no group. `attention` has a value for each layer;
    without `attention` all layers have full attention. `states` describes the layers that carry a
    state, beside K and V or instead.

    If all layers have the same kind of attention, there are `num_groups` groups. Otherwise the
    kinds decide the number of groups, and `num_groups` must be 1. `draft` is the layout of a block
    over all layers of a draft model, with the same number of tokens and number type. Raises
    ConfigError, which names the layers, if the pages cannot have equal sizes."""
    attention = tuple(attention) or (full(),) * layout.num_layers
    num_attending = sum(kind.has_kv for kind in attention)
    if num_attending != layout.num_layers:
        raise ConfigError(
            f"a model of {layout.num_layers} layers needs as many kinds of attention, and "
            f"{num_attending} were given"
        )
    kinds: dict[LayerAttention, list[int]] = {}
    for layer, kind in enumerate(attention):
        if kind.has_kv:
            kinds.setdefault(kind, []).append(layer)
    if states is None and any(kind.is_state for kind in attention):
        raise ValueError("layers that carry a state need the bytes of their states")
    if len(kinds) == 1:
        size = _equal_size(kinds, num_groups)
    elif num_groups == 1:
        size = _common_size([len(layers) for layers in kinds.values()])
    else:
        raise ConfigError(
            f"{num_groups} cache groups cannot be asked for where layers attend in several ways: "
            f"{_describe(kinds)}; leave the number of groups at 1, and the layers will decide"
        )
    # Full attention comes first, because its hit limits the search of the other groups.
    in_order = sorted(kinds.items(), key=lambda item: not item[0].is_full)
    groups = tuple(
        CacheGroup(tuple(layers[start : start + size]), kind)
        for kind, layers in in_order
        for start in range(0, len(layers), size)
    )
    planned = CacheGroups(groups, replace(layout, num_layers=size), len(attention))
    if draft is not None:
        planned = _with_draft(planned, draft)
    if states is None:
        return planned
    num_pages = -(-states.num_bytes // planned.layout.page_bytes)
    return replace(planned, state=StatePages(states, num_pages, len(planned)))


def _with_draft(groups: CacheGroups, draft: BlockLayout) -> CacheGroups:
    size, draft_size = groups.layout.place_bytes, draft.place_bytes
    # A page of `unit` places, or a multiple, holds a whole number of the draft's places.
    unit = draft_size // math.gcd(size, draft_size)
    layout = groups.layout
    if len(groups) == 1 and not groups.forgets:
        [group] = groups.groups
        first = -(-layout.page_bytes // draft_size)
        num_places = -(-(first + draft.num_layers) * draft_size // size)
        num_places = -(-num_places // unit) * unit
        layout = replace(layout, num_layers=num_places)
        own = [replace(group, num_draft_places=num_places - len(group.layers))]
        places = [LayerPlace(0, first + layer) for layer in range(draft.num_layers)]
    else:
        in_page, rest = divmod(layout.page_bytes, draft_size)
        if rest or not in_page:
            raise ConfigError(
                f"a layer of the draft model takes {draft_size} bytes of a block, and the pages of "
                f"this model's cache groups have {layout.page_bytes}, which is no multiple of "
                "that; take another draft model"
            )
        num_groups = -(-draft.num_layers // in_page)
        num_full = sum(group.attention.is_full for group in groups.groups)
        own = list(groups.groups)
        own[num_full:num_full] = [CacheGroup((), full(), layout.num_layers)] * num_groups
        places = [
            LayerPlace(num_full + layer // in_page, layer % in_page)
            for layer in range(draft.num_layers)
        ]
    seen = replace(draft, num_layers=layout.page_bytes // draft_size)
    pages = DraftPages(seen, tuple(places))
    return replace(groups, groups=tuple(own), layout=layout, draft=pages)


def _equal_size(kinds: dict[LayerAttention, list[int]], num_groups: int) -> int:
    """Return the number of layers per group if all layers have the same kind of attention. Raises
    ConfigError if a place would stay empty."""
    [layers] = kinds.values()
    size, rest = divmod(len(layers), num_groups)
    if rest or not size:
        raise ConfigError(
            f"{num_groups} cache groups of equal size cannot be made of {len(layers)} layers "
            f"({_describe(kinds)}); take a divisor of {len(layers)}"
        )
    return size


def _common_size(counts: Sequence[int]) -> int:
    """Return the number of layers per page for kinds with `counts` layers: the smallest count, so
    that no kind has empty places, or the largest count if both counts are nearly equal."""
    least, most = min(counts), max(counts)
    return most if most <= least * _NEARLY_EQUAL else least


def _describe(kinds: dict[LayerAttention, list[int]]) -> str:
    return ", ".join(f"{kind} in layers {_ranges(layers)}" for kind, layers in kinds.items())


def _ranges(layers: Sequence[int]) -> str:
    """Format layer numbers as `0-4, 6, 8-9`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return ", ".join("-".join(map(str, run)) for run in runs)
