# SPDX-License-Identifier: Apache-2.0
"""Blocks that are offered as soon as they are computed: each once, and nothing before that."""

from __future__ import annotations

import random

import pytest

from stratakv.engine.cache.block_pool import BlockPool

from .test_block_pool import cached, digest, ids, key


@pytest.fixture
def pool() -> BlockPool:
    pool = BlockPool(9)
    pool.offer_all()
    return pool


def fresh(pool: BlockPool, count: int = 100) -> list[bytes]:
    return [block.key for block in pool.take_fresh(count)]


def test_the_tail_of_a_sequence_comes_before_its_head(pool: BlockPool) -> None:
    blocks = cached(pool, 1, 2, 3)
    assert pool.fresh
    assert [block.block_id for block in pool.take_fresh(100)] == ids(blocks)[::-1]
    assert not pool.fresh


def test_of_few_the_head_comes_first(pool: BlockPool) -> None:
    """A tail is no use without its head."""
    cached(pool, 1, 2, 3, 4, 5)
    assert fresh(pool, 2) == [key(2), key(1)]
    assert fresh(pool, 2) == [key(4), key(3)]
    assert fresh(pool, 2) == [key(5)]
    assert fresh(pool, 2) == []


def test_nothing_before_it_is_computed(pool: BlockPool) -> None:
    cached(pool, 1, 2, computed=False)
    assert not pool.fresh
    assert fresh(pool) == []
    pool.commit_step()
    assert fresh(pool) == [key(2), key(1)]


def test_a_block_is_given_once_here_or_as_a_cold_one(pool: BlockPool) -> None:
    one, two = cached(pool, 1), cached(pool, 2)
    pool.free_blocks(one)
    assert [block.key for block in pool.take_cold(5, 9)] == [key(1)]
    assert fresh(pool) == [key(2)]
    pool.free_blocks(two)
    assert pool.take_cold(5, 9) == []
    pool.commit_step()
    assert fresh(pool) == []


def test_evicted_blocks_are_not_given(pool: BlockPool) -> None:
    pool.free_blocks(cached(pool, 1, 2))
    held = pool.get_new_blocks(8)
    assert [block.key for block in pool.take_evicted()] == [key(1), key(2)]
    assert fresh(pool) == []
    pool.free_blocks(held)


def test_a_block_with_a_new_key_is_given_when_that_is_computed(pool: BlockPool) -> None:
    pool.free_blocks(cached(pool, 1, 2))
    pool.get_new_blocks(6)
    (again,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([digest(3)], [again])
    # It was computed as 1, and is being computed as 3; 2 is as it was.
    assert fresh(pool) == [key(2)]
    pool.commit_step()
    assert fresh(pool) == [key(3)]


def test_blocks_that_lost_their_keys_are_not_given(pool: BlockPool) -> None:
    blocks = cached(pool, 1, 2, 3)
    pool.uncache_blocks(blocks[1:2])
    assert fresh(pool) == [key(3), key(1)]
    pool.free_blocks(blocks)
    pool.reset_prefix_cache()
    assert fresh(pool) == []


def test_what_a_failed_step_should_have_computed_is_not_given(pool: BlockPool) -> None:
    cached(pool, 1)
    cached(pool, 2, 3, computed=False)
    pool.drop_uncomputed()
    pool.commit_step()
    assert fresh(pool) == [key(1)]


def test_loaded_blocks_are_not_given(pool: BlockPool) -> None:
    """Where they came from they need not go."""
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks([digest(1), digest(2)], blocks, computed=True)
    pool.commit_step()
    assert not pool.fresh
    assert fresh(pool) == []


def test_a_key_that_is_held_again_is_no_news(pool: BlockPool) -> None:
    blocks = cached(pool, 1, 2)
    assert len(fresh(pool)) == 2
    pool.free_blocks(blocks)
    pool.touch(blocks)
    pool.commit_step()
    assert fresh(pool) == []


def test_nobody_asks_and_nothing_grows() -> None:
    """As many are remembered as there are blocks; without `offer_all` none."""
    for wants in (True, False):
        pool = BlockPool(9)
        if wants:
            pool.offer_all()
        for number in range(100):
            pool.free_blocks(cached(pool, number % 250))
        assert len(pool.fresh) <= pool.num_blocks if wants else pool.num_fresh == 0
        assert bool(pool.fresh) is wants
        keys = fresh(pool)
        assert len(keys) == len(set(keys)) == (8 if wants else 0)


def test_random_lives_give_each_computed_key_at_most_once_while_it_stays(
    rng: random.Random,
) -> None:
    """A block that is given is computed, has this key, and was not given since it was cached."""
    for _ in range(50):
        pool = BlockPool(9)
        pool.offer_all()
        held: list[list[object]] = []
        given: dict[int, bytes] = {}
        for _ in range(200):
            act = rng.randrange(5)
            if act == 0 and pool.num_free >= 3:
                numbers = [rng.randrange(250) for _ in range(rng.randint(1, 3))]
                blocks = cached(pool, *numbers, computed=False)
                for block in blocks:
                    given.pop(block.block_id, None)
                held.append(list(blocks))
            elif act == 1 and held:
                pool.free_blocks(held.pop(rng.randrange(len(held))))  # type: ignore[arg-type]
            elif act == 2:
                pool.commit_step()
            elif act == 3 and rng.random() < 0.2:
                pool.drop_uncomputed()
            else:
                for block_id, found, _ in pool.take_fresh(rng.randint(1, 4)):
                    block = pool.blocks[block_id]
                    assert block.block_hash == found
                    assert block not in pool._uncomputed
                    assert given.get(block_id) != found
                    given[block_id] = found
