# SPDX-License-Identifier: Apache-2.0
"""Made-up traces: the same for a seed, chained, and with the statistics they were asked for."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from stratakv.benchmarks.trace.formats import (
    AGENTS,
    CHAT,
    SHAPES,
    Quantiles,
    Shape,
    generate,
    read_trace,
)
from stratakv.benchmarks.trace.replay import replay, replay_opt
from stratakv.tiers.policies.lru import LruPolicy


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_is_made_up_can_be_read_as_a_trace(shape: Shape, tmp_path: Path, seed: int) -> None:
    made = generate(shape, 800, seed)
    path = tmp_path / "made.jsonl"
    with path.open("w") as file:
        for prompt in made.prompts:
            fields = {"timestamp": prompt.arrival_seconds * 1e3, "input_length": prompt.tokens,
                      "output_length": 1, "hash_ids": list(prompt.chain)}  # fmt: skip
            print(json.dumps(fields), file=file)
    again = read_trace(path)  # refuses what is not chained, in order or of a fitting length
    assert [p.chain for p in again.prompts] == [list(p.chain) for p in made.prompts]
    assert made == generate(shape, 800, seed) != generate(shape, 800, seed + 1)
    assert max(len(prompt.chain) for prompt in made.prompts) <= shape.max_blocks


def test_quantiles_are_those_asked_for(rng: random.Random) -> None:
    draws = sorted(Quantiles(123, 474).draw(rng) for _ in range(20_000))
    assert draws[10_000] == pytest.approx(123, rel=0.05)
    assert draws[18_000] == pytest.approx(474, rel=0.05)


def test_turns_go_on_as_often_as_asked_for(seed: int) -> None:
    """With no system prompt a session is known by its first block."""
    shape = dataclasses.replace(CHAT, system_blocks=0, continues_by_turn=(0.5, 0.0), branches=0.0,
                                has_partial_blocks=False, gap_seconds=Quantiles(1, 2))  # fmt: skip
    prompts = generate(shape, 6_000, seed).prompts
    sessions = len({prompt.chain[0] for prompt in prompts})
    assert len(prompts) / sessions == pytest.approx(1.5, rel=0.05)


def test_they_ask_of_a_cache_what_the_real_ones_ask(seed: int) -> None:
    """Chat: LRU is far from the best. Agents: nearly everything is hit, and LRU is close."""
    chat, agents = generate(CHAT, 6_000, seed), generate(AGENTS, 3_000, seed)
    five = {trace.name: trace.capacity_blocks(5) for trace in (chat, agents)}
    assert (
        replay_opt(chat, five["chat"]).hit_percent
        > 1.3 * replay(chat, LruPolicy(), five["chat"]).hit_percent
    )
    assert replay(agents, LruPolicy(), agents.num_blocks).hit_percent > 90
    assert 20 < replay(chat, LruPolicy(), chat.num_blocks).hit_percent < 50
