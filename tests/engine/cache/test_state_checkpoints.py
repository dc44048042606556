# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of states in a pool: where they are made, what a hit needs of them, who holds their
pages, and what becomes of them."""

from __future__ import annotations

import pytest

from stratakv.connector.messages import EvictedBlock
from stratakv.connector.page_keys import group_of, group_suffix
from stratakv.engine.cache.block_hash import make_block_hasher
from stratakv.engine.cache.kv_cache_manager import KVCacheManager
from stratakv.engine.cache.state_checkpoints import StateCheckpoints
from stratakv.engine.models.layer_attention import full, window
from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams

SIZE = 4
PIECES = 3
HASHER = make_block_hasher(b"r" * 32, SIZE)


class Rig:
    """A manager with checkpoints of three pieces, and a step at a time."""

    def __init__(self, num_blocks: int = 60, **options: object) -> None:
        self.manager = KVCacheManager(
            num_blocks, SIZE, 1000, num_state_pages=PIECES, **options  # type: ignore[arg-type]
        )  # fmt: skip
        assert self.manager.states is not None
        self.states: StateCheckpoints = self.manager.states
        self.pool = self.manager.pool
        self.step_id = 0
        self.begin_step()

    def begin_step(self) -> None:
        self.step_id += 1
        self.pool.begin_step(self.step_id)

    def end_step(self) -> None:
        self.pool.commit_step(self.step_id)
        self.begin_step()

    def start(self, request: Request, num_tokens: int | None = None) -> int:
        """Let a request in, with all of its tokens or so many, and make its checkpoints; its hit
        tokens."""
        blocks, num_hit = self.manager.get_computed_blocks(request)
        count = request.num_tokens - num_hit if num_tokens is None else num_tokens
        assert self.manager.allocate_slots(request, count, num_hit, blocks) is not None
        request.num_computed_tokens = num_hit
        self.saves = self.go_on(request, count)
        return num_hit

    def go_on(self, request: Request, count: int) -> list[int]:
        """The positions of the checkpoints that a step of so many tokens makes."""
        first = request.num_computed_tokens
        request.num_computed_tokens = first + count
        saves = self.states.save(request, first, first + count, 4)
        self.states.free_saved()
        return [each.position for each in saves]

    def end(self, request: Request) -> None:
        self.manager.free(request)


def ask(name: str, num_tokens: int, *, first: int = 0, **options: bool) -> Request:
    tokens = [first + number for number in range(num_tokens)]
    return Request(name, tokens, SamplingParams(max_tokens=90), block_hasher=HASHER, **options)  # type: ignore[arg-type]


def test_a_prompt_ends_in_a_checkpoint_and_the_next_one_begins_there() -> None:
    rig = Rig()
    first = ask("a", 22)
    assert rig.start(first) == 0
    assert rig.saves == [20]
    assert rig.states.take_start("a") == []
    again = ask("b", 22)
    assert rig.manager.get_computed_blocks(again)[1] == 0, "the step that writes it may not read it"
    rig.end_step()
    assert rig.start(again) == 20
    pages = rig.states.take_start("b")
    assert len(set(pages)) == PIECES
    assert rig.saves == [], "it is there"
    longer = ask("c", 40)
    assert rig.start(longer) == 20
    assert rig.states.take_start("c") == pages


def test_a_hit_ends_at_a_checkpoint_and_parts_from_there_are_a_junction() -> None:
    """Another prompt shares 14 tokens: three blocks of K and V, and no states behind them. Its
    junction gets a checkpoint, for which the next one is found."""
    rig = Rig()
    rig.start(ask("a", 22))
    rig.end_step()
    parts = Request(
        "b", [*range(14), *range(500, 512)], SamplingParams(max_tokens=9), block_hasher=HASHER
    )
    assert rig.start(parts) == 0
    assert parts.progress.junction == 12
    assert rig.saves == [12, 24]
    rig.end_step()
    third = Request(
        "c", [*range(14), *range(700, 712)], SamplingParams(max_tokens=9), block_hasher=HASHER
    )
    assert rig.start(third) == 12
    assert third.progress.junction == 0


@pytest.mark.parametrize(
    ("interval", "steps", "expected"),
    [
        (0, [30], [[28]]),
        (8, [30], [[8, 16, 24, 28]]),
        (8, [13, 17], [[8], [16, 24, 28]]),
        (8, [16, 8, 6], [[8, 16], [24], [28]]),
        (20, [30], [[20, 28]]),
    ],
)
def test_the_places_of_checkpoints(
    interval: int, steps: list[int], expected: list[list[int]]
) -> None:
    rig = Rig(state_interval=interval)
    request = ask("a", 30)
    rig.start(request, steps[0])
    made = [rig.saves]
    for count in steps[1:]:
        rig.end_step()
        assert rig.manager.allocate_slots(request, count) is not None
        made.append(rig.go_on(request, count))
    assert made == expected


def test_more_checkpoints_than_spare_states_end_a_chunk() -> None:
    rig = Rig(state_interval=4)
    request = ask("a", 40)
    assert rig.states.most_tokens(request, 0, 40, 4) == (20, 4)
    assert rig.states.most_tokens(request, 0, 18, 4) == (18, 4)
    assert rig.states.most_tokens(request, 0, 16, 4) == (16, 3)  # the last ends with the chunk
    assert rig.states.most_tokens(request, 20, 20, 0) == (4, 0)
    assert rig.states.most_tokens(request, 21, 2, 0) == (2, 0)
    without = Rig()
    assert without.states.most_tokens(request, 0, 40, 4) == (40, 1)
    assert without.states.most_tokens(request, 0, 36, 0) == (36, 0)
    # A prompt that may not be cut has as many as there are states for.
    assert len(rig.states.save(request, 0, 40, 2)) == 3


def test_a_checkpoint_needs_room_and_takes_none_for_long() -> None:
    rig = Rig(num_blocks=1 + 6 + 2)
    request = ask("a", 22)
    free = rig.pool.num_free
    rig.start(request)
    assert rig.saves == [], "two pages are left, and it takes three"
    rig.end(request)
    roomy = Rig(num_blocks=1 + 6 + PIECES)
    other = ask("a", 22)
    roomy.start(other)
    assert roomy.saves == [20]
    assert roomy.pool.num_free == PIECES, "its pages are free at once"
    assert free == 8


def test_what_takes_a_piece_takes_the_hit() -> None:
    rig = Rig(num_blocks=1 + 12)
    rig.start(ask("a", 22))
    rig.end_step()
    # The pages that have no key go first, then pieces.
    taken = rig.pool.get_new_blocks(rig.pool.num_free - PIECES + 1)
    evicted = rig.pool.take_evicted()
    assert [group_of(block.key) for block in evicted] == [1]
    assert rig.manager.get_computed_blocks(ask("b", 22))[1] == 0
    rig.pool.free_blocks(taken)


def test_pieces_that_are_left_are_stored_beside_what_is_evicted() -> None:
    rig = Rig(num_blocks=1 + 12)
    request = ask("a", 22)
    rig.start(request)
    rig.end_step()
    rig.pool.get_new_blocks(rig.pool.num_free - PIECES + 1)
    rig.states.offer_beside(rig.pool.take_evicted())
    assert sorted(group_of(each.key) for each in rig.pool.take_fresh(9)) == [2, 3]
    # The block in front of a checkpoint does the same.
    other = Rig()
    request = ask("a", 22)
    other.start(request)
    other.end_step()
    digest = request.block_hashes[4]
    other.states.offer_beside([EvictedBlock(9, request.block_hashes[3] + group_suffix(0))])
    assert other.pool.take_fresh(9) == []
    other.states.offer_beside([EvictedBlock(9, digest + group_suffix(0))])
    assert sorted(each.key for each in other.pool.take_fresh(9)) == other.states.keys(digest)


def test_a_request_that_ends_leaves_its_checkpoint_as_young_as_its_blocks() -> None:
    rig = Rig()
    request = ask("a", 22)
    rig.start(request)
    rig.end_step()
    rig.pool.free_blocks(rig.pool.get_new_blocks(rig.pool.num_free - PIECES))  # younger ones
    rig.end(request)
    order = [block.block_hash for block in rig.pool.free_queue][-6 - PIECES :]
    digests = request.block_hashes
    assert order == [
        *rig.states.keys(digests[4]), None, *[each + group_suffix(0) for each in digests[::-1]]
    ]  # fmt: skip


def test_a_load_holds_pages_until_its_request_starts() -> None:
    rig = Rig()
    request = ask("a", 22)
    free = rig.pool.num_free
    added = rig.manager.allocate_slots(
        request, 0, num_external_computed_tokens=20, delay_cache_blocks=True
    )
    assert added is not None
    blocks, states = rig.manager.load_page_ids("a", 0)
    assert (len(blocks), len(states)) == (5, PIECES)
    assert rig.pool.num_free == free - 5 - PIECES
    assert rig.manager.cache_blocks(request, 20)
    assert rig.states.take_start("a") == states
    assert rig.pool.num_free == free - 5
    rig.end(request)
    assert rig.start(ask("b", 22)) == 20
    assert rig.states.take_start("b") == states


def test_a_load_without_room_for_states_has_no_room() -> None:
    rig = Rig(num_blocks=1 + 5 + PIECES - 1)
    request = ask("a", 22)
    free = rig.pool.num_free
    wanted = {"num_external_computed_tokens": 20, "delay_cache_blocks": True}
    assert rig.manager.allocate_slots(request, 0, **wanted) is None  # type: ignore[arg-type]
    assert rig.pool.num_free == free
    assert rig.manager.num_blocks_for(22) == 6 + PIECES, "so such a request is refused"


def test_a_load_that_fails_gives_its_pages_back() -> None:
    rig = Rig()
    request = ask("a", 22)
    free = rig.pool.num_free
    rig.manager.allocate_slots(request, 0, num_external_computed_tokens=20, delay_cache_blocks=True)
    rig.manager.free(request)
    assert rig.pool.num_free == free
    assert rig.states.held == []
    assert rig.manager.get_computed_blocks(ask("b", 22))[1] == 0


def test_tokens_that_are_not_known_yet() -> None:
    """A step that goes on behind a token which is being chosen ends at a multiple of the interval:
    the checkpoint is cached when that token is known, and given up where room is lacking."""
    rig = Rig(state_interval=8)
    request = ask("a", 7)
    rig.start(request)
    rig.manager.allocate_slots(request, 1)
    assert rig.go_on(request, 1) == [8]
    assert len(rig.states.held) == PIECES
    rig.end_step()
    request.append_output_token(7)
    rig.manager.cache_scheduled(request, 8)
    assert rig.states.held == []
    rig.end_step()
    rig.end(request)
    assert rig.manager.get_computed_blocks(ask("b", 10))[1] == 8

    tight = Rig(num_blocks=1 + 2 + PIECES, state_interval=8)
    request = ask("a", 7)
    tight.start(request)
    tight.manager.allocate_slots(request, 1)
    assert tight.go_on(request, 1) == [8]
    assert tight.pool.num_free == 0
    request.append_output_token(300)
    assert tight.manager.allocate_slots(request, 1) is not None
    assert tight.states.held == []


def test_the_end_of_a_prompt_for_another_engine() -> None:
    rig = Rig()
    request = ask("a", 22, hands_over=True)
    rig.start(request)
    assert rig.saves == [20, 22]
    rig.end_step()
    rig.manager.cache_tail(request)
    keys = rig.manager.prompt_keys(request, with_tail=True)
    assert [group_of(key) for key in keys] == [0] * 6 + [1, 2, 3]
    assert all(map(rig.pool.has, keys))


def test_checkpoints_that_are_uncached() -> None:
    rig = Rig()
    request = ask("a", 22)
    rig.start(request)
    rig.end_step()
    keys = rig.manager.uncache_request(request)
    # All pieces: one that is left in a tier would be taken for a part of a later checkpoint.
    assert [group_of(key) for key in keys] == [0] * 5 + [1, 2, 3] * 5
    assert not any(map(rig.pool.has, rig.states.keys(request.block_hashes[4])))
    handed = ask("b", 22, hands_over=True)
    rig.start(handed)
    rig.end_step()
    tail = handed.prompt_tail_hash()
    assert set(rig.states.keys(tail)) <= set(rig.manager.uncache_request(handed))
    assert not any(map(rig.pool.has, rig.states.keys(tail)))


def test_a_pinned_turn_keeps_its_newest_checkpoint() -> None:
    rig = Rig(state_interval=8)
    request = ask("a", 15)
    rig.start(request)
    rig.end_step()
    rig.manager.allocate_slots(request, 1)
    assert rig.go_on(request, 1) == [16]  # of a token that is not known
    rig.manager.pin(request, "holder")
    assert [block.block_hash for block in rig.states.held] == rig.states.keys(
        request.block_hashes[2]
    )
    assert not rig.states._newest
    # What others take is not that: the next turn goes on there.
    assert rig.pool.num_reclaimable == 4 + PIECES
    rig.pool.free_blocks(rig.pool.get_new_blocks(rig.pool.num_free))
    assert rig.manager.get_computed_blocks(ask("b", 20))[1] == 12
    rig.manager.unpin("holder")
    assert rig.pool.is_idle
    assert rig.pool.num_reclaimable == 0


def test_a_few_words_leave_no_checkpoint() -> None:
    """A page is as K and V of 4 tokens: 65 pages are more than sixteen times what 4 tokens take."""
    rig = Rig()
    rig.start(ask("a", 5))
    assert rig.saves == [4]
    dear = KVCacheManager(200, SIZE, 1000, num_state_pages=65)
    assert dear.states is not None
    assert dear.states.positions(ask("a", 5), 0, 5) == []
    assert dear.states.positions(ask("b", 22), 0, 22) == [20]
    assert dear.states.positions(ask("c", 5, hands_over=True), 0, 5) == [5]


def test_another_engine_is_told_of_no_states_that_were_not_made() -> None:
    rig = Rig(num_blocks=1 + 6 + 2)
    request = ask("a", 22, hands_over=True)
    rig.start(request)
    assert rig.saves == []
    keys = rig.manager.prompt_keys(request, with_tail=True)
    assert [group_of(key) for key in keys] == [0] * 6
    tight = Rig(num_blocks=1 + 6 + PIECES)
    request = ask("a", 22, hands_over=True)
    tight.start(request)
    assert tight.saves == [22], "the one that the other engine reads"


def test_room_for_drafts_that_is_lacking_costs_no_hit() -> None:
    """Of a request that starts in this step, for which more room is asked in vain."""
    rig = Rig(num_blocks=1 + 2 * 6 + PIECES)
    rig.start(ask("a", 22))
    rig.end_step()
    again = ask("b", 22)
    assert rig.start(again) == 20
    assert rig.manager.allocate_slots(again, 9, keep_free_blocks=50) is None
    assert len(rig.states.take_start("b")) == PIECES


def test_nothing_is_kept_without_a_prefix_cache() -> None:
    rig = Rig(enable_caching=False)
    rig.start(ask("a", 22))
    assert rig.saves == []
    assert rig.pool.num_free == 59 - 6


def test_windows_and_states() -> None:
    """The hit of each length needs other blocks of a window."""
    rig = Rig(num_blocks=90, attention=(full(), window(5)), state_interval=8)
    rig.start(ask("a", 30))
    assert rig.saves == [8, 16, 24, 28]
    rig.end_step()
    shorter = ask("b", 20)
    blocks, num_hit = rig.manager.get_computed_blocks(shorter)
    assert num_hit == 16
    assert [block.is_null for block in blocks[1]] == [True, True, True, False]


def test_an_interval_that_ends_no_block() -> None:
    with pytest.raises(ValueError, match="checkpoints every 6 tokens do not end where blocks of 4"):
        Rig(state_interval=6)
