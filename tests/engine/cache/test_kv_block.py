# SPDX-License-Identifier: Apache-2.0
"""The free queue: order, taking from the middle, and misuse."""

from __future__ import annotations

import random

import pytest

from stratakv.engine.cache.kv_block import FreeBlockQueue, KVCacheBlock


def make(count: int) -> tuple[list[KVCacheBlock], FreeBlockQueue]:
    blocks = [KVCacheBlock(i) for i in range(count)]
    return blocks, FreeBlockQueue(blocks)


def ids(blocks: object) -> list[int]:
    return [block.block_id for block in blocks]  # type: ignore[attr-defined]


def test_blocks_come_out_in_the_order_they_went_in() -> None:
    blocks, queue = make(5)
    assert queue.popleft() is blocks[0]
    assert ids(queue.popleft_n(2)) == [1, 2]
    queue.append(blocks[1])
    queue.append_n([blocks[2], blocks[0]])
    assert ids(queue) == [3, 4, 1, 2, 0]
    assert len(queue) == queue.num_free == 5


def test_blocks_leave_from_the_middle_and_both_ends() -> None:
    blocks, queue = make(5)
    queue.remove(blocks[2])
    queue.remove_n([blocks[0], blocks[4]])
    assert ids(queue) == [1, 3]
    queue.remove_n([blocks[3], blocks[1]])
    assert ids(queue) == []
    queue.append(blocks[3])
    assert ids(queue.popleft_n(1)) == [3]


def test_prepended_blocks_are_reused_first() -> None:
    blocks, queue = make(4)
    queue.popleft_n(3)
    queue.prepend_n([blocks[2], blocks[0]])
    assert ids(queue) == [2, 0, 3]


def test_nothing_is_a_fine_number_of_blocks() -> None:
    _, queue = make(0)
    queue.append_n([])
    queue.prepend_n([])
    assert queue.popleft_n(0) == []
    assert len(queue) == 0


def test_misuse_is_named_and_changes_nothing() -> None:
    blocks, queue = make(3)
    with pytest.raises(RuntimeError, match="4 free blocks were asked for, 3 are there"):
        queue.popleft_n(4)
    with pytest.raises(RuntimeError, match="-1 free blocks"):
        queue.popleft_n(-1)
    for block in blocks:  # first, middle and last
        with pytest.raises(RuntimeError, match="in the free queue already"):
            queue.append(block)
    assert ids(queue) == [0, 1, 2]
    taken = queue.popleft_n(3)
    with pytest.raises(RuntimeError, match="block 1 is not in the free queue"):
        queue.remove(taken[1])
    with pytest.raises(RuntimeError, match="0 are there"):
        queue.popleft()
    with pytest.raises(RuntimeError, match="already"):
        queue.append_n([taken[0], taken[0]])


def test_random_operations_keep_the_order_of_a_list(rng: random.Random, scale: str) -> None:
    blocks, queue = make(12)
    model = list(blocks)
    for _ in range(3_000 if scale == "ci" else 1_000_000):
        outside = [block for block in blocks if block not in model]
        some = rng.sample(outside, rng.randint(0, len(outside)))
        verb = rng.randrange(4)
        if verb == 0:
            count = rng.randint(0, len(model))
            assert queue.popleft_n(count) == model[:count]
            del model[:count]
        elif verb == 1:
            queue.append_n(some)
            model += some
        elif verb == 2:
            queue.prepend_n(some)
            model[:0] = some
        else:
            gone = rng.sample(model, rng.randint(0, len(model)))
            queue.remove_n(gone)
            model = [block for block in model if block not in gone]
        assert list(queue) == model
        assert len(queue) == len(model)
