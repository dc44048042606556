# SPDX-License-Identifier: Apache-2.0
"""The block pool: keys, sharing, eviction, and when a key may be trusted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stratakv.connector.messages import EvictedBlock
from stratakv.engine.cache.block_pool import BlockPool
from stratakv.engine.cache.kv_block import KVCacheBlock
from stratakv.engine.observer import Observer


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def key(number: int, group: int = 0) -> bytes:
    return digest(number) + bytes([group, 0])


def ids(blocks: object) -> list[int]:
    return [block.block_id for block in blocks]  # type: ignore[attr-defined]


def found(
    pool: BlockPool, digest: bytes, group_ids: tuple[int, ...] = (0,)
) -> list[KVCacheBlock] | None:
    """A block of this digest for each group, or None where one group has none."""
    prefix = pool.get_cached_prefix((digest,), group_ids)
    return [blocks[0] for blocks in prefix] if prefix[0] else None


def cached(pool: BlockPool, *numbers: int, computed: bool = True) -> list[KVCacheBlock]:
    """Held blocks with the keys of `numbers`."""
    blocks = pool.get_new_blocks(len(numbers))
    pool.cache_full_blocks([digest(n) for n in numbers], blocks)
    if computed:
        pool.commit_step()
    return blocks


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert pool.null_block.block_id == 0
    assert pool.null_block.is_null
    assert ids(pool.get_new_blocks(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.usage == 1.0
    with pytest.raises(RuntimeError, match="1 free blocks were asked for, 0 are there"):
        pool.get_new_blocks(1)
    pool.free_blocks([pool.null_block])
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block])
    assert pool.num_free == 0
    pool.cache_full_blocks([digest(1)], [pool.null_block])
    assert found(pool, digest(1)) is None
    with pytest.raises(ValueError, match="at least one more, not 1 in all"):
        BlockPool(1)


def test_the_key_is_digest_and_group() -> None:
    pool = BlockPool(5)
    (block,) = cached(pool, 7)
    assert block.block_hash == key(7)
    other = pool.get_new_blocks(1)
    pool.cache_full_blocks([digest(7)], other, group_id=258)
    assert other[0].block_hash == digest(7) + b"\x02\x01"
    assert found(pool, digest(7)) == [block]
    assert found(pool, digest(7), (258, 0)) == [other[0], block]
    assert found(pool, digest(7), (0, 1)) is None


def test_a_prefix_is_as_long_as_its_shortest_group() -> None:
    pool = BlockPool(9)
    cached(pool, 1, 2, 3)
    pool.cache_full_blocks([digest(1), digest(3)], pool.get_new_blocks(2), group_id=1)
    wanted = [digest(n) for n in (1, 2, 3, 4)]
    assert [ids(found) for found in pool.get_cached_prefix(wanted)] == [[1, 2, 3]]
    assert [ids(found) for found in pool.get_cached_prefix(wanted, (0, 1))] == [[1], [4]]


def test_a_touched_block_leaves_the_queue_and_a_shared_one_stays_held() -> None:
    pool = BlockPool(5)
    blocks = cached(pool, 1, 2)
    pool.free_blocks(reversed(blocks))
    assert ids(pool.free_queue) == [3, 4, 2, 1]
    pool.touch(blocks[:1])
    pool.touch(blocks[:1])
    assert blocks[0].ref_cnt == 2
    assert ids(pool.free_queue) == [3, 4, 2]
    pool.free_blocks(blocks[:1])
    assert ids(pool.free_queue) == [3, 4, 2]
    pool.free_blocks(blocks[:1])
    assert ids(pool.free_queue) == [3, 4, 2, 1]
    with pytest.raises(RuntimeError, match="block 1 was freed more often than held"):
        pool.free_blocks(blocks[:1])


def test_reuse_evicts_the_least_recently_freed_key_first() -> None:
    """Blocks 1, 2 and 5 are held; 3 and 6 are free with a key, 4 and 7 without."""
    pool = BlockPool(8)
    blocks = pool.get_new_blocks(7)
    pool.cache_full_blocks([digest(3)], [blocks[2]])
    pool.cache_full_blocks([digest(6)], [blocks[5]])
    pool.commit_step()
    pool.free_blocks([blocks[2], blocks[3], blocks[5], blocks[6]])
    assert ids(pool.free_queue) == [3, 4, 6, 7]
    assert ids(pool.get_new_blocks(2)) == [3, 4]
    assert found(pool, digest(3)) is None
    assert found(pool, digest(6)) == [blocks[5]]
    assert blocks[2].block_hash is None
    assert pool.take_evicted() == [EvictedBlock(3, key(3))]
    assert pool.take_evicted() == []
    assert pool.num_evicted == 1


def test_several_blocks_may_have_one_key() -> None:
    pool = BlockPool(5)
    copies = [cached(pool, 9)[0] for _ in range(3)]
    assert found(pool, digest(9)) == [copies[0]]
    pool.free_blocks(copies)
    assert ids(pool.get_new_blocks(2)) == [4, 1]
    assert found(pool, digest(9)) == [copies[1]]
    pool.uncache_blocks([copies[1]])
    assert found(pool, digest(9)) == [copies[2]]
    pool.uncache_blocks([copies[2]])
    assert found(pool, digest(9)) is None
    assert pool.take_evicted() == [EvictedBlock(1, key(9))]


def test_a_key_is_taken_from_every_block_that_has_it() -> None:
    pool = BlockPool(6)
    blocks = [cached(pool, 9)[0] for _ in range(3)]
    pool.uncache_digests([digest(9), digest(8)])
    assert pool.num_cached == 0
    assert [block.block_hash for block in blocks] == [None] * 3


def test_an_uncomputed_block_is_hit_but_never_evicted_to_a_tier() -> None:
    pool = BlockPool(3)
    blocks = cached(pool, 1, 2, computed=False)
    assert found(pool, digest(1)) == [blocks[0]]
    assert not pool.all_computed(blocks)
    pool.free_blocks(blocks)
    pool.get_new_blocks(2)
    assert pool.take_evicted() == []
    assert found(pool, digest(1)) is None
    # The same blocks under new keys are judged anew.
    pool.cache_full_blocks([digest(3)], blocks[:1])
    pool.commit_step()
    assert pool.all_computed(blocks)


def test_loaded_blocks_are_computed_at_once() -> None:
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks([digest(1)], blocks, computed=True)
    assert pool.all_computed(blocks)
    pool.drop_uncomputed()
    assert found(pool, digest(1)) == blocks


def test_a_failed_step_uncaches_its_blocks_and_no_others() -> None:
    pool = BlockPool(6)
    old = cached(pool, 1)
    new = cached(pool, 2, 3, computed=False)
    pool.free_blocks([*old, new[0]])
    pool.drop_uncomputed()
    assert found(pool, digest(1)) == old
    assert found(pool, digest(2)) is None
    assert found(pool, digest(3)) is None
    # What is worth nothing is reused before what never held anything.
    assert ids(pool.free_queue) == [2, 4, 5, 1]
    assert pool.all_computed(new)


def test_the_cache_is_reset_only_when_nobody_holds_a_block() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, 1, 2)
    assert not pool.reset_prefix_cache()
    assert found(pool, digest(1)) == blocks[:1]
    pool.free_blocks(blocks)
    assert pool.is_idle
    assert pool.reset_prefix_cache()
    assert found(pool, digest(1)) is None
    pool.get_new_blocks(3)
    assert pool.take_evicted() == []


def test_resident_blocks_are_listed_as_they_would_be_evicted() -> None:
    pool = BlockPool(7)
    blocks = cached(pool, 1, 2, 3)
    pool.free_blocks([blocks[2], blocks[0]])
    cached(pool, 4, computed=False)
    assert pool.resident() == [(3, key(3), 1), (1, key(1), 1), (2, key(2), 1)]


def test_without_caching_nothing_gets_a_key() -> None:
    pool = BlockPool(4, enable_caching=False)
    cached(pool, 1)
    assert found(pool, digest(1)) is None


def test_an_observer_hears_once_of_a_key_that_two_blocks_lose() -> None:
    class Listener(Observer):
        def unnamed(self, keys: Sequence[bytes]) -> None:
            heard.append(list(keys))

    heard: list[list[bytes]] = []
    pool = BlockPool(5)
    pool.observer = Listener()
    one, other = cached(pool, 1), cached(pool, 1)
    pool.uncache_blocks(one)
    assert heard == []
    again = cached(pool, 1)
    pool.uncache_blocks([*other, *again])
    assert heard == [[key(1)]]
