# SPDX-License-Identifier: Apache-2.0
"""The KV cache manager: worked examples with block ids, and all or nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stratakv.connector.messages import EvictedBlock
from stratakv.engine.cache.block_hash import make_block_hasher
from stratakv.engine.cache.kv_cache_manager import KVCacheManager
from stratakv.engine.models.layer_attention import LayerAttention, full, window
from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams

SIZE = 4
HASHER = make_block_hasher(b"r" * 32, SIZE)


def make_request(name: str, tokens: Sequence[int] | str, skip: bool = False) -> Request:
    ids = [ord(c) for c in tokens] if isinstance(tokens, str) else tokens
    return Request(name, ids, SamplingParams(), block_hasher=HASHER, skip_reading_prefix_cache=skip)


def make_manager(num_blocks: int = 11, **options: object) -> KVCacheManager:
    return KVCacheManager(num_blocks, SIZE, 1000, **options)  # type: ignore[arg-type]


def start(manager: KVCacheManager, request: Request, num_tokens: int | None = None) -> int:
    """Let a waiting request in with as many tokens; its hit tokens."""
    hits, num_hit = manager.get_computed_blocks(request)
    count = request.num_tokens - num_hit if num_tokens is None else num_tokens
    assert manager.allocate_slots(request, count, num_hit, hits) is not None
    request.num_computed_tokens = num_hit + count
    return num_hit


def decode(manager: KVCacheManager, request: Request, token: str) -> None:
    """The token sampled last is computed in the next step."""
    request.append_output_token(ord(token))
    assert manager.allocate_slots(request, 1) is not None
    request.num_computed_tokens += 1


def free_ids(manager: KVCacheManager) -> list[int]:
    return [block.block_id for block in manager.pool.free_queue]


def table(manager: KVCacheManager, request: Request) -> list[int]:
    return manager.get_block_ids(request.request_id)[0]


def refs(manager: KVCacheManager, *block_ids: int) -> list[int]:
    return [manager.pool.blocks[block_id].ref_cnt for block_id in block_ids]


def test_three_requests_share_reuse_and_evict() -> None:
    """Ten usable blocks of four tokens. The null block has id 0, so they are 1 to 10."""
    manager = make_manager(11)
    req0 = make_request("req0", "ABCDEFGHIJKLMNO")
    assert start(manager, req0) == 0
    assert table(manager, req0) == [1, 2, 3, 4]
    pool = manager.pool
    assert [pool.blocks[i].block_hash is not None for i in (1, 2, 3, 4)] == [True] * 3 + [False]

    # It decodes on: block 4 becomes full and is cached, block 5 is added at the end.
    decode(manager, req0, "P")
    assert table(manager, req0) == [1, 2, 3, 4]
    assert pool.blocks[4].block_hash is not None
    decode(manager, req0, "Q")
    assert table(manager, req0) == [1, 2, 3, 4, 5]
    pool.commit_step()

    # IJkl shares two tokens with IJKL, which is no block: two hits, two new blocks.
    req1 = make_request("req1", "ABCDEFGHIJklmn")
    assert start(manager, req1) == 8
    assert table(manager, req1) == [1, 2, 6, 7]
    assert refs(manager, 1, 2, 3, 6) == [2, 2, 1, 1]
    pool.commit_step()

    # req0 ends: what it had alone goes to the end of the queue, tail first.
    manager.free(req0)
    assert free_ids(manager) == [8, 9, 10, 5, 4, 3]
    assert refs(manager, 1, 2, 3) == [1, 1, 0]
    manager.free(req1)
    assert free_ids(manager) == [8, 9, 10, 5, 4, 3, 7, 6, 2, 1]

    # Three hits leave the queue before the new blocks are taken; block 4 loses its key.
    key4 = pool.blocks[4].block_hash
    assert key4 is not None
    req2 = make_request("req2", "ABCDEFGHIJKL" + "0123456789abcdef" + "g")
    assert start(manager, req2) == 12
    assert table(manager, req2) == [1, 2, 3, 8, 9, 10, 5, 4]
    assert free_ids(manager) == [7, 6]
    assert pool.take_evicted() == [EvictedBlock(4, key4)]
    # IJkl, of req1, can still be found.
    assert pool.get_cached_prefix(req1.block_hashes[2:3]) == ([pool.blocks[6]],)


def test_a_partial_block_is_no_prefix() -> None:
    """ABCD|EFGH is there; ABCD|EFG can only use the first block, and then computes its own."""
    manager = make_manager()
    first = make_request("first", "ABCDEFGH")
    start(manager, first)
    manager.pool.commit_step()
    second = make_request("second", "ABCDEFG")
    assert start(manager, second) == 4
    assert table(manager, second) == [1, 3]
    decode(manager, second, "H")
    # The block is full now and equal to block 2, but a table never changes what it holds.
    assert table(manager, second) == [1, 3]
    assert manager.pool.blocks[3].block_hash == manager.pool.blocks[2].block_hash


def test_equal_tokens_after_another_beginning_are_no_hit() -> None:
    manager = make_manager()
    start(manager, make_request("first", "ABCDEFGHI"))
    assert start(manager, make_request("second", "DCABEFGHI")) == 0


def test_chunks_do_not_look_for_hits_again() -> None:
    """Six of ten tokens in the first step, four in the second: ABCD is shared, EFGH computed."""
    manager = make_manager()
    start(manager, make_request("owner", "ABCDEFGHX"))
    request = make_request("chunked", "ABCDEFGHIJ")
    hits, num_hit = manager.get_computed_blocks(request)
    assert num_hit == 8
    hits = (hits[0][:1],)  # EFGH has become known only after the first look
    assert manager.allocate_slots(request, 2, 4, hits) is not None
    request.num_computed_tokens = 6
    assert table(manager, request) == [1, 4]
    assert manager.allocate_slots(request, 4) is not None
    assert table(manager, request) == [1, 4, 5]


def test_a_hit_of_three_blocks_of_five() -> None:
    manager = KVCacheManager(20, 16, 1000)
    hasher = make_block_hasher(b"r" * 32, 16)
    owner = Request("owner", list(range(48)), SamplingParams(), block_hasher=hasher)
    start(manager, owner)
    manager.free(owner)
    prompt = [*range(48), *range(500, 532)]  # 80 tokens, five blocks
    hits, num_hit = manager.get_computed_blocks(
        Request("r", prompt, SamplingParams(), block_hasher=hasher)
    )
    assert num_hit == 48
    assert [block.block_id for block in hits[0]] == [1, 2, 3]


def test_a_full_hit_leaves_one_token_to_compute() -> None:
    manager = make_manager()
    request = make_request("first", "ABCDEFGH")
    start(manager, request)
    manager.free(request)
    # Every block is known, but the last one is computed again for its logits.
    again = make_request("again", "ABCDEFGH")
    assert start(manager, again) == 4
    assert table(manager, again) == [1, 3]
    longer = make_request("longer", "ABCDEFGHI")
    assert manager.get_computed_blocks(longer)[1] == 8


def test_skipping_and_disabling_the_cache() -> None:
    manager = make_manager()
    start(manager, make_request("first", "ABCDEFGH"))
    assert manager.get_computed_blocks(make_request("skip", "ABCDEFGHI", skip=True))[1] == 0
    off = make_manager(enable_caching=False)
    start(off, make_request("first", "ABCDEFGH"))
    assert off.get_computed_blocks(make_request("second", "ABCDEFGHI"))[1] == 0


def test_a_request_without_digests_gets_blocks_without_keys() -> None:
    manager = make_manager()
    start(manager, Request("r", list(range(9)), SamplingParams()))
    assert manager.get_block_ids("r") == ([1, 2, 3],)
    assert all(block.block_hash is None for block in manager.pool.blocks)


def test_no_means_nothing_has_changed() -> None:
    manager = make_manager(6)
    owner = make_request("owner", "ABCDEFGH")
    start(manager, owner)
    manager.free(owner)
    before = free_ids(manager)
    assert before == [3, 4, 5, 2, 1]
    # Two hits and three new blocks are five; with a sixth there is no room. The hits are free, so
    # counting new blocks alone (four of five) would say yes.
    request = make_request("r", "ABCDEFGH" + "0123456789abc")
    hits, num_hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 13, num_hit, hits) is None
    assert free_ids(manager) == before
    assert table(manager, request) == []
    assert refs(manager, 1, 2) == [0, 0]
    assert manager.allocate_slots(request, 12, num_hit, hits) is not None
    assert table(manager, request) == [1, 2, 3, 4, 5]


def test_blocks_can_be_kept_free() -> None:
    manager = KVCacheManager(200, SIZE, 1000, watermark=0.01)
    assert manager.watermark_blocks == 2
    request = make_request("r", list(range(198 * SIZE)))
    assert manager.allocate_slots(request, 198 * SIZE, keep_free_blocks=2) is None
    assert manager.allocate_slots(request, 197 * SIZE, keep_free_blocks=2) is not None
    request.num_computed_tokens = 197 * SIZE
    # What needs no block is never refused.
    assert manager.allocate_slots(request, 0, keep_free_blocks=3) is not None


def test_tokens_that_are_not_known_yet_get_blocks_but_no_keys() -> None:
    manager = make_manager()
    request = make_request("r", "ABCDEF")
    added = manager.allocate_slots(request, 13)
    assert added is not None
    assert table(manager, request) == [1, 2, 3, 4]
    assert [manager.pool.blocks[i].block_hash is not None for i in (1, 2, 3)] == [
        True,
        False,
        False,
    ]


def test_blocks_stop_at_the_end_of_the_context() -> None:
    manager = KVCacheManager(11, SIZE, 8)
    request = make_request("r", "ABCDEF")
    assert manager.allocate_slots(request, 13) is not None
    assert table(manager, request) == [1, 2]


def test_a_load_delays_the_keys_and_keeps_what_did_not_come() -> None:
    manager = make_manager()
    start(manager, make_request("owner", "ABCD"))
    manager.pool.commit_step()
    request = make_request("r", "ABCD" + "EFGHIJKLMNOP" + "Q")
    hits, num_hit = manager.get_computed_blocks(request)
    added = manager.allocate_slots(
        request,
        0,
        num_hit,
        hits,
        num_external_computed_tokens=12,
        delay_cache_blocks=True,
    )
    assert added is not None
    assert [block.block_id for block in added[0]] == [2, 3, 4]
    assert manager.get_computed_blocks(make_request("other", "ABCDEFGHIJ"))[1] == 4
    # Two of the three blocks came.
    request.num_computed_tokens = 12
    manager.cache_blocks(request, 12)
    assert manager.pool.all_computed(added[0])
    assert manager.get_computed_blocks(make_request("other", "ABCDEFGHIJKLMN"))[1] == 12
    assert manager.pool.blocks[4].block_hash is None
    # It goes on with the block it has.
    assert manager.allocate_slots(request, 5) is not None
    assert table(manager, request) == [1, 2, 3, 4, 5]
    assert manager.pool.blocks[4].block_hash is not None


def test_blocks_without_keys_are_never_found_again() -> None:
    manager = make_manager()
    good = make_request("good", "ABCDEFGH")
    start(manager, good)
    bad = make_request("bad", "ABCDEFGHIJKLM")
    start(manager, bad)
    manager.pool.commit_step()
    manager.uncache_request(bad)
    manager.free(bad)
    assert manager.get_computed_blocks(make_request("r", "ABCDEFGHIJKLM"))[1] == 0
    assert table(manager, good) == [1, 2]
    manager.free(good)
    assert manager.pool.is_idle
    assert all(block.block_hash is None for block in manager.pool.blocks)


def test_groups_share_one_pool_and_a_hit_needs_all_of_them() -> None:
    manager = make_manager(20, num_groups=2)
    request = make_request("r", "ABCDEFGHI")
    start(manager, request)
    # Groups that attend alike share blocks, each of which has a page in both.
    assert manager.get_block_ids("r") == ([1, 3, 5], [2, 4, 6])
    assert manager.num_blocks_for(9) == 6
    assert (manager.pool.num_held, manager.pool.num_free) == (6, 18 - 6)
    manager.pool.uncache_blocks([manager.pool.blocks[2]])
    hits, num_hit = manager.get_computed_blocks(make_request("other", "ABCDEFGHI"))
    assert num_hit == 4
    assert manager.page_ids(hits) == ([1], [2])
    manager.free(request)
    assert free_ids(manager)[-3:] == [5, 3, 1]


def test_groups_that_attend_otherwise_have_blocks_of_their_own() -> None:
    manager = make_manager(20, attention=(full(), window(1000)))
    request = make_request("r", "ABCDEFGHI")
    start(manager, request)
    assert manager.get_block_ids("r") == ([1, 2, 3], [4, 5, 6])
    manager.pool.uncache_blocks([manager.pool.blocks[5]])
    hits, num_hit = manager.get_computed_blocks(make_request("other", "ABCDEFGHI"))
    assert num_hit == 4
    assert manager.page_ids(hits) == ([1], [4])
    manager.free(request)
    assert free_ids(manager)[-6:] == [3, 6, 2, 5, 1, 4]


@pytest.mark.parametrize("attention", [(full(), full()), (full(), window(1000))])
def test_reusing_some_blocks_of_a_prefix_costs_its_hit_no_more_than_these(
    attention: tuple[LayerAttention, ...],
) -> None:
    """The tails of all groups go before the head of any."""
    manager = make_manager(1 + 10, attention=attention)
    request = make_request("r", "ABCDEFGHIJKLMNOPQ")
    start(manager, request)
    manager.pool.commit_step()
    manager.free(request)
    again = make_request("again", "ABCDEFGHIJKLMNOPQ")
    hits = []
    for _ in range(5):
        hits.append(manager.get_computed_blocks(again)[1])
        manager.pool.get_new_blocks(2 // manager.pool.width)
    assert hits == [16, 16, 12, 8, 4], "the first two blocks had no keys"


def test_hits_go_only_before_an_empty_table() -> None:
    manager = make_manager()
    request = make_request("r", "ABCDEFGHI")
    start(manager, request)
    hits = ([manager.pool.blocks[1]],)
    with pytest.raises(RuntimeError, match="request r has blocks"):
        manager.allocate_slots(request, 4, 4, hits)


@pytest.mark.parametrize("attention", [(full(),), (full(), full()), (full(), window(9))])
def test_what_a_revoked_step_cached_is_cached_again(attention: tuple[LayerAttention, ...]) -> None:
    manager = make_manager(60, attention=attention)
    request = make_request("r", "ABCDEFGHIJKLMNOPQ")
    start(manager, request, 4)
    manager.pool.commit_step()
    manager.pool.begin_step(1)
    before = manager.pool.num_held, manager.get_block_ids("r")
    added = manager.allocate_slots(request, 13)
    assert added is not None
    manager.revoke(request, 4, manager.page_ids(added))
    assert (manager.pool.num_held, manager.get_block_ids("r")) == before
    other = make_request("other", "ABCDEFGHIJKLMNOPQ")
    assert manager.get_computed_blocks(other)[1] == 4
    assert manager.allocate_slots(request, 13) is not None
    assert manager.get_computed_blocks(other)[1] == 16


@pytest.mark.parametrize("attention", [(full(),), (full(), full()), (full(), window(9))])
def test_hits_keep_their_keys_when_the_step_that_found_them_fails(
    attention: tuple[LayerAttention, ...],
) -> None:
    manager = make_manager(60, attention=attention)
    owner = make_request("owner", "ABCDEFGHIJKLMNOPQ")
    start(manager, owner)
    manager.pool.commit_step()
    manager.free(owner)
    manager.pool.begin_step(1)
    assert start(manager, make_request("r", "ABCDEFGHIJKLMNOPQRSTUVWX")) == 16
    manager.pool.drop_uncomputed(1)
    assert manager.get_computed_blocks(make_request("other", "ABCDEFGHIJKLMNOPQRS"))[1] == 16


def test_a_fork_leaves_a_tail_that_has_a_key_as_it_is() -> None:
    """The parent was handed over after one token, which caches the prompt's partly filled end. A
    fork that filled that block would change the bytes of a cached key."""
    manager = KVCacheManager(40, 4, 100)
    pool = manager.pool
    parent, child = (
        Request(name, range(6), SamplingParams(max_tokens=9), block_hasher=HASHER) for name in "pc"
    )
    pool.begin_step(1)
    assert manager.allocate_slots(parent, 6) is not None
    manager.fork("p", child, 6)
    parent.num_computed_tokens = child.num_computed_tokens = 6
    pool.commit_step(1)
    parent.append_output_token(1)
    manager.cache_tail(parent)
    manager.free(parent)
    tail = parent.prompt_tail_hash() + bytes(2)
    cached = pool.cached_block(tail)
    assert manager.tables("c")[0][1] is cached
    for step, token in enumerate((3, 4, 5), start=2):
        child.append_output_token(token)
        pool.begin_step(step)
        assert manager.allocate_slots(child, 1) is not None
        child.num_computed_tokens += 1
        pool.commit_step(step)
    assert manager.tables("c")[0][1] is not cached
    assert pool.cached_block(tail) is cached and cached.block_hash == tail
