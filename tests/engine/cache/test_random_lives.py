# SPDX-License-Identifier: Apache-2.0
"""Random lives of requests in the KV cache, compared step by step with an oracle made of lists."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from stratakv.engine.cache.block_hash import make_block_hasher
from stratakv.engine.cache.kv_cache_manager import KVCacheManager
from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams

SIZE = 4
HASHER = make_block_hasher(b"r" * 32, SIZE)


class Oracle:
    """A pool made of lists, which the real pool must equal: keys by free order and by prefix."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks))
        self.prefixes: dict[int, tuple[int, ...]] = {}  # block → all tokens up to its end
        self.tables: dict[str, list[int]] = {}

    def prefix(self, tokens: tuple[int, ...]) -> int:
        known = set(self.prefixes.values())
        count = 0
        while (count + 1) * SIZE < len(tokens) and tokens[: (count + 1) * SIZE] in known:
            count += 1
        return count

    def references(self) -> Counter[int]:
        return Counter(block for table in self.tables.values() for block in table)


@pytest.mark.parametrize("case", range(10))
def test_random_lives_agree_with_the_oracle(case: int, seed: int, scale: str) -> None:
    rng = random.Random(seed + case)
    for _ in range(30 if scale == "ci" else 3_000):
        check_lives(rng)


def check_lives(rng: random.Random) -> None:
    num_blocks = rng.randint(4, 24)
    manager = KVCacheManager(num_blocks, SIZE, 1000)
    oracle = Oracle(num_blocks)
    live: dict[str, Request] = {}
    for number in range(40):
        verb = rng.random()
        if verb < 0.4 or not live:
            admit(rng, manager, oracle, live, str(number))
        elif verb < 0.75:
            grow(rng, manager, oracle, rng.choice(list(live.values())))
        else:
            request = live.pop(rng.choice(list(live)))
            manager.free(request)
            table = oracle.tables.pop(request.request_id)
            held = oracle.references()
            oracle.free += [block for block in reversed(table) if not held[block]]
        manager.pool.commit_step()
        compare(manager, oracle)
    for request in live.values():
        manager.free(request)
    assert manager.pool.is_idle
    assert all(block.ref_cnt == 0 for block in manager.pool.blocks)


def admit(
    rng: random.Random,
    manager: KVCacheManager,
    oracle: Oracle,
    live: dict[str, Request],
    name: str,
) -> None:
    # Few different tokens, so that prefixes meet.
    prompt = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
    request = Request(name, prompt, SamplingParams(), block_hasher=HASHER)
    tokens = tuple(int(t) for t in request.all_token_ids)
    hits, num_hit = manager.get_computed_blocks(request)
    assert num_hit == oracle.prefix(tokens) * SIZE
    hit_ids = [block.block_id for block in hits[0]]
    assert [oracle.prefixes[i] for i in hit_ids] == [
        tokens[:end] for end in range(SIZE, num_hit + 1, SIZE)
    ]
    count = rng.randint(1, len(tokens) - num_hit)
    needed = -(-(num_hit + count) // SIZE) - len(hit_ids)
    idle = [i for i in hit_ids if i in oracle.free]
    added = manager.allocate_slots(request, count, num_hit, hits)
    assert (added is not None) == (needed + len(idle) <= len(oracle.free))
    if added is None:
        return
    oracle.free = [i for i in oracle.free if i not in idle]
    request.num_computed_tokens = num_hit + count
    live[name] = request
    oracle.tables[name] = hit_ids
    take(oracle, request, needed)


def grow(rng: random.Random, manager: KVCacheManager, oracle: Oracle, request: Request) -> None:
    if request.num_computed_tokens == request.num_tokens:
        request.append_output_token(rng.randrange(2))
    count = rng.randint(1, request.num_tokens - request.num_computed_tokens)
    total = request.num_computed_tokens + count
    needed = max(0, -(-total // SIZE) - len(oracle.tables[request.request_id]))
    added = manager.allocate_slots(request, count)
    assert (added is not None) == (needed <= len(oracle.free))
    if added is not None:
        request.num_computed_tokens = total
        take(oracle, request, needed)


def take(oracle: Oracle, request: Request, needed: int) -> None:
    new = oracle.free[:needed]
    del oracle.free[:needed]
    for block in new:
        oracle.prefixes.pop(block, None)
    table = oracle.tables[request.request_id]
    table += new
    tokens = tuple(int(t) for t in request.all_token_ids)
    for index in range(request.num_computed_tokens // SIZE):
        oracle.prefixes.setdefault(table[index], tokens[: (index + 1) * SIZE])


def compare(manager: KVCacheManager, oracle: Oracle) -> None:
    assert [block.block_id for block in manager.pool.free_queue] == oracle.free
    assert manager.pool.num_free == len(oracle.free)
    references = oracle.references()
    assert [b.ref_cnt for b in manager.pool.blocks] == [
        references[b.block_id] for b in manager.pool.blocks
    ]
    cached = {b.block_id for b in manager.pool.blocks if b.block_hash is not None}
    assert cached == set(oracle.prefixes)
    for name, table in oracle.tables.items():
        assert manager.get_block_ids(name) == (table,)
