# SPDX-License-Identifier: Apache-2.0
"""Random requests, pools, tiers and faults: everybody ends, says the right thing, leaves nothing.

The worker of these engines checks every slot it reads and every block it stores, see conftest.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from stratakv.engine.models.layer_attention import LayerAttention, chunk, full, window

EOS = 0
CASES = 10
# Half of them as most models are.
PLANS: list[tuple[LayerAttention, ...]] = [
    *[(full(),)] * 4,
    (full(), window(6)),
    (window(9), full(), chunk(8)),
    (full(), window(5), window(5), chunk(10)),
    (window(7),),
    (full(), full()),
    (full(), full(), window(6), window(6)),
]
PRESSURES: list[dict[str, float]] = [
    {},
    {"admit_below": 0.8, "preempt_above": 0.95},
    {"admit_below": 0.3, "preempt_above": 0.3},
    {"admit_below": 0.01, "preempt_above": 1.0},
]


@pytest.mark.parametrize("faults", [False, True], ids=["calm", "faults"])
@pytest.mark.parametrize("with_tiers", [False, True], ids=["pool", "tiers"])
@pytest.mark.parametrize("case", range(CASES))
def test_random_lives(
    case: int,
    with_tiers: bool,
    faults: bool,
    seed: int,
    scale: str,
    make_engine: Any,
    make_tiers: Any,
    say: Any,
) -> None:
    rng = random.Random(seed)
    for _ in range(8 if scale == "ci" else 2_000):
        check_life(rng, make_engine, make_tiers(rng) if with_tiers else None, faults, say)


def check_life(rng: random.Random, make_engine: Any, tiers: Any, faults: bool, say: Any) -> None:
    max_model_len = rng.randint(16, 48)
    attention = rng.choice(PLANS)
    if tiers is not None:
        tiers.attention = attention
    max_num_seqs = rng.randint(1, 6)
    chunked = rng.random() < 0.8
    budget = max_num_seqs + rng.randint(0, 30)
    threshold = rng.choice([0, 3]) if chunked else 0
    budget = budget if chunked else max(budget, max_model_len)
    # From just enough for one request to plenty for all.
    most = sum(kind.most_blocks(max_model_len, 4, threshold or budget) for kind in attention)
    num_state_pages = rng.choice([0, 0, 1, 2, 5])
    engine = make_engine(
        1 + most + num_state_pages + rng.choice([0, 0, 1, 3, 10, 50]),
        tiers=tiers,
        attention=attention,
        max_model_len=max_model_len,
        watermark=rng.choice([0.0, 0.01, 0.2]),
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=threshold,
        reserve=rng.choice(["none", "prompt", "full"]),
        most_drafts=rng.choice([0, 0, 1, 3, 6]),
        num_state_pages=num_state_pages,
        state_interval=rng.choice([0, 4, 12]),
        **rng.choice(PRESSURES),
    )
    prompts: dict[str, tuple[list[int], int, int | None]] = {}
    spoilt: set[str] = set()
    documents = [[rng.randint(1, 49) for _ in range(max_model_len)] for _ in range(3)]
    for number in range(rng.randint(2, 12)):
        shared = rng.choice(documents)[: rng.randint(1, max_model_len - 2)]
        tokens = shared + [rng.randint(1, 49) for _ in range(rng.randint(0, 3))]
        tokens = tokens[: max_model_len - 1]
        name = str(number)
        add_family(rng, engine, prompts, name, tokens)
        for _ in range(rng.choice([0, 0, 1, 3])):
            step(rng, engine, spoilt, faults)
    for _ in range(3_000):
        if not engine.scheduler.requests and not (tiers and tiers.is_busy):
            break
        step(rng, engine, spoilt, faults)
    check_end(engine, prompts, spoilt, max_model_len, say)


def add_family(
    rng: random.Random,
    engine: Any,
    prompts: dict[str, tuple[list[int], int, int | None]],
    name: str,
    tokens: list[int],
) -> None:
    """A request, and sometimes forks of it."""
    prompts[name] = (tokens, rng.randint(1, 12), None)
    first = engine.add(name, tokens, max_tokens=prompts[name][1])
    for fork in range(rng.choice([0] * 9 + [1, 3, 7])):
        own = prompts[f"{name}-{fork}"] = (tokens, rng.randint(1, 12), rng.randint(1, 3))
        engine.add(f"{name}-{fork}", tokens, fork_of=first, max_tokens=own[1], seed=own[2])


def step(rng: random.Random, engine: Any, spoilt: set[str], faults: bool) -> None:
    """One turn of the engine's loop, with things that go wrong."""
    scheduler = engine.scheduler
    check_invariants(engine)
    if engine.tiers is not None and (rng.random() < 0.3 or not scheduler.has_runnable_work()):
        engine.tiers.tick()
    if not scheduler.has_runnable_work():
        # Only loads under way, or the answer "ask again", may hold everybody up.
        loading = engine.tiers is not None and engine.tiers.is_busy
        assert loading or not scheduler.requests or scheduler._retry_at is not None
        scheduler._retry_at = scheduler._retry_at and 0.0
        return
    luck = rng.random() if faults else 1.0
    if luck < 0.04 and scheduler.requests:
        victim = rng.choice(list(scheduler.requests))
        spoilt.add(victim)
        engine.take(scheduler.finish_requests([victim]))
    output = scheduler.schedule()
    if 0.04 <= luck < 0.08 and output.num_scheduled_tokens:
        if engine.num_state_pages:
            engine._restore_states(output)
        engine.follow(output)
        engine._store()
        spoilt.update(output.num_scheduled_tokens)
        spoilt.update(new.request_id for new in output.new_requests)
        engine.take(scheduler.fail_step(output, "boom"))
        return
    scheduled = list(output.num_scheduled_tokens)
    engine.bad = {rng.choice(scheduled)} if scheduled and 0.08 <= luck < 0.1 else set()
    spoilt.update(engine.bad)
    done = engine.run(output)
    if 0.1 <= luck < 0.12 and scheduled:
        spoilt.add(scheduled[0])
        engine.take(scheduler.finish_requests(scheduled[:1]))
    engine.take(scheduler.update_from_output(output, done))


