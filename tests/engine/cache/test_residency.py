# SPDX-License-Identifier: Apache-2.0
"""How long blocks stay in the pool: a real pool under a clock of the test."""

from __future__ import annotations

import pytest

from stratakv.engine.cache.block_pool import BlockPool
from stratakv.engine.cache.kv_block import KVCacheBlock
from stratakv.engine.cache.residency import MAX_SAMPLED_BLOCKS, Residency
from stratakv.tiers.base import Histogram

from ...clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> BlockPool:
    pool = BlockPool(4)
    pool.residency = Residency(pool.blocks[1:], clock)
    return pool


def count(histogram: Histogram) -> int:
    return sum(histogram.counts)


def cache(pool: BlockPool, blocks: list[KVCacheBlock], number: int) -> None:
    pool.cache_full_blocks([bytes([number + i]) * 32 for i in range(len(blocks))], blocks)
    pool.commit_step()


def test_a_block_that_is_found_and_evicted(pool: BlockPool, clock: Clock) -> None:
    residency = pool.residency
    blocks = pool.get_new_blocks(1)
    cache(pool, blocks, 1)
    pool.free_blocks(blocks)
    clock.now += 3.0
    pool.touch(blocks)
    assert (count(residency.reuse_gap), residency.reuse_gap.total) == (1, 3.0)
    clock.now += 4.0
    pool.touch(blocks)
    assert residency.reuse_gap.total == 7.0
    pool.free_blocks(blocks)
    pool.free_blocks(blocks)
    clock.now += 5.0
    pool.get_new_blocks(3)
    assert (count(residency.lifetime), residency.lifetime.total) == (1, 12.0)
    assert (count(residency.idle_before_evict), residency.idle_before_evict.total) == (1, 5.0)


def test_only_blocks_with_a_key_are_evicted(pool: BlockPool, clock: Clock) -> None:
    for _ in range(3):
        pool.free_blocks(pool.get_new_blocks(3))
        clock.now += 1.0
    pool.touch([pool.null_block])
    assert count(pool.residency.lifetime) == count(pool.residency.reuse_gap) == 0


def test_a_block_lives_again_after_its_eviction(pool: BlockPool, clock: Clock) -> None:
    for life in range(2):
        blocks = pool.get_new_blocks(3)
        cache(pool, blocks, 10 * life)
        pool.free_blocks(blocks)
        clock.now += 2.0
    pool.get_new_blocks(3)
    assert (count(pool.residency.lifetime), pool.residency.lifetime.total) == (6, 12.0)


def test_of_a_large_pool_a_sample_is_followed(clock: Clock) -> None:
    pool = BlockPool(3 * MAX_SAMPLED_BLOCKS)
    pool.residency = Residency(pool.blocks[1:], clock)
    blocks = pool.get_new_blocks(pool.num_free)
    pool.touch(blocks)
    assert MAX_SAMPLED_BLOCKS // 2 <= count(pool.residency.reuse_gap) <= MAX_SAMPLED_BLOCKS


def test_the_answer_is_plain() -> None:
    stats = BlockPool(4).residency.stats()
    assert set(stats) == {"lifetime", "idle_before_evict", "reuse_gap"}
    for histogram in stats.values():
        assert len(histogram["counts"]) == len(histogram["bounds"]) + 1
        assert histogram["total"] == 0
