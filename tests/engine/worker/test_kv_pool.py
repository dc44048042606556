# SPDX-License-Identifier: Apache-2.0
"""The KV pool: its shape, its bytes, and pools that are too small."""

from __future__ import annotations

import pytest
import torch

from stratakv.connector.device.cpu import pool_pages
from stratakv.engine.cache.group_spec import plan_groups
from stratakv.engine.worker import pool_demand
from stratakv.engine.worker.kv_pool import KvPool
from stratakv.engine.worker.pool_demand import PoolDemand, check_pool_size, num_blocks_in
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.settings.values import MAX_BLOCKS, ConfigError

LAYOUT = BlockLayout(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, kv_dtype="bfloat16")
POOL = PoolDemand(plan_groups(LAYOUT), 4)


def test_one_block_is_one_chunk_of_page_bytes():
    pool = KvPool(LAYOUT, 5)
    assert pool.tensor.shape == (5, 3, 2, 4, 2, 8)
    assert pool.tensor.is_contiguous() and not pool.tensor.any()
    pages = pool_pages(pool.tensor, LAYOUT.page_bytes)  # as the copy device sees it
    assert pages.shape == (5, LAYOUT.page_bytes)
    pool.tensor[2] = 1.0
    assert pages.any(axis=1).tolist() == [False, False, True, False, False]
    pages[3] = pages[2]
    assert torch.equal(pool.tensor[3], pool.tensor[2])


def test_memory_is_counted_in_whole_blocks():
    page = LAYOUT.page_bytes
    assert [num_blocks_in(page, n) for n in (page - 1, page, 10 * page + 1)] == [0, 1, 10]


def test_a_pool_holds_one_request_and_the_null_block():
    assert POOL.blocks(4) == 2
    assert POOL.blocks(5) == 3
    check_pool_size(POOL, 3, 8)
    with pytest.raises(ConfigError) as refusal:
        check_pool_size(POOL, 3, 9)
    text = str(refusal.value)
    assert "--num-blocks 4 or --kv-cache-memory-bytes 1MiB" in text
    assert text.endswith("or lower --max-model-len to 8")
    check_pool_size(POOL, 4, 9)


def test_a_pool_without_any_room_names_no_shorter_length():
    with pytest.raises(ConfigError) as refusal:
        check_pool_size(POOL, 1, 8)
    assert "--max-model-len" not in str(refusal.value)
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        KvPool(LAYOUT, 1)


def test_a_pool_larger_than_the_memory_is_refused_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(pool_demand, "available_memory_bytes", lambda: 7 * LAYOUT.page_bytes + 1)
    check_pool_size(POOL, 7, 8)
    with pytest.raises(ConfigError, match=r"this machine can hold one of 7 blocks .* lower --num"):
        check_pool_size(POOL, 8, 8)
    monkeypatch.setattr(pool_demand, "available_memory_bytes", lambda: None)
    check_pool_size(POOL, MAX_BLOCKS, 8)
    with pytest.raises(ConfigError, match=f"can hold one of {MAX_BLOCKS} blocks"):
        check_pool_size(POOL, MAX_BLOCKS + 1, 8)


def test_memory_that_the_tiers_have_taken_is_not_promised_twice(monkeypatch: pytest.MonkeyPatch):
    left = [7 * LAYOUT.page_bytes]
    monkeypatch.setattr(pool_demand, "available_memory_bytes", lambda: left[0])
    check_pool_size(POOL, 7, 8)
    left[0] = 6 * LAYOUT.page_bytes
    with pytest.raises(ConfigError, match="this machine can hold one of 6 blocks"):
        KvPool(LAYOUT, 7)
    assert KvPool(LAYOUT, 6).num_blocks == 6


def test_memory_that_cannot_be_had_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_demand, "available_memory_bytes", lambda: None)
    large = BlockLayout(64, 256, 8, 128, "float32")
    with pytest.raises(ConfigError, match="does not fit into memory; lower --kv-cache-memory"):
        KvPool(large, 2**48 // large.page_bytes)
