# SPDX-License-Identifier: Apache-2.0
"""Plans of cache groups: which layers share a page, and what is refused."""

from __future__ import annotations

import pytest

from stratakv.engine.cache.group_spec import (
    NO_PLACE,
    CacheGroups,
    LayerPlace,
    StateBytes,
    plan_groups,
)
from stratakv.engine.models.layer_attention import (
    LayerAttention,
    chunk,
    full,
    no_attention,
    state,
    window,
)
from stratakv.engine.worker.forward.grouped_attention import LayerViews
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.settings.values import ConfigError

FINGERPRINT = "ab" * 32


def plan(attention: list[LayerAttention], num_groups: int = 1) -> CacheGroups:
    layout = BlockLayout(len(attention), 16, 2, 8, "float32")
    return plan_groups(layout, num_groups, attention)


def one_in(period: int, num_layers: int, other: LayerAttention) -> list[LayerAttention]:
    """Full attention in the last of every `period` layers."""
    return [full() if i % period == period - 1 else other for i in range(num_layers)]


def test_layers_of_one_kind_are_cut_into_groups_as_large_as_the_rarest_kind() -> None:
    """Four layers of 26 see everything; 22 have windows and fill five groups and half of one."""
    groups = plan(one_in(6, 26, window(512)))
    assert [len(group.layers) for group in groups.groups] == [4, 4, 4, 4, 4, 4, 2]
    assert groups.groups[0].layers == (5, 11, 17, 23)
    assert groups.groups[1].layers == (0, 1, 2, 3)
    assert [group.window for group in groups.groups] == [None] + [512] * 6
    assert groups.layout.num_layers == 4
    assert groups.num_places == 26
    assert groups.forgets
    places = groups.places()
    assert len(set(places)) == 26
    assert all(place.in_page < 4 for place in places)
    # The memory of 100 blocks over 26 layers, in pages of 4.
    assert groups.num_pages(100) == 650


def test_nearly_equal_kinds_share_pages_with_a_place_free() -> None:
    groups = plan([full()] * 4 + [chunk(64)] * 5)
    assert [len(group.layers) for group in groups.groups] == [4, 5]
    assert groups.layout.num_layers == 5
    groups = plan([full()] * 4 + [chunk(64)] * 6)
    assert [len(group.layers) for group in groups.groups] == [4, 4, 2]


def test_several_windows_are_several_kinds() -> None:
    groups = plan([window(8), window(16), full(), window(8)])
    assert [(str(group.attention), group.layers) for group in groups.groups] == [
        ("full attention", (2,)),
        ("sliding window of 8", (0,)),
        ("sliding window of 8", (3,)),
        ("sliding window of 16", (1,)),
    ]


def test_the_most_pages_of_a_request_are_bounded_by_its_windows() -> None:
    groups = plan(one_in(2, 4, window(32)))
    # A step of 16 tokens sees 31 before its first: 47 tokens touch four blocks at most.
    assert groups.most_pages(10_000, 16) == 625 + 4
    assert groups.most_pages(20, 16) == 2 + 2


def test_layers_without_a_window_are_planned_as_ever() -> None:
    layout = BlockLayout(6, 16, 2, 8, "float32")
    assert plan_groups(layout, 3) == plan_groups(layout, 3, [full()] * 6)
    assert not plan_groups(layout).forgets
    assert plan_groups(layout).bound(FINGERPRINT) == FINGERPRINT


def test_another_plan_has_other_names() -> None:
    """Pages of one size that hold other layers must not pass for each other."""
    one, other = plan([full(), window(8)] * 2), plan([full(), full(), window(8), window(8)])
    wider = plan([full(), window(9)] * 2)
    assert one.layout == other.layout == wider.layout
    names = {groups.bound(FINGERPRINT) for groups in (one, other, wider)}
    assert len(names | {FINGERPRINT}) == 4
    assert one.bound(FINGERPRINT) == plan([full(), window(8)] * 2).bound(FINGERPRINT)


def drafted(
    attention: list[LayerAttention], draft: BlockLayout, num_groups: int = 1
) -> CacheGroups:
    layout = BlockLayout(len(attention), 16, 2, 8, "float32")
    return plan_groups(layout, num_groups, attention, draft)


@pytest.mark.parametrize(("num_layers", "heads", "dim", "num_places", "first"), [
    (3, 2, 8, 7, 4), (3, 1, 8, 6, 8), (3, 4, 8, 10, 2), (1, 3, 8, 6, 3), (2, 3, 16, 12, 2),
])  # fmt: skip
def test_a_draft_model_lies_behind_layers_that_see_everything(
    num_layers: int, heads: int, dim: int, num_places: int, first: int
) -> None:
    """Pages hold a whole number of its layers too, and no two layers overlap."""
    draft = BlockLayout(num_layers, 16, heads, dim, "float32")
    groups = drafted([full()] * 4, draft)
    assert groups.layout.num_layers == groups.num_places == num_places
    assert groups.draft is not None
    assert groups.draft.layout.page_bytes == groups.layout.page_bytes
    assert groups.draft.places == tuple((0, first + layer) for layer in range(num_layers))
    assert first * draft.place_bytes >= 4 * groups.layout.place_bytes
    assert groups.draft.layout.num_layers >= first + num_layers
    assert groups.places() == [(0, layer) for layer in range(4)]


