# SPDX-License-Identifier: Apache-2.0
"""Random lives in which the engine is paused and resumed in odd orders, with tiny pools and budgets
and tiers that hold most prompts: whoever has begun finishes in a pause of new requests."""

from __future__ import annotations

import random
from typing import Any

import pytest

from stratakv.engine.scheduler.scheduler import Pause

from .conftest import digest_of, fingerprint
from .dict_tiers import SIZE
from .test_random_lives import PRESSURES, add_family, check_end, check_invariants
from .test_random_lives import step as step_unpaused

CASES = 8


@pytest.mark.parametrize("case", range(CASES))
def test_random_pauses(
    case: int, seed: int, scale: str, make_engine: Any, make_tiers: Any, say: Any
) -> None:
    rng = random.Random(seed)
    for _ in range(10 if scale == "ci" else 2_000):
        check_life(rng, make_engine, make_tiers(rng), say)


def check_life(rng: random.Random, make_engine: Any, tiers: Any, say: Any) -> None:
    max_model_len = rng.randint(16, 48)
    max_num_seqs = rng.randint(1, 4)
    chunked = rng.random() < 0.8
    budget = max_num_seqs + rng.choice([0, 0, 1, 4, 20])
    engine = make_engine(
        1 + -(-max_model_len // SIZE) + rng.choice([0, 0, 1, 3, 10]),
        tiers=tiers,
        max_model_len=max_model_len,
        watermark=rng.choice([0.0, 0.2]),
        max_num_batched_tokens=budget if chunked else max(budget, max_model_len),
        max_num_seqs=max_num_seqs,
        enable_chunked_prefill=chunked,
        most_drafts=rng.choice([0, 0, 3]),
        **rng.choice(PRESSURES),
    )
    scheduler = engine.scheduler
    documents = [rng.choices(range(1, 50), k=max_model_len) for _ in range(2)]
    for document in documents:
        held = fingerprint(document)
        for index in range(max_model_len // SIZE):
            name = digest_of(document, index)
            engine.contents[name] = held[SIZE * index : SIZE * (index + 1)]
            tiers.kept[name + b"\0\0"] = engine.contents[name]
    faults = rng.random() < 0.5
    prompts: dict[str, tuple[list[int], int, int | None]] = {}
    spoilt: set[str] = set()
    for number in range(rng.randint(20, 60)):
        luck = rng.random()
        if luck < 0.35:
            tokens = rng.choice(documents)[: rng.randint(1, max_model_len - 2)]
            add_family(rng, engine, prompts, str(number), tokens)
        elif luck < 0.42:
            scheduler.pause(rng.choice(list(Pause)))
        elif luck < 0.5:
            scheduler.resume()
        elif luck < 0.55 and scheduler.requests:
            victim = rng.choice(list(scheduler.requests))
            spoilt.add(victim)
            engine.take(scheduler.finish_requests([victim]))
        elif luck < 0.6:
            scheduler.pause(Pause.NEW)
            for _ in range(1_500):
                if not begun(scheduler):
                    break
                step(rng, engine, spoilt, faults)
            assert not begun(scheduler), "who has begun does not end in a pause"
            scheduler.resume()
        for _ in range(rng.choice([0, 1, 1, 3])):
            step(rng, engine, spoilt, faults)
    scheduler.resume()
    for _ in range(4_000):
        if not scheduler.requests and not tiers.is_busy:
            break
        step(rng, engine, spoilt, faults)
    check_end(engine, prompts, spoilt, max_model_len, say)


def begun(scheduler: Any) -> list[Any]:
    running = scheduler._states.running
    return [r for r in scheduler.requests.values() if r.num_preemptions or r in running]


def step(rng: random.Random, engine: Any, spoilt: set[str], faults: bool) -> None:
    """One turn of the engine's loop, which in a pause may have nothing to do."""
    scheduler = engine.scheduler
    if scheduler.paused is not None and not scheduler.has_runnable_work():
        engine.tiers.tick()
        if not scheduler.has_runnable_work():
            check_invariants(engine)
            scheduler._retry_at = scheduler._retry_at and 0.0
            return
    step_unpaused(rng, engine, spoilt, faults)
