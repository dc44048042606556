# SPDX-License-Identifier: Apache-2.0
"""Cache groups of windows and chunks beside full attention: worked examples, and hits against a
search through all lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from stratakv.engine.cache.block_hash import make_block_hasher
from stratakv.engine.cache.kv_cache_manager import KVCacheManager
from stratakv.engine.models.layer_attention import LayerAttention, chunk, full, window
from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams

SIZE = 4
HASHER = make_block_hasher(b"r" * 32, SIZE)


def make_manager(
    *attention: LayerAttention, num_blocks: int = 100, **options: object
) -> KVCacheManager:
    return KVCacheManager(
        num_blocks, SIZE, 1000, attention=attention, **options  # type: ignore[arg-type]
    )  # fmt: skip


def make_request(name: str, num_tokens: int, first: int = 0) -> Request:
    tokens = range(first, first + num_tokens)
    return Request(name, list(tokens), SamplingParams(max_tokens=200), block_hasher=HASHER)


def compute(manager: KVCacheManager, request: Request, num_tokens: int) -> None:
    """The next tokens of a request that runs."""
    assert manager.allocate_slots(request, num_tokens) is not None
    request.num_computed_tokens += num_tokens
    manager.pool.commit_step()


def start(manager: KVCacheManager, request: Request, num_tokens: int) -> int:
    """Let a request in; its hit tokens."""
    hits, num_hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, num_tokens, num_hit, hits) is not None
    request.num_computed_tokens = num_hit + num_tokens
    manager.pool.commit_step()
    return num_hit


def tables(manager: KVCacheManager, request: Request) -> tuple[list[int], ...]:
    return manager.get_block_ids(request.request_id)


def free_ids(manager: KVCacheManager) -> list[int]:
    return [block.block_id for block in manager.pool.free_queue]


def test_a_window_leaves_null_blocks_behind() -> None:
    """A window of 6: the token at 13 reads from 8 on, so blocks 0 and 1 are given back."""
    manager = make_manager(window(6))
    request = make_request("r", 40)
    start(manager, request, 13)
    assert tables(manager, request) == ([1, 2, 3, 4],)
    keys = [manager.pool.blocks[i].block_hash for i in (1, 2)]
    compute(manager, request, 5)
    assert tables(manager, request) == ([0, 0, 3, 4, 5],)
    assert free_ids(manager)[-2:] == [1, 2]
    # They can be found until somebody takes them; the null block has no key and is not free.
    assert [manager.pool.blocks[i].block_hash for i in (1, 2)] == keys
    null = manager.pool.null_block
    assert null.block_hash is None
    assert null.ref_cnt == 0
    manager.free(request)
    assert 0 not in free_ids(manager)
    assert manager.pool.is_idle


def test_chunks_are_given_back_where_the_next_one_begins() -> None:
    manager = make_manager(full(), chunk(8))
    request = make_request("r", 40)
    start(manager, request, 15)
    assert tables(manager, request)[1] == [5, 6, 7, 8]
    compute(manager, request, 1)  # position 15 is the last of its chunk: 8 to 15
    compute(manager, request, 1)
    assert tables(manager, request)[1] == [0, 0, 0, 0, 10]
    manager.free(request)
    assert manager.pool.is_idle


def test_no_has_given_nothing_back() -> None:
    manager = make_manager(window(4), num_blocks=6)
    request = make_request("r", 60)
    start(manager, request, 12)
    before = tables(manager, request), free_ids(manager)
    # Two blocks are free and two more come back; five would be needed.
    assert manager.allocate_slots(request, 20) is None
    assert (tables(manager, request), free_ids(manager)) == before
    # With those that come back there is room, and without them there was none.
    compute(manager, request, 16)
    assert tables(manager, request) == ([0, 0, 3, 4, 5, 1, 2],)


def test_blocks_that_others_hold_do_not_come_back() -> None:
    manager = make_manager(window(4), num_blocks=6)
    first, second = make_request("a", 60), make_request("b", 60)
    start(manager, first, 8)
    assert start(manager, second, 0) == 8  # holds block 2, where its window lies
    assert tables(manager, second) == ([0, 2],)
    compute(manager, first, 4)
    assert tables(manager, first) == ([0, 2, 3],)
    # Block 2 is not read by the first any more, but the second has it: two are free.
    assert manager.allocate_slots(first, 16) is None
    compute(manager, first, 12)
    assert tables(manager, first)[0][:2] == [0, 0]
    assert manager.pool.blocks[2].ref_cnt == 1


def test_memory_is_bounded_by_the_window_and_one_step() -> None:
    rng = random.Random(3)
    for attention in (window(1), window(7), window(64), chunk(16), chunk(30)):
        manager = make_manager(attention, most_step_tokens=20)
        bound = manager.num_blocks_for(900)
        assert bound <= -(-(attention.num_tokens + 20) // SIZE) + 1
        request = make_request("r", 900)
        most = 0
        while request.num_computed_tokens < 900:
            count = min(rng.choice([1, 2, 20]), 900 - request.num_computed_tokens)
            compute(manager, request, count)
            most = max(most, len([i for i in tables(manager, request)[0] if i]))
        assert most <= bound
        manager.free(request)
        assert manager.pool.is_idle
    # A short request holds no more than it has tokens.
    assert make_manager(window(64), most_step_tokens=20).num_blocks_for(5) == 2


def test_a_hundred_tokens_take_seven_blocks_of_sixteen() -> None:
    manager = KVCacheManager(1024, 16, 1000)
    request = make_request("r", 100)
    assert manager.num_blocks_for(100) == 7
    start(manager, request, 100)
    assert manager.get_block_ids("r") == ([1, 2, 3, 4, 5, 6, 7],)
    assert manager.pool.num_free == 1023 - 7
    manager.free(request)
    assert manager.pool.num_free == 1023


def test_a_hybrid_hit_needs_the_window_but_not_what_lies_before_it() -> None:
    manager = make_manager(full(), window(6))
    owner = make_request("owner", 24)
    start(manager, owner, 24)
    assert tables(manager, owner) == ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12])
    manager.free(owner)
    pool = manager.pool

    def hit(num_tokens: int = 25) -> tuple[int, list[list[int]]]:
        hits, num_hit = manager.get_computed_blocks(make_request("other", num_tokens))
        return num_hit, [[block.block_id for block in blocks] for blocks in hits]

    # Position 24 reads from 19 on, which is in block 4.
    assert hit() == (24, [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 11, 12]])
    pool.uncache_blocks([pool.blocks[7], pool.blocks[8]])
    assert hit()[0] == 24
    # Without its last block a shorter hit is left, and without the one before it a gap of two.
    pool.uncache_blocks([pool.blocks[12]])
    assert hit() == (20, [[1, 2, 3, 4, 5], [0, 0, 0, 10, 11]])
    pool.uncache_blocks([pool.blocks[11]])
    assert hit() == (16, [[1, 2, 3, 4], [0, 0, 9, 10]])
    pool.uncache_blocks([pool.blocks[9]])
    assert hit() == (0, [[], []])
    # The rest of the full group's prefix is of no use alone.
    assert pool.has(owner.block_hashes[5] + b"\0\0")


def test_a_request_that_begins_with_a_hit_holds_its_window_only() -> None:
    manager = make_manager(full(), window(6))
    owner = make_request("owner", 24)
    start(manager, owner, 24)
    manager.free(owner)
    other = make_request("other", 40)
    assert start(manager, other, 3) == 24
    assert tables(manager, other) == ([1, 2, 3, 4, 5, 6, 13], [0, 0, 0, 0, 11, 12, 14])
    assert [manager.pool.blocks[i].ref_cnt for i in (7, 10, 11, 12)] == [0, 0, 1, 1]
    compute(manager, other, 13)
    manager.free(other)
    assert manager.pool.is_idle


def test_a_load_brings_what_the_window_needs() -> None:
    """Eight tokens are in the pool and 16 come from a tier: of the window only the end is wanted,
    in blocks that stand behind null blocks."""
    manager = make_manager(full(), window(6))
    owner = make_request("owner", 8)
    start(manager, owner, 8)
    request = make_request("r", 40)
    hits, num_hit = manager.get_computed_blocks(request)
    assert num_hit == 8
    added = manager.allocate_slots(
        request, 0, num_hit, hits, num_external_computed_tokens=16, delay_cache_blocks=True
    )
    assert added is not None
    assert [[block.block_id for block in blocks] for blocks in added] == [
        [5, 6, 7, 8],
        [0, 0, 9, 10],
    ]
    assert tables(manager, request) == ([1, 2, 5, 6, 7, 8], [0, 0, 0, 0, 9, 10])
    request.num_computed_tokens = 8
    assert manager.can_go_on(request, 24)
    assert not manager.can_go_on(request, 20)  # block 3 of the window did not come
    assert not manager.can_go_on(request, 8)
    request.num_computed_tokens = 24
    manager.cache_blocks(request, 24)
    assert manager.get_computed_blocks(make_request("other", 30))[1] == 24
    manager.free(request)
    manager.free(owner)
    assert manager.pool.is_idle


def test_digests_may_come_more_often_than_blocks() -> None:
    """Digests of two tokens and blocks of eight: the key of a block has the last of four."""
    hasher = make_block_hasher(b"r" * 32, 2)
    manager = KVCacheManager(50, 8, 1000, attention=(full(), window(9)), hash_block_size=2)

    def request(name: str, num_tokens: int) -> Request:
        return Request(name, list(range(num_tokens)), SamplingParams(), block_hasher=hasher)

    owner = request("owner", 30)
    assert len(owner.block_hashes) == 15
    start(manager, owner, 30)
    cached = [block for block in manager.pool.blocks if block.block_hash]
    assert {(block.block_hash or b"")[:32] for block in cached} == set(owner.block_hashes[3:12:4])
    assert manager.get_computed_blocks(request("other", 30))[1] == 24
    assert manager.get_computed_blocks(request("other", 24))[1] == 16
    assert len(manager.uncache_request(owner)) == 2 * 3
    assert manager.get_computed_blocks(request("other", 30))[1] == 0
    with pytest.raises(ValueError, match="blocks of 8 tokens cannot have keys of digests of 3"):
        KVCacheManager(50, 8, 1000, hash_block_size=3)


def is_hit(
    attention: LayerAttention, num_tokens: int, size: int, has: Callable[[int], bool]
) -> bool:
    """Whether every position that the token at `num_tokens` or a later one sees is there."""
    if attention == full():
        seen = range(num_tokens)
    elif attention.window:
        seen = range(max(0, num_tokens - attention.num_tokens + 1), num_tokens)
    else:
        start = num_tokens // attention.num_tokens * attention.num_tokens
        seen = range(start, num_tokens)
    return all(has(position // size) for position in seen)


def longest(
    groups: Sequence[LayerAttention], there: Sequence[set[int]], most: int, size: int
) -> int:
    """The longest hit in tokens, by trying all lengths."""
    for num_blocks in range(most, 0, -1):
        if all(
            is_hit(attention, num_blocks * size, size, blocks.__contains__)
            for attention, blocks in zip(groups, there, strict=True)
        ):
            return num_blocks
    return 0


def test_hits_are_those_of_a_search_through_all_lengths(seed: int, scale: str) -> None:
    rng = random.Random(seed)
    found = []
    for _ in range(2_000 if scale == "ci" else 50_000):
        size = rng.choice([1, 2, 3, 4])
        kinds = [full(), window(rng.randint(1, 20)), window(rng.randint(1, 9)),
                 chunk(rng.randint(1, 20)), chunk(size * rng.randint(1, 4))]  # fmt: skip
        groups = [rng.choice(kinds) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.2:  # groups that share blocks
            groups = [kind for kind in groups[:2] for _ in range(2)]
        num_blocks = rng.randint(1, 14)
        manager = KVCacheManager(1 + 14 * 4, size, 1000, attention=groups)
        digests = [bytes([i]) * 32 for i in range(num_blocks)]
        share = rng.choice([0.5, 0.8, 0.95])
        there = [{i for i in range(num_blocks) if rng.random() < share} for _ in groups]
        ids = [{}, {}, {}, {}]  # type: list[dict[int, int]]
        width = manager.pool.width
        there = [there[group // width * width] for group in range(len(groups))]
        for group, blocks in list(enumerate(there))[::width]:
            for index, block in zip(blocks, manager.pool.get_new_blocks(len(blocks)), strict=True):
                manager.pool.cache_full_blocks([digests[index]], [block], group, computed=True)
                for place in range(width):
                    ids[group + place][index] = block.block_id + place
        request = Request("r", list(range(num_blocks * size + 1)), SamplingParams())
        request.block_hashes = digests
        hits, num_hit = manager.get_computed_blocks(request)
        expected = longest(groups, there, num_blocks, size)
        assert num_hit == expected * size, (groups, there, size)
        found_ids = manager.page_ids(hits)
        for group, (attention, found_in) in enumerate(zip(groups, found_ids, strict=True)):
            assert len(found_in) == expected
            everything = set(range(expected))
            wanted = {
                i
                for i in everything
                if not is_hit(attention, num_hit, size, (everything - {i}).__contains__)
            }
            assert {i: page for i, page in enumerate(found_in) if page} == {
                i: ids[group][i] for i in wanted
            }
        found.append(expected)
    assert 0 < found.count(0) < len(found) / 2