def test_a_draft_model_has_groups_of_its_own_beside_windows() -> None:
    draft = BlockLayout(5, 16, 2, 8, "float32")
    groups = drafted([full(), full(), window(9), window(9)], draft)
    assert [group.layers for group in groups.groups] == [(0, 1), (), (), (), (2, 3)]
    assert [group.attention.is_full for group in groups.groups] == [True] * 4 + [False]
    assert groups.draft is not None
    assert groups.draft.places == ((1, 0), (1, 1), (2, 0), (2, 1), (3, 0))
    assert groups.places() == [(0, 0), (0, 1), (4, 0), (4, 1)]
    assert groups.num_places == 10
    # Of windows alone it takes nothing that is forgotten.
    groups = drafted([window(9)] * 2, draft)
    assert [group.attention.is_full for group in groups.groups] == [True] * 3 + [False]
    with pytest.raises(ConfigError, match=r"4096 bytes of a block, and the pages .* have 2048"):
        drafted([full(), window(9)], BlockLayout(5, 16, 4, 8, "float32"))


def test_a_plan_is_named_by_its_draft_model_too() -> None:
    draft = BlockLayout(2, 16, 2, 8, "float32")
    plans = [
        drafted([full()] * 4, draft),
        drafted([full()] * 4, BlockLayout(2, 16, 1, 8, "float32")),
    ]
    names = {each.bound(FINGERPRINT, other) for each in plans for other in ("a", "b")}
    assert len(names | {FINGERPRINT}) == 5


@pytest.mark.parametrize(
    ("attention", "num_groups", "words"),
    [
        (
            [full()] * 4,
            3,
            r"3 cache groups .* \(full attention in layers 0-3\); take a divisor",
        ),
        (
            [full(), window(8), window(8), full()],
            2,
            r"2 cache groups .* full attention in layers 0, 3, sliding window of 8 in layers 1-2",
        ),
    ],
)
def test_plans_that_cannot_be(attention: list[LayerAttention], num_groups: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(attention, num_groups)


def test_a_kind_for_each_layer() -> None:
    with pytest.raises(ConfigError, match="4 layers needs as many kinds of attention, and 3"):
        plan_groups(BlockLayout(4, 16, 2, 8, "float32"), 1, [full()] * 3)


@pytest.mark.parametrize("size", [0, -3])
def test_windows_without_tokens(size: int) -> None:
    for make in (window, chunk):
        with pytest.raises(ValueError, match=f"takes at least 1 token, not {size}"):
            make(size)


STATES = StateBytes(5000, "conv 2 x 3")


def test_layers_with_states_are_in_no_group() -> None:
    """Two of six layers attend: their pages have 2 x 1024 bytes, so states of 5000 have three
    pieces, whose keys are those of further groups."""
    layout = BlockLayout(2, 16, 2, 4, "float32")
    assert layout.page_bytes == 2048
    attention = [state(), state(), full(), state(), full(), state()]
    groups = plan_groups(layout, 1, attention, states=STATES)
    [group] = groups.groups
    assert (group.layers, group.attention) == ((2, 4), full())
    assert groups.layout == layout
    assert groups.state is not None
    assert (groups.state.num_pages, groups.state.first_group) == (3, 1)
    assert groups.places() == [
        NO_PLACE, NO_PLACE, LayerPlace(0, 0), NO_PLACE, LayerPlace(0, 1), NO_PLACE
    ]  # fmt: skip
    # A request may load a checkpoint beside its blocks.
    assert groups.most_pages(40, 16) == 3 + 3
    assert groups.num_pages(10) == 10


def test_states_beside_windows_and_a_draft_model() -> None:
    layout = BlockLayout(3, 16, 2, 4, "float32")
    groups = plan_groups(layout, 1, [full(), state(), window(8), window(8)], states=STATES)
    assert groups.state is not None
    assert groups.state.first_group == len(groups) == 3
    one, two = (BlockLayout(count, 16, 2, 4, "float32") for count in (1, 2))
    draft = plan_groups(one, 1, [full(), state()], two, STATES)
    assert draft.draft is not None
    assert draft.state is not None
    assert draft.layout.num_layers == 3
    assert draft.state.num_pages == 2


def test_states_of_another_plan_have_other_names() -> None:
    layout = BlockLayout(1, 16, 2, 4, "float32")
    names = {
        plan_groups(layout, 1, attention, states=states).bound(FINGERPRINT)
        for attention, states in (
            ([full(), state()], STATES),
            ([full(), state()], StateBytes(5000, "conv 3 x 2")),
            ([full(), state()], StateBytes(6000, "conv 2 x 3")),
        )
    }
    assert len(names) == 3
    assert FINGERPRINT not in names
    with pytest.raises(ValueError, match="layers that carry a state need the bytes of their"):
        plan_groups(layout, 1, [full(), state()])


def test_states_beside_k_and_v_in_every_layer() -> None:
    """All three layers attend: their pages have 3 x 1024 bytes, so states of 5000 have two."""
    layout = BlockLayout(3, 16, 1, 8, "float32")
    groups = plan_groups(layout, 1, [full()] * 3, states=STATES)
    assert [group.layers for group in groups.groups] == [(0, 1, 2)]
    assert groups.places() == [(0, 0), (0, 1), (0, 2)]
    assert groups.state is not None
    assert (groups.state.num_pages, groups.state.first_group) == (2, 1)
    assert groups.bound(FINGERPRINT) != plan_groups(layout).bound(FINGERPRINT)


def test_layers_without_attention_are_in_no_group() -> None:
    layout = BlockLayout(2, 16, 1, 8, "float32")
    attention = [state(), no_attention(), full(), no_attention(), full(), no_attention()]
    groups = plan_groups(layout, 1, attention, states=STATES)
    assert [group.layers for group in groups.groups] == [(2, 4)]
    assert groups.places() == [NO_PLACE, NO_PLACE, (0, 0), NO_PLACE, (0, 1), NO_PLACE]
    assert LayerViews(groups.places(), attention).places == [
        (-1, -1), (-1, -1), (0, 0), (-1, -1), (0, 1), (-1, -1)
    ]  # fmt: skip
