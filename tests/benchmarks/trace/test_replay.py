# SPDX-License-Identifier: Apache-2.0
"""One tier: its hits by hand, in what order a policy is told, and that the slab does the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import pytest

from stratakv.benchmarks.trace.formats import KEY_BYTES, Trace, key_of
from stratakv.benchmarks.trace.replay import (
    Outcome,
    outcome,
    prefill_work,
    replay,
    replay_heads_first,
)
from stratakv.tiers.block import KEY_BYTES as PRODUCT_KEY_BYTES
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.policies.lru import LruPolicy
from stratakv.tiers.slab.cpu_slab import CpuSlab

from .tiny_traces import random_trace, trace_of

A, B = [0, 1, 2], [3, 4]


def test_a_tail_goes_first() -> None:
    """Two blocks of B take the free place and that of A's tail, so A's head serves again."""
    found = replay(trace_of(A, B, A), LruPolicy(), 4)
    assert found.hit_percent == pytest.approx(100 * 2 / 8)
    work = 2 * prefill_work(3) + prefill_work(2)
    assert found.work_percent == pytest.approx(100 * prefill_work(2) / work)


def test_a_head_that_goes_first_takes_its_tail_along() -> None:
    assert replay_heads_first(trace_of(A, B, A), 4).hit_percent == 0.0
    assert replay_heads_first(trace_of(A, B, A), 5).hit_percent == pytest.approx(100 * 3 / 8)


def test_what_has_room_for_all_hits_all_but_the_first_use() -> None:
    assert replay(trace_of(A, B, A, B), LruPolicy(), 5).hit_percent == 50.0


def test_a_prompt_longer_than_the_tier_keeps_its_head() -> None:
    assert replay(trace_of(A, A), LruPolicy(), 2).hit_percent == pytest.approx(100 * 2 / 6)


def test_a_deep_block_is_more_work() -> None:
    found = outcome(trace_of(A), [1])
    assert found.hit_percent == pytest.approx(100 / 3)
    assert found.work_percent < found.hit_percent
    # Attention to all before it costs what the weights cost at some 30,500 tokens.
    assert prefill_work(60) - prefill_work(59) == pytest.approx(2.0, rel=0.01)


class Noting(LruPolicy):
    """LRU that writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, list[bytes]]] = []

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        self.told.append((f"observe {now:g}", list(chain)))

    def insert(self, keys: Iterable[bytes]) -> None:
        self.told.append(("insert", list(keys)))
        super().insert(self.told[-1][1])

    def touch(self, keys: Iterable[bytes]) -> None:
        self.told.append(("touch", list(keys)))
        super().touch(self.told[-1][1])

    def remove(self, keys: Iterable[bytes]) -> None:
        self.told.append(("remove", list(keys)))
        super().remove(self.told[-1][1])


def test_what_a_policy_is_told() -> None:
    policy = Noting()
    replay(trace_of([0, 1], [0, 2]), policy, 2)
    zero, one, two = (key_of(block) for block in range(3))
    assert policy.told == [
        ("observe 0", [zero, one]),
        ("insert", [one, zero]),
        ("touch", []),
        ("observe 1", [zero, two]),
        ("remove", [one]),
        ("insert", [two]),
        ("touch", [zero]),
    ]
    assert len(zero) == KEY_BYTES == PRODUCT_KEY_BYTES


class HottestFirst(LruPolicy):
    """A bad policy, so that heads go while tails stay."""

    def victims(self, count: int, may_evict: Callable[[bytes], bool]) -> list[bytes]:
        return super().victims(len(self), may_evict)[::-1][:count]


def test_a_block_behind_a_gap_is_no_hit() -> None:
    """The third prompt puts 0 out, and 1 stays: the fourth finds 1 alone, which serves nobody."""
    assert replay(trace_of([0, 1], [2], [0, 1]), HottestFirst(), 2).hit_percent == 0.0


def slab_hits(trace: Trace, capacity_blocks: int) -> Outcome:
    """The same through the product's slab, with pins, reservations and real memory."""
    layout = BlockLayout(
        num_layers=1, block_size=16, num_kv_heads=1, head_dim=32, kv_dtype="float32"
    )
    hits_by_prompt = []
    slab = CpuSlab(layout, capacity_blocks * layout.slot_bytes, populate_threads=1)
    try:
        for chain in trace.keyed_chains:
            slots = slab.pin(chain, touch=False)
            pinned = [key for key, slot in zip(chain, slots, strict=True) if slot is not None]
            hits = next((i for i, slot in enumerate(slots) if slot is None), len(chain))
            hits_by_prompt.append(hits)
            reserved = slab.reserve(chain)
            new = [key for key, slot in zip(chain, reserved, strict=True) if slot is not None]
            slab.commit(new, [True] * len(new))
            slab.unpin(pinned)
            slab.pin(chain[:hits])
            slab.unpin(chain[:hits])
    finally:
        slab.close()
    return outcome(trace, hits_by_prompt)


@pytest.mark.parametrize("capacity", [1, 3, 7, 12])
def test_the_slab_does_the_same(capacity: int, rng: random.Random) -> None:
    trace = random_trace(rng, requests=300, blocks=25)
    found = replay(trace, LruPolicy(), capacity)
    assert found == slab_hits(trace, capacity)
    assert found.hit_percent > 0