def check_invariants(engine: Any) -> None:
    """References are tables, and what nobody holds is in the queue."""
    pool = engine.manager.pool
    references = [0] * pool.num_blocks
    states = engine.scheduler._states
    holders = states.requests
    kept = [each.progress.kept.holder for each in states.kept.ended]
    tables = {name: engine.manager.get_block_ids(name) for name in (*holders, *kept)}
    assert engine.manager._tables.keys() <= tables.keys(), "blocks are held that no request has"
    for of_groups in tables.values():
        for table in of_groups:
            for block in table:
                references[block] += block > 0
    if engine.manager.states is not None:
        for block in engine.manager.states.held:
            references[block.block_id] += 1
    # All pages of a block are held by the same requests.
    assert [block.ref_cnt for block in pool.blocks[1:] for _ in range(pool.width)] == references[
        1 : pool.num_usable + 1
    ]
    assert pool.num_free == references[1 : pool.num_usable + 1].count(0)
    queued = sorted(block.block_id for block in pool.free_queue)
    assert queued == [block.block_id for block in pool.blocks[1:] if not references[block.block_id]]
    assert len(states.running) <= engine.scheduler.config.max_num_seqs
    forking = [each for other in holders.values() for each in other.progress.forks]
    assert len(forking) == states.num_forking
    waiting = [*states.waiting, *states.skipped, *states.deferred, *forking]
    assert (
        len(waiting)
        == len(set(waiting))
        == states.num_unfinished - len(states.running) - states.num_loading
    )
    held = {request.request_id for request in waiting if tables[request.request_id][0]}
    assert held == {request.request_id for request in states.loaded}
    if engine.scheduler.config.reserve == "full":
        assert engine.scheduler.counts["preemptions"] == 0
        holders = [*states.running, *states.loaded, *states.loads.blocking]
        wanted = {each.request_id: each.max_num_tokens - 1 for each in holders}
        if not any(each.is_finished for each in states.loads.blocking):  # else one goes first
            spare = pool.num_free
            if engine.manager.states is not None:  # those are given up when room is lacking
                spare += sum(len(blocks) for _, blocks in engine.manager.states._uncached.values())
            assert engine.manager.num_reserved(wanted) <= spare


def check_end(
    engine: Any,
    prompts: dict[str, tuple[list[int], int, int | None]],
    spoilt: set[str],
    max_model_len: int,
    say: Any,
) -> None:
    assert engine.scheduler.requests == {}, "not everybody ended"
    assert engine.manager.pool.is_idle
    assert engine.manager.pool.num_free == engine.manager.pool.num_usable
    assert all(block.ref_cnt == 0 for block in engine.manager.pool.blocks)
    assert not engine.scheduler._states.requests
    assert engine.scheduler._states.loads.num_overlapped == 0
    assert not (engine.tiers and engine.tiers.overlapped)
    assert not engine.scheduler._states.num_forking
    assert not engine.manager.shared_tails.families
    for name, (tokens, max_tokens, own_seed) in prompts.items():
        told = engine.outputs[name]
        assert [output.finish_reason is not None for output in told].count(True) == 1
        assert told[-1].finish_reason is not None
        expected = say(tokens, max_tokens, max_model_len, seed=own_seed)
        said = engine.said(name)
        if name in spoilt:
            assert said == expected[: len(said)]
        else:
            assert said == expected
            assert told[0].num_cached_tokens == sum(told[0].cached_tokens_by_tier.values())
            assert told[0].num_cached_tokens < len(tokens) + max_tokens
    # The worker forgets everybody.
    engine.follow(engine.scheduler.schedule())
    assert engine.states == {}
