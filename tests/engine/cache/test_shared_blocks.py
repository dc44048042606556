# SPDX-License-Identifier: Apache-2.0
"""Blocks with a page in each of two groups: what others are told of them is told of pages."""

from __future__ import annotations

import pytest

from stratakv.connector.messages import EvictedBlock
from stratakv.connector.page_keys import block_keys, page_keys, pages_of
from stratakv.engine.cache.block_pool import BlockPool
from stratakv.engine.cache.group_spec import pages_per_block
from stratakv.engine.cache.kv_block import page_ids
from stratakv.engine.cache.kv_cache_manager import KVCacheManager
from stratakv.engine.models.layer_attention import LayerAttention, chunk, full, window
from stratakv.engine.observer import Observer
from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def key(number: int, group: int = 0) -> bytes:
    return digest(number) + bytes([group, 0])


@pytest.mark.parametrize(
    ("attention", "width"),
    [
        ([full()], 1),
        ([full(), full()], 2),
        ([full()] * 3, 3),
        ([full(), window(8)], 1),
        ([window(8), window(8)], 2),
        ([window(8), window(9)], 1),
        ([full(), full(), window(8), window(8), window(8), window(8)], 2),
        ([full(), full(), full(), window(8), window(8)], 1),
        ([full(), window(8), full(), window(8)], 1),
        ([full(), full(), chunk(8), chunk(8)], 2),
    ],
)
def test_groups_that_follow_each_other_and_attend_alike_share_blocks(
    attention: list[LayerAttention], width: int
) -> None:
    assert pages_per_block(attention) == width


def test_pages_have_the_next_ids_and_the_next_groups() -> None:
    assert page_ids([0, 7, 9], 1) == [0, 8, 10]
    assert page_keys([key(1, 2)], 2) == [key(1, 2), key(1, 3)]
    assert block_keys([key(1, 3), key(1, 2), key(2, 1)], 2) == [key(1, 2), key(2, 0)]
    blocks = [EvictedBlock(7, key(1, 2), 2), EvictedBlock(3, key(2, 255))]
    assert pages_of(blocks) == [(7, key(1, 2), 1), (8, key(1, 3), 1), (3, key(2, 255), 1)]
    assert pages_of([EvictedBlock(1, key(1, 255), 2)])[1].key == digest(1) + b"\0\1"


def test_a_block_is_held_cached_and_evicted_as_one_and_counted_in_pages() -> None:
    pool = BlockPool(8, width=2)
    assert (pool.num_blocks, pool.num_usable, pool.num_free) == (8, 6, 6)
    assert [block.block_id for block in pool.blocks] == [0, 1, 3, 5]
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks([digest(1), digest(2)], blocks)
    assert (pool.num_held, pool.num_free, pool.num_cached) == (4, 2, 4)
    assert pool.usage == 4 / 6
    assert sorted(pool.list_keys()) == [key(n, g) for n in (1, 2) for g in (0, 1)]
    pool.pin(blocks[:1])
    assert pool.num_reclaimable == 2
    pool.unpin(blocks[:1])
    pool.commit_step()
    pool.free_blocks(blocks[::-1])
    assert pool.is_idle
    assert [block[:2] for block in pages_of(pool.resident())] == [
        (3, key(2)), (4, key(2, 1)), (1, key(1)), (2, key(1, 1)),
    ]  # fmt: skip
    pool.get_new_blocks(2)
    assert pool.take_evicted() == [EvictedBlock(3, key(2), 2)]
    assert pool.num_evicted == 2
    with pytest.raises(ValueError, match="at least 2 more, not 2 in all"):
        BlockPool(2, width=2)


def test_blocks_are_stored_whole() -> None:
    pool = BlockPool(20, width=2)
    pool.offer_all()
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks([digest(n) for n in range(4)], blocks)
    pool.commit_step()
    assert pool.take_fresh(0) == []
    assert [block.block_id for block in pool.take_fresh(1)] == [1]
    assert [block.block_id for block in pool.take_fresh(5)] == [5, 3]
    pool.offer_again([key(0, 1), key(0)])  # of its second page, and of its first
    assert [block.block_id for block in pool.take_fresh(9)] == [1, 7]
    assert pool.take_fresh(9) == []
    for block in blocks:
        block.is_offered = False
    pool.free_blocks(blocks)
    assert [block.num_pages for block in pool.take_cold(3, 20)] == [2]


def test_who_drops_or_hands_over_a_prompt_has_the_keys_of_every_page() -> None:
    """Head first in each group; of windows what is read behind the prompt."""
    manager = KVCacheManager(40, 4, 100, attention=(full(), full(), window(3), window(3)))
    request = Request("r", range(13), SamplingParams())
    request.block_hashes = [digest(1), digest(2), digest(3)]
    of_full = [key(number, group) for group in (0, 1) for number in (1, 2, 3)]
    of_windows = [key(3, group) for group in (2, 3)]
    assert manager.prompt_keys(request, with_tail=False) == of_full + of_windows
    everything = [key(number, group) for group in range(4) for number in (1, 2, 3)]
    assert manager.uncache_request(request) == everything


def test_whoever_watches_hears_of_every_page() -> None:
    class Watcher(Observer):
        def __init__(self) -> None:
            self.gone: list[bytes] = []

        def unnamed(self, keys: list[bytes]) -> None:  # type: ignore[override]
            self.gone += keys

    pool = BlockPool(20, width=2)
    pool.observer = watcher = Watcher()
    dropped: list[EvictedBlock] = []
    pool.tell_dropped(dropped.extend)
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks([digest(1)], blocks, computed=True)
    pool.uncache_blocks(blocks)
    assert watcher.gone == [key(1), key(1, 1)]
    assert pages_of(dropped) == [(1, key(1), 1), (2, key(1, 1), 1)]
