# SPDX-License-Identifier: Apache-2.0
"""Blocks near the eviction end: offered once, in time, and only where there are enough of them."""

from __future__ import annotations

import random

from stratakv.engine.cache.block_pool import BlockPool

from .test_block_pool import cached, digest, key

WITHIN = 4


def cold(pool: BlockPool, count: int = 100, least: int = 1) -> list[bytes]:
    return [block.key for block in pool.take_cold(count, WITHIN, least)]


def test_they_come_in_the_order_of_reuse_and_once() -> None:
    pool = BlockPool(9)
    pool.free_blocks(cached(pool, *range(1, 9)))
    assert cold(pool, 3) == [key(1), key(2), key(3)]
    assert cold(pool) == [key(4)]
    assert cold(pool) == []


def test_few_are_kept_until_there_are_enough() -> None:
    pool = BlockPool(9)
    pool.free_blocks(cached(pool, *range(1, 9)))
    assert len(cold(pool)) == WITHIN
    pool.get_new_blocks(1)
    assert cold(pool, least=2) == []
    pool.get_new_blocks(1)
    assert cold(pool, least=2) == [key(5), key(6)]
    pool.get_new_blocks(1)
    assert cold(pool, least=2) == [] and cold(pool, least=1) == [key(7)], "none was forgotten"


def test_few_go_with_one_that_was_evicted_before_it_was_given() -> None:
    pool = BlockPool(9)
    pool.free_blocks(cached(pool, *range(1, 9)))
    assert cold(pool, least=5) == []
    pool.get_new_blocks(1)
    assert cold(pool, least=5) == [key(2), key(3), key(4), key(5)]
    pool.get_new_blocks(1)
    assert cold(pool, least=5) == [], "that one had been given"
    pool.get_new_blocks(4)
    assert cold(pool, least=5) == [key(7), key(8)]


def test_one_that_is_freed_into_a_short_queue_is_seen() -> None:
    pool = BlockPool(9)
    blocks = cached(pool, *range(1, 9))
    assert cold(pool) == []
    pool.free_blocks(blocks[:3])
    assert cold(pool) == [key(1), key(2), key(3)]
    pool.free_blocks(blocks[3:])
    assert cold(pool) == [key(4)]


def test_one_that_comes_nearer_since_another_was_taken_back_is_seen() -> None:
    pool = BlockPool(9)
    blocks = cached(pool, *range(1, 9))
    pool.free_blocks(blocks)
    assert len(cold(pool)) == WITHIN
    pool.touch(blocks[1:3])
    assert cold(pool) == [key(5), key(6)]


def test_one_that_was_not_computed_yet_is_seen_later() -> None:
    pool = BlockPool(9)
    pool.free_blocks(cached(pool, 1, 2, 3, computed=False))
    pool.get_new_blocks(5)
    assert cold(pool) == []
    pool.commit_step()
    assert cold(pool) == [key(1), key(2), key(3)]


def test_random_lives_miss_none_and_give_none_twice(seed: int) -> None:
    """Against a look at the whole queue each time."""
    rng = random.Random(seed)
    num_given = 0
    for _ in range(200):
        pool, held, numbers = BlockPool(rng.randint(3, 12)), [], iter(range(250))
        given: set[tuple[int, bytes]] = set()
        for _ in range(40):
            action = rng.randrange(5)
            if action == 0 and pool.num_free:
                blocks = pool.get_new_blocks(rng.randint(1, min(3, pool.num_free)))
                if rng.random() < 0.8:
                    pool.cache_full_blocks([digest(next(numbers)) for _ in blocks], blocks)
                held.append(blocks)
            elif action == 1 and held:
                pool.free_blocks(held.pop(rng.randrange(len(held))))
            elif action == 2:
                pool.commit_step()
            elif action == 3 and (known := pool.resident()):
                blocks = [pool.blocks[rng.choice(known).block_id]]
                pool.touch(blocks)
                held.append(blocks)
            elif action == 4 and rng.random() < 0.2:
                pool.drop_uncomputed()
            if rng.random() < 0.5:
                continue
            expected = [
                (block.block_id, block.block_hash)
                for block in list(pool.free_queue)[:WITHIN]
                if block.block_hash
                and block not in pool._uncomputed
                and (block.block_id, block.block_hash) not in given
            ]
            count, least = rng.randint(1, 5), rng.randint(1, 3)
            if len(expected[:count]) < (1 if pool._cold.was_late else least):
                expected = []
            found = [block[:2] for block in pool.take_cold(count, WITHIN, least)]
            assert found == expected[:count]
            given.update(found)
            num_given += len(found)
    assert num_given > 200
