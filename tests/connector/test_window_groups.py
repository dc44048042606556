# SPDX-License-Identifier: Apache-2.0
"""Cache groups with windows over real tiers: what a hit of a length needs is found, loaded whole or
not at all, and no layer reads what is not there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stratakv.connector.build import build_offload
from stratakv.connector.costs.economics import Choice
from stratakv.connector.messages import Part
from stratakv.connector.parts import Parts
from stratakv.engine.models.layer_attention import LayerAttention, chunk, full, window
from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.tiers.block import key_suffix, pack_key
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.tier_settings import TierSettings

from .test_groups import HASHER, LAYOUT, PROMPT, SIZE, Engine, seen_by

PLANS: list[tuple[LayerAttention, ...]] = [
    (full(), window(6)),
    (window(9), full(), chunk(8)),
    (full(), full(), window(7), window(7)),
    (window(10), window(5)),
]


def make_engine(
    attention: tuple[LayerAttention, ...], *, ssd: Path | None = None, slots: int = 200
) -> Engine:
    most = sum(kind.most_blocks(60, SIZE, 24) for kind in attention)
    return Engine(len(attention), 1 + most, slots, Choice.LOAD, ssd, attention)


def evict(engine: Engine, name: str) -> None:
    """Everything that can be found in the pool is overwritten."""
    engine.run(name, list(range(100, 157)))


@pytest.mark.parametrize("attention", PLANS, ids=str)
def test_only_the_end_of_a_window_is_loaded(attention: tuple[LayerAttention, ...]) -> None:
    engine = make_engine(attention)
    engine.run("first", PROMPT)
    for number in range(3):
        evict(engine, f"other-{number}")
    engine.manager.pool.reset_prefix_cache()
    again = engine.run("again", PROMPT)
    stats = engine.side.stats()
    engine.close()
    loaded = again.cached_tokens_by_tier["cpu"]
    assert loaded == len(PROMPT) - 1
    num_blocks = sum(loaded // SIZE - kind.first_seen(loaded) // SIZE for kind in attention)
    assert stats["load_bytes"] == num_blocks * LAYOUT.page_bytes
    assert stats["failures"] == {}
    assert engine.manager.pool.is_idle
    assert engine.parts == {Part(group) for group in range(len(attention))}


def test_a_window_that_lost_a_block_is_a_shorter_hit() -> None:
    engine = make_engine((full(), window(6)))
    first = engine.run("first", PROMPT)
    for number in range(3):
        evict(engine, f"other-{number}")
    engine.manager.pool.reset_prefix_cache()
    asks = Request("asks", PROMPT, SamplingParams(), block_hasher=HASHER)

    def match() -> int:
        return engine.side.get_matched_tokens(asks, 0).tokens // SIZE

    hierarchy, digests = engine.side._hierarchy, first.block_hashes
    assert match() == 8
    hierarchy.forget_blocks([pack_key(digests[index], 1) for index in range(4)])
    assert match() == 8  # the windows before are of no use to this one
    hierarchy.forget_blocks([pack_key(digests[6], 1)])
    assert match() == 6
    hierarchy.forget_blocks([pack_key(digests[5], 0)])
    assert match() == 0  # a hit of 5 needs blocks 3 and 4 of the window
    engine.run("again", PROMPT)
    engine.close()


@pytest.mark.parametrize(("lost", "found"), [((7, 1), 7), ((6, 0), 6), ((1, 0), 1), ((0, 0), 0)])
def test_after_a_load_that_lacks_a_block_a_shorter_hit_is_loaded(
    tmp_path: Path, lost: tuple[int, int], found: int
) -> None:
    """A record is gone from the disk between the look-up and the read."""
    engine = make_engine((full(), window(6)), ssd=tmp_path, slots=40)
    first = engine.run("first", PROMPT)
    for number in range(3):
        evict(engine, f"other-{number}")
        engine.let_the_disk_keep_up()
    engine.manager.pool.reset_prefix_cache()
    hierarchy = engine.side._hierarchy
    position, group = lost
    begin = hierarchy.begin_load

    def begin_load(*args: object) -> object:
        hierarchy.forget_blocks([pack_key(first.block_hashes[position], group)])
        return begin(*args)  # type: ignore[arg-type]

    hierarchy.begin_load = begin_load  # type: ignore[method-assign, assignment]
    queries = engine.side.stats()["lookup_queries"]["cpu"]
    again = engine.run("again", PROMPT)
    num_queries = engine.side.stats()["lookup_queries"]["cpu"] - queries
    engine.close()
    assert num_queries == (len(PROMPT) - 1) // SIZE, "counted once, though it was found twice"
    assert not engine.side.requests, "nothing is kept of a request that has ended"
    assert again.num_cached_tokens == found * SIZE
    assert engine.scheduler.counts["loads_failed"] == 1
    assert engine.scheduler.counts["loads"] == 1 + (found > 0)
    assert engine.manager.pool.is_idle


def test_windows_come_back_from_a_disk_after_a_restart(tmp_path: Path) -> None:
    attention = (full(), window(9), chunk(8))
    prompts = [[number + 1, *range(2, 42)] for number in range(4)]
    loaded = []
    for life in range(2):
        engine = make_engine(attention, ssd=tmp_path, slots=60)
        for number, prompt in enumerate(prompts):
            request = engine.run(f"{life}-{number}", prompt, max_tokens=3)
            evict(engine, f"other-{life}-{number}")
            engine.let_the_disk_keep_up()
            if life:
                loaded.append(request.cached_tokens_by_tier.get("ssd", 0))
        engine.close()
        assert engine.manager.pool.is_idle
    assert max(loaded) >= 32  # how far the disk got in the first life is its own affair


@pytest.mark.parametrize("trial", range(8))
def test_random_prompts_and_losses(trial: int) -> None:
    """Lack of slots and of blocks, evictions, preemptions, lost blocks: never a wrong byte."""
    rng = random.Random(trial)
    engine = make_engine(rng.choice(PLANS), slots=rng.choice([12, 60, 200]))
    heads = [[rng.randrange(50) for _ in range(30)] for _ in range(3)]
    for number in range(20):
        prompt = rng.choice(heads)[: rng.randrange(1, 31)] + [number] * rng.randrange(1, 12)
        params = SamplingParams(max_tokens=rng.randrange(1, 9))
        engine.scheduler.add_request(Request(f"r{number}", prompt, params, block_hasher=HASHER))
        if rng.random() < 0.6:
            engine.run_all()
            slab = engine.side._hierarchy._slab
            engine.side._hierarchy.forget_blocks(
                rng.sample(sorted(slab.keys()), len(slab.keys()) // 8)
            )
    engine.run_all()
    engine.close()
    assert engine.manager.pool.is_idle
    assert engine.num_checked


def test_found_lengths_are_those_of_a_search_through_all(rng: random.Random) -> None:
    lengths = []
    engine = make_engine((full(), window(6)))
    hierarchy = engine.side._hierarchy
    for case in range(150):
        kinds = [full(), window(rng.randint(1, 20)), chunk(rng.randint(1, 20))]
        attention = [rng.choice(kinds) for _ in range(rng.randint(1, 3))] + [window(5)]
        suffixes = [key_suffix(group) for group in range(len(attention))]
        num_blocks, first = rng.randint(1, 12), rng.randint(0, 3)
        digests = [bytes([case, index]) * 16 for index in range(num_blocks)]
        keys = [d + s for d in digests for s in suffixes if rng.random() < 0.85]
        hierarchy.clear()
        hierarchy.end_store(hierarchy.begin_store(keys), True)
        most_tokens = (first + num_blocks) * SIZE - rng.randint(0, SIZE - 1)

        def is_hit(length: int) -> bool:
            end = min((first + length) * SIZE, most_tokens)  # noqa: B023 - called below only
            return all(
                digests[position // SIZE - first] + suffix in keys  # noqa: B023
                for kind, suffix in zip(attention, suffixes, strict=True)  # noqa: B023
                for position in range(max(first * SIZE, kind.first_seen(end)), end)  # noqa: B023
            )

        parts = Parts(SIZE, seen_by(attention))
        every = parts.keys_of(digests)
        prefix = parts.find_longest_hit(hierarchy, first, every, most_tokens)
        expected = next(n for n in range(num_blocks, -1, -1) if is_hit(n))
        # Where a chunk begins nothing is attended to, and a load has to bring something.
        while expected and not parts.needed(first, expected, most_tokens):
            expected -= 1
        assert len(prefix.tiers) == expected
        wanted = [every[i] for i in parts.needed(first, expected, most_tokens)]
        assert set(wanted) <= set(keys)
        assert len(wanted) == len(set(wanted))
        end = min((first + expected) * SIZE, most_tokens)
        for group, kind in enumerate(attention):
            low = min(expected, max(0, kind.first_seen(end) // SIZE - first))
            mine = [key for key in wanted if key.endswith(suffixes[group])]
            assert mine == [digest + suffixes[group] for digest in digests[low:expected]]
        lengths.append(expected)
    engine.close()
    assert 0 < lengths.count(0) < 100


def test_what_a_hit_needs_ends_where_the_next_token_is_computed() -> None:
    parts = Parts(SIZE, seen_by((full(), window(6))))
    # Positions 2 to 5, so tokens 8 to 23. Behind 24 tokens a window of 6 begins with token 19.
    assert parts.needed(2, 4) == [0, 2, 4, 5, 6, 7]
    # Behind 20 of them it begins with token 15, which lies in the block before.
    assert parts.needed(2, 4, 20) == [0, 2, 3, 4, 5, 6, 7]


def test_windows_and_overlapped_loads_are_refused() -> None:
    with pytest.raises(TierConfigError, match=r"see only .* take --kv-offload-load auto or always"):
        build_offload(
            LAYOUT,
            TierSettings(load="both"),
            namespace=b"test",
            parts=Parts(SIZE, seen_by((full(), window(6)))),
        )
