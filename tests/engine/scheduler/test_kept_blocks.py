# SPDX-License-Identifier: Apache-2.0
"""Requests that continue ended ones, in blocks that are kept for them.

As beams do: in each round some requests for one token, each of which continues one of the round
before, or with others the same one. The worker (`conftest.py`) checks every slot that is read.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from stratakv.connector.page_keys import group_suffix
from stratakv.engine.models.layer_attention import LayerAttention, full, window
from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler.scheduler import Pause

from .conftest import HASHER, Engine, build_engine, digest_of, fingerprint, reference
from .dict_tiers import SIZE, DictTiers

PROMPT = [7 * i % 49 + 1 for i in range(SIZE * 5)]
ONE = SamplingParams(max_tokens=1, ignore_eos=True)
PLANS: list[tuple[LayerAttention, ...]] = [(full(),), (full(),), (full(), window(6)), (window(7),)]


def keep(
    engine: Engine, name: str, prompt: Sequence[int], before: Request | None = None
) -> Request:
    """A request for one token, whose blocks are kept."""
    request = Request(name, prompt, ONE, block_hasher=HASHER, continues=before)
    request.keeps_blocks = True
    engine.scheduler.add_request(request)
    return request


def kept(engine: Engine) -> int:
    return len(engine.scheduler._states.kept)


@pytest.mark.parametrize("length", [SIZE * 3 - 1, SIZE * 3, SIZE * 3 + 1])
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no-cache"])
def test_several_go_on_behind_one(length: int, caching: bool) -> None:
    engine = build_engine(caching=caching)
    first = keep(engine, "a", PROMPT[:length])
    engine.run_all()
    assert kept(engine) == 1
    assert engine.manager.pool.num_held == -(-length // SIZE)
    heirs = [keep(engine, f"b{token}", [*PROMPT[:length], token], first) for token in (3, 4, 5)]
    output = engine.step()
    assert output.num_scheduled_tokens == dict.fromkeys(["b3", "b4", "b5"], 1)
    # The last one writes in place, since the kept blocks went with it.
    assert len(output.block_copies) == (2 if length % SIZE else 0)
    for heir in heirs:
        assert engine.said(heir.request_id) == reference(heir.prompt_token_ids.tolist(), 1)
        assert heir.continues is None
    assert kept(engine) == 3
    engine.scheduler.release_blocks(heirs)
    assert engine.manager.pool.is_idle
    assert not engine.manager.shared_tails.families


def test_who_lacks_room_takes_kept_blocks_the_oldest_first() -> None:
    engine = build_engine(1 + 10)
    first = keep(engine, "a", PROMPT[:11])
    second = keep(engine, "b", PROMPT[1:13])
    engine.run_all()
    assert kept(engine) == 2
    engine.add("other", PROMPT[2:20], max_tokens=5)
    engine.run_all()
    assert engine.said("other") == reference(PROMPT[2:20], 5)
    assert kept(engine) == 1
    late = keep(engine, "a1", [*PROMPT[:11], 3], first)
    soon = keep(engine, "b1", [*PROMPT[1:13], 3], second)
    engine.run_all()
    assert engine.said("a1") == reference([*PROMPT[:11], 3], 1)
    assert engine.said("b1") == reference([*PROMPT[1:13], 3], 1)
    engine.scheduler.release_blocks([late, soon])
    assert engine.manager.pool.is_idle


def test_what_was_given_up_is_loaded_from_a_tier() -> None:
    """Also where the request that was to go on in it was queued before."""
    tiers = DictTiers()
    engine = build_engine(1 + 10, tiers=tiers, max_num_seqs=1)
    first = keep(engine, "a", PROMPT[:13])
    engine.run_all()
    engine.add("other", PROMPT[2:20], max_tokens=20, ignore_eos=True)
    engine.step()
    heir = keep(engine, "b", [*PROMPT[:13], 3], first)
    engine.run_all()
    assert engine.said("b") == reference(heir.prompt_token_ids.tolist(), 1)
    assert engine.scheduler.counts["loads"] == 1
    engine.scheduler.release_blocks([heir])
    assert engine.manager.pool.is_idle


def test_kept_blocks_of_the_least_urgent_are_given_up_first() -> None:
    engine = build_engine(1 + 10, policy="priority")
    for name, at, priority in (("old", 0, 0), ("late", 1, 5), ("last", 2, 5)):
        request = Request(name, PROMPT[at : at + 9], ONE, block_hasher=HASHER, priority=priority)
        request.keeps_blocks = True
        engine.scheduler.add_request(request)
        engine.run_all()
    engine.add("other", PROMPT[3:15], max_tokens=1)
    engine.run_all()
    ended = [each.request_id for each in engine.scheduler._states.kept.ended]
    assert ended == ["old", "last"]


def test_who_goes_on_takes_room_from_an_ended_load_where_nothing_runs() -> None:
    """Each reserves all that it may come to: the first in turn has no room beside blocks that have
    been loaded, and their request is behind it."""
    tiers = DictTiers()
    engine = build_engine(1 + 10, tiers=tiers, policy="priority", reserve="full")
    other = PROMPT[1:13]
    for index in range(2):
        held = fingerprint(other)[SIZE * index : SIZE * (index + 1)]
        tiers.kept[digest_of(other, index) + group_suffix(0)] = held
    first = keep(engine, "a", PROMPT[:11])
    engine.run_all()
    wishes = SamplingParams(max_tokens=20, ignore_eos=True)
    engine.scheduler.add_request(
        Request("loaded", other, SamplingParams(max_tokens=5), block_hasher=HASHER, priority=1)
    )
    assert engine.step().num_scheduled_tokens == {}  # it waits for its load
    heir = Request("b", [*PROMPT[:11], 3], wishes, block_hasher=HASHER, continues=first)
    engine.scheduler.add_request(heir)
    engine.run_all()
    assert engine.scheduler.counts["loads_given_up"] == 1
    assert engine.said("b") == reference([*PROMPT[:11], 3], 20, ignore_eos=True)
    assert engine.said("loaded") == reference(other, 5)
    assert engine.manager.pool.is_idle


def test_a_reset_gives_kept_blocks_up() -> None:
    engine = build_engine()
    first = keep(engine, "a", PROMPT[:11])
    engine.run_all()
    assert engine.scheduler.reset_prefix_cache(reset_tiers=False)
    keep(engine, "b", [*PROMPT[:11], 3], first)
    engine.run_all()
    assert engine.said("b") == reference([*PROMPT[:11], 3], 1)


def test_a_reset_that_is_refused_gives_nothing_up() -> None:
    engine = build_engine()
    keep(engine, "a", PROMPT[:11])
    engine.run_all()
    engine.add("other", PROMPT[2:9], max_tokens=5, ignore_eos=True)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_tiers=False)
    assert kept(engine) == 1


def test_they_go_on_during_a_pause_of_new_requests() -> None:
    engine = build_engine()
    first = keep(engine, "a", PROMPT[:11])
    engine.run_all()
    engine.scheduler.pause(Pause.NEW)
    engine.add("new", PROMPT[:3])
    keep(engine, "b", [*PROMPT[:11], 3], first)
    engine.step()
    assert engine.said("b") == reference([*PROMPT[:11], 3], 1)
    assert engine.said("new") == []


@dataclass
class Family:
    """Rounds of requests, as a beam search has them."""

    prefix: str
    num_rounds: int
    beams: list[Request] = field(default_factory=list)
    num_made: int = 0

    def next_round(
        self, engine: Engine, prompts: Sequence[tuple[list[int], Request | None]]
    ) -> None:
        before, self.beams = self.beams, []
        for prompt, parent in prompts:
            self.num_made += 1
            self.beams.append(keep(engine, f"{self.prefix}-{self.num_made}", prompt, parent))
        continued = [parent for _, parent in prompts]
        engine.scheduler.release_blocks([each for each in before if each not in continued])
        self.num_rounds -= 1

    def advance(self, engine: Engine, rng: random.Random) -> None:
        """The next round, once the present one has ended; none behind the last or a failed one."""
        if not self.beams or not all(each.is_finished for each in self.beams):
            return
        ended = [each for each in self.beams if each.status.finish_reason == "length"]
        for each in ended:
            assert engine.said(each.request_id) == reference(each.prompt_token_ids.tolist(), 1)
        if self.num_rounds and len(ended) == len(self.beams):
            parents = [rng.choice(ended) for _ in range(rng.randint(1, 4))]
            self.next_round(
                engine,
                [([*each.prompt_token_ids.tolist(), rng.randint(1, 49)], each) for each in parents],
            )
            return
        before = [each.continues for each in self.beams if each.continues is not None]
        engine.scheduler.release_blocks([*before, *self.beams])
        self.beams = []


@pytest.mark.parametrize("case", range(6))
def test_random_rounds_beside_others(case: int, seed: int, scale: str) -> None:
    rng = random.Random(seed)
    for _ in range(8 if scale == "ci" else 2_000):
        check_life(rng, with_tiers=case % 2 == 1)


def check_life(rng: random.Random, *, with_tiers: bool) -> None:
    attention = rng.choice(PLANS)
    tiers = DictTiers(rng, attention) if with_tiers else None
    most = sum(kind.most_blocks(40, SIZE, 16) for kind in attention)
    options: dict[str, Any] = rng.choice([{}, {"admit_below": 0.5, "preempt_above": 0.8}])
    engine = build_engine(
        1 + most + rng.choice([0, 1, 4, 12]),
        tiers=tiers,
        attention=attention,
        max_model_len=40,
        max_num_batched_tokens=16,
        max_num_seqs=rng.randint(1, 5),
        policy=rng.choice(["fcfs", "priority", "continuum"]),
        reserve=rng.choice(["none", "prompt", "full"]),
        most_drafts=rng.choice([0, 3]),
        looks_ahead=rng.random() < 0.5,
        **options,
    )
    scheduler = engine.scheduler
    families = []
    expected: dict[str, list[int]] = {}
    for number in range(rng.randint(1, 3)):
        family = Family(f"f{number}", rng.randint(1, 12))
        family.next_round(engine, [(rng.choices(range(1, 50), k=rng.randint(1, 24)), None)])
        families.append(family)
    for turn in range(1_000):
        if turn % 5 == 0 and len(expected) < 6:
            name, prompt = f"r{turn}", rng.choices(range(1, 50), k=rng.randint(1, 25))
            expected[name] = reference(prompt, 9)
            engine.add(name, prompt, max_tokens=9)
        if rng.random() < 0.01 and scheduler.requests:
            victim = rng.choice(sorted(scheduler.requests))
            expected.pop(victim, None)
            engine.take(scheduler.finish_requests([victim]))
        if tiers is not None:
            tiers.tick()
        scheduler._retry_at = scheduler._retry_at and 0.0
        if scheduler.has_runnable_work():
            engine.step()
        for family in families:
            family.advance(engine, rng)
        is_busy = tiers is not None and tiers.is_busy  # with a load of one that was aborted
        if not (scheduler.requests or is_busy or any(family.beams for family in families)):
            break
    assert not scheduler.requests, "not everybody ended"
    for name, said in expected.items():
        assert engine.said(name) == said
    assert kept(engine) == 0
    if scheduler._states.pins is not None:
        scheduler._states.pins.release_all()
    assert engine.manager.pool.is_idle
    assert not engine.manager.shared_tails.families
