# SPDX-License-Identifier: Apache-2.0
"""Prompts that share beginnings like the branches of a tree, and an engine core that answers them.

A tree says when each of its requests comes, so two engines can be asked the same. what must not be
left inside it is looked for by `leftovers.py`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stratakv.engine.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from stratakv.engine.config.offload_config import OffloadConfig
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import AddRequest, TokenOutput
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams

from .leftovers import RunnerLook, check_nothing_left, check_references, is_busy
from .stepping import Driver
from .tiny_models import VOCAB

MAX_MODEL_LEN = 128
MAX_OUTPUT = 8

Answers = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Wish:
    """One request. It comes when all but `still_open` of those before it have been answered."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    still_open: int


@dataclass(frozen=True)
class Tree:
    """Requests in the order in which they come, and the engine that is to answer them."""

    wishes: tuple[Wish, ...]
    cache: CacheConfig
    scheduler: SchedulerConfig

    @property
    def blocks_of_longest(self) -> int:
        return MAX_MODEL_LEN // self.cache.block_size


def grow(rng: random.Random) -> Tree:
    """A tree of up to eight prompts, some of them asked twice, half of them greedily."""
    longest = MAX_MODEL_LEN - MAX_OUTPUT
    prompts: list[tuple[int, ...]] = [()]
    for _ in range(rng.randint(3, 8)):
        stem = rng.choice(prompts)
        stem = stem[: rng.randint(0, len(stem))] if rng.random() < 0.3 else stem
        text = stem + tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 50)))
        prompts.append(text[:longest])
    asked = [*prompts[1:], *rng.choices(prompts[1:], k=rng.randint(2, 5))]
    crowd = rng.choice([0, 2, 5])
    wishes = tuple(
        Wish(f"r{number}", prompt, draw_params(rng), rng.randint(0, crowd))
        for number, prompt in enumerate(asked)
    )
    size = rng.choice([2, 4, 8])
    num_seqs = rng.randint(1, 6)
    cache = CacheConfig(
        block_size=size, num_blocks=1 + MAX_MODEL_LEN // size + rng.choice([0, 2, 10])
    )
    scheduler = SchedulerConfig(
        max_num_batched_tokens=num_seqs + rng.choice([7, 40, 150]), max_num_seqs=num_seqs
    )
    return Tree(wishes, cache, scheduler)


def draw_params(rng: random.Random) -> SamplingParams:
    count = rng.randint(1, MAX_OUTPUT)
    if rng.random() < 0.5:
        return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return SamplingParams(
        max_tokens=count,
        temperature=rng.choice([0.7, 1.5, 3.0]),
        top_p=rng.choice([0.9, 1.0]),
        top_k=rng.choice([0, 20]),
        seed=rng.randrange(2**31),
        ignore_eos=True,
    )


def make_core(model: Path, tree: Tree, offload: OffloadConfig, executor: str = "uni") -> EngineCore:
    """The tree's engine, with these tiers."""
    return EngineCore(
        EngineConfig(
            model=ModelConfig(model, "tiny", dtype="float64", max_model_len=MAX_MODEL_LEN),
            cache=tree.cache,
            scheduler=tree.scheduler,
            offload=offload,
            num_threads=1,
            executor=executor,
        )
    )


class Asker:
    """Asks one core what a tree wants to know."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._answers: dict[str, list[int]] = {}
        self._open: set[str] = set()
        woken = threading.Event()
        core.set_wakeup(woken.set)
        self._driver = Driver(
            core.scheduler,
            lambda: self._take(core.step()),
            woken,
            longest_sleep=0.05,
            has_work=core.has_work,
        )

    def ask(self, tree: Tree) -> Answers:
        """What each request got. None of them may fail."""
        core = self._core
        waiting = list(tree.wishes)
        while waiting or self._open:
            while waiting and len(self._open) <= waiting[0].still_open:
                wish = waiting.pop(0)
                self._open.add(wish.name)
                packed = pack_token_ids(wish.prompt)
                self._take(core.add(AddRequest(wish.name, packed, wish.params)))
            self._driver.turn()
            check_references(core)
        return {name: tuple(token_ids) for name, token_ids in self._answers.items()}

    def calm_down(self, look: Callable[[EngineCore], RunnerLook] | None = None) -> None:
        """Let everything end that is under way, and look for what is left; with `look` at a model
        runner that lives elsewhere."""
        self._driver.calm_down(lambda: is_busy(self._core))
        check_nothing_left(self._core, look and look(self._core))

    def _take(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            self._answers.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                assert output.finish_reason == "length", output
                self._open.remove(output.request_id)
