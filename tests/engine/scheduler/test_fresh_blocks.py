# SPDX-License-Identifier: Apache-2.0
"""A connector that wants every block gets them in the steps that follow, and then there is peace.

What `DictTiers` is given it reads at the end of the step, and it must hold what its name promises.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from stratakv.connector.messages import ConnectorMetadata, EvictedBlock

from .conftest import Engine, MakeEngine, digest_of, reference
from .dict_tiers import SIZE, DictTiers

PROMPT = list(range(1, 43))  # ten whole blocks


class SharedTiers(DictTiers):
    """As if others waited for the blocks. Takes `room` of them in a step."""

    def __init__(self, rng: random.Random | None = None, room: int = 3, wants: bool = True) -> None:
        super().__init__(rng)
        self.room = room
        self.wants = wants
        self.given: list[bytes] = []

    @property
    def wants_all(self) -> bool:
        return self.wants

    def num_wanted_ahead(self) -> int:
        return self.room

    def build_meta(
        self, evicted: Sequence[EvictedBlock], cold: Sequence[EvictedBlock] = ()
    ) -> ConnectorMetadata:
        assert len(cold) <= self.room
        self.given += [block.key for block in cold]
        return super().build_meta(evicted, cold)


def idle_steps(engine: Engine, most: int = 100) -> int:
    """Steps that the engine takes by itself until it sleeps."""
    steps = 0
    while engine.scheduler.has_runnable_work():
        engine.step()
        steps += 1
        assert steps < most, "the engine does not come to rest"
    return steps


def test_an_idle_engine_hands_over_what_is_left_and_then_sleeps(make_engine: MakeEngine) -> None:
    tiers = SharedTiers(room=3)
    engine = make_engine(tiers=tiers)
    engine.add("a", PROMPT, max_tokens=1)
    engine.step()
    assert not engine.scheduler.requests
    assert tiers.given == [], "nothing is given before it is computed"
    assert idle_steps(engine) == 4  # ten blocks, three at a time
    expected = [digest_of(PROMPT, index) for index in range(10)]
    assert {name[:32] for name in tiers.given} == set(expected)
    assert len(tiers.given) == 10
    # Of each step the tail first, and heads in earlier steps.
    assert tiers.given[:3] == [name + b"\0\0" for name in expected[2::-1]]
    assert tiers.kept.keys() == set(tiers.given)
    for _ in range(3):
        engine.step()
        assert not engine.scheduler.has_runnable_work()
    assert len(tiers.given) == 10


def test_a_connector_without_room_is_waited_for_without_steps(make_engine: MakeEngine) -> None:
    tiers = SharedTiers(room=0)
    engine = make_engine(tiers=tiers)
    engine.add("a", PROMPT, max_tokens=1)
    engine.step()
    assert idle_steps(engine) == 0
    tiers.room = 100  # its copies have ended, and it woke the engine
    assert idle_steps(engine) == 1
    assert len(tiers.given) == 10


def test_one_that_does_not_want_all_pays_nothing(make_engine: MakeEngine) -> None:
    tiers = SharedTiers(wants=False)
    engine = make_engine(tiers=tiers)
    engine.add("a", PROMPT, max_tokens=1)
    engine.step()
    assert idle_steps(engine) == 0
    assert tiers.given == []
    assert engine.manager.pool.num_fresh == 0


def test_blocks_are_given_while_the_request_runs(make_engine: MakeEngine) -> None:
    """Others need not wait for the end of the answer."""
    tiers = SharedTiers(room=100)
    engine = make_engine(tiers=tiers)
    engine.add("a", PROMPT, max_tokens=3 * SIZE, ignore_eos=True)
    engine.step()
    engine.step()
    assert len(tiers.given) == 10
    engine.run_all()
    idle_steps(engine)
    text = PROMPT + reference(PROMPT, 3 * SIZE, ignore_eos=True)
    assert len(tiers.given) == (len(text) - 1) // SIZE


def test_a_failed_step_gives_nothing(make_engine: MakeEngine) -> None:
    tiers = SharedTiers(room=100)
    engine = make_engine(tiers=tiers)
    engine.add("a", PROMPT, max_tokens=1)
    output = engine.scheduler.schedule()
    engine.follow(output)
    engine.scheduler.fail_step(output, "the worker broke")
    idle_steps(engine)
    assert tiers.given == []


def test_what_comes_from_a_tier_is_not_given_back(make_engine: MakeEngine) -> None:
    tiers = SharedTiers(room=100)
    engine = make_engine(tiers=tiers)
    engine.add("a", PROMPT, max_tokens=1)
    engine.run_all()
    idle_steps(engine)
    tiers.given.clear()
    assert engine.scheduler.reset_prefix_cache(False)
    engine.add("b", PROMPT, max_tokens=1)
    engine.run_all()
    idle_steps(engine)
    assert engine.said("b") == engine.said("a")
    assert tiers.given == []


def test_many_requests_in_a_small_pool(make_engine: MakeEngine, rng: random.Random) -> None:
    """Whatever is evicted meanwhile: what is given is what its name says, and all of it goes."""
    for room in (1, 3, 100):
        tiers = SharedTiers(room=room)
        engine = make_engine(20, tiers=tiers, max_num_batched_tokens=24)
        for number in range(30):
            text = [rng.randint(1, 49) for _ in range(rng.randint(1, 40))]
            engine.add(f"r{number}", text, max_tokens=rng.randint(1, 8))
        engine.run_all()
        assert idle_steps(engine) <= 20
        assert not engine.manager.pool.fresh
