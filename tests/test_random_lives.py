# SPDX-License-Identifier: Apache-2.0
"""Random lives of a whole engine: everybody ends with the right tokens, and nothing is left.

Requests share prefixes, come and are aborted at any moment; pool, slab and SSD are too small for
them; stores, copies and the model fail; the engine is restarted on an SSD that was damaged. One or
two steps are in flight, an observer writes everything down, and the model runner lives here or in
another process, which may lie or be killed. The reference is transformers, in float64.
"""

from __future__ import annotations

import functools
import logging
import random
from pathlib import Path

import pytest

from .eagle_heads import make_eagle
from .engine.models.states.state_models import make_state_model
from .nursery_site.nursery_client import Nursery
from .other_process import OtherProcess
from .random_life import ENDS, MAX_MODEL_LEN, Life
from .random_wishes import OUTPUT_TOKENS, World, penalised_reference
from .stepping import noted
from .tiny_models import VOCAB, greedy_reference

LIVES = 16
# Of steps that overlap, in tests of so many.
OVERLAPPING_LIVES, LIVES_A_TEST = 120, 15
LIVES_OF_OTHER_PROCESSES = 8
GROUPED_LIVES = 5
STATE_LIVES = 4
# Some lives are over before the worker was to die in them.
LIVES_TO_DIE_IN = 8


def make_world(model: Path, num_prompts: int) -> World:
    """The model, and prompts that grow out of three documents, parting at any token."""
    rng = random.Random(7)
    longest = MAX_MODEL_LEN - OUTPUT_TOKENS
    documents = [[rng.randrange(3, VOCAB) for _ in range(longest)] for _ in range(3)]
    prompts = []
    for _ in range(num_prompts):
        text = rng.choice(documents)[: rng.randint(0, longest)]
        text = text + [rng.randrange(3, VOCAB) for _ in range(rng.randint(0, 6))]
        prompts.append(tuple(text[:longest] or [5]))

    @functools.cache
    def answer(prompt: tuple[int, ...], penalty: float) -> tuple[int, ...]:
        if penalty == 1.0:
            return tuple(greedy_reference(model, prompt, OUTPUT_TOKENS))
        return tuple(penalised_reference(model, prompt, OUTPUT_TOKENS, penalty))

    head = make_eagle(model / "head", model)
    return World(model, head, prompts, answer)


@pytest.fixture(scope="module")
def world(small_llama: Path, one_thread: None, scale: str) -> World:
    return make_world(small_llama, 40 if scale == "ci" else 300)


@pytest.mark.parametrize("number", range(LIVES))
def test_a_random_life(number: int, world: World, seed: int, scale: str, tmp_path: Path) -> None:
    for turn in range(1 if scale == "ci" else 400):
        live(world, seed + turn, tmp_path / str(turn))


@pytest.mark.parametrize("number", range(OVERLAPPING_LIVES // LIVES_A_TEST))
def test_lives_of_overlapping_steps(
    number: int, world: World, seed: int, scale: str, tmp_path: Path
) -> None:
    """What is asked gets the tokens of one step at a time, which are those of the reference."""
    for turn in range(LIVES_A_TEST if scale == "ci" else 20 * LIVES_A_TEST):
        live(world, seed + turn, tmp_path / str(turn), overlaps=True)


@pytest.mark.parametrize("number", range(LIVES_OF_OTHER_PROCESSES))
def test_a_random_life_with_the_worker_in_another_process(
    number: int, world: World, worker_nursery: Nursery, seed: int, scale: str, tmp_path: Path
) -> None:
    for turn in range(1 if scale == "ci" else 400):
        path = tmp_path / str(turn)
        live(world, seed + turn, path, OtherProcess(worker_nursery, path))


@pytest.mark.parametrize("has_process", [False, True], ids=["uni", "mp"])
@pytest.mark.parametrize("number", range(GROUPED_LIVES))
def test_a_random_life_of_two_cache_groups(
    number: int,
    has_process: bool,
    world: World,
    worker_nursery: Nursery,
    seed: int,
    scale: str,
    tmp_path: Path,
) -> None:
    for turn in range(1 if scale == "ci" else 400):
        path = tmp_path / str(turn)
        other = OtherProcess(worker_nursery, path) if has_process else None
        live(world, seed + turn, path, other, num_groups=2)


@pytest.fixture(scope="module")
def world_of_states(
    tmp_path_factory: pytest.TempPathFactory, one_thread: None, scale: str
) -> World:
    model = make_state_model(tmp_path_factory.mktemp("states"), "lfm2-state-last")
    return make_world(model, 40 if scale == "ci" else 300)


@pytest.mark.parametrize("has_process", [False, True], ids=["uni", "mp"])
@pytest.mark.parametrize("number", range(STATE_LIVES))
def test_a_random_life_of_layers_with_states(
    number: int,
    has_process: bool,
    world_of_states: World,
    worker_nursery: Nursery,
    seed: int,
    scale: str,
    tmp_path: Path,
) -> None:
    for turn in range(1 if scale == "ci" else 400):
        path = tmp_path / str(turn)
        other = OtherProcess(worker_nursery, path) if has_process else None
        live(world_of_states, seed + turn, path, other, overlaps=turn % 3 == 2)


@pytest.mark.parametrize("end", ENDS)
def test_a_random_life_that_the_worker_ends(
    end: str,
    world: World,
    worker_nursery: Nursery,
    seed: int,
    scale: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    died = 0
    for turn in range(LIVES_TO_DIE_IN if scale == "ci" else 400):
        path = tmp_path / str(turn)
        died += live(world, seed + turn, path, OtherProcess(worker_nursery, path), end).has_died
        if scale == "ci" and died:
            break
    assert died, "it lived for ever"


def live(
    world: World,
    seed: int,
    path: Path,
    other: OtherProcess | None = None,
    end: str = "",
    *,
    num_groups: int = 1,
    overlaps: bool = False,
) -> Life:
    """One life; a failure says which."""
    with pytest.MonkeyPatch.context() as monkeypatch, noted(f"this was the life of seed {seed}"):
        life = Life(world, seed, path, other, end, num_groups=num_groups, overlaps=overlaps)
        life.live(monkeypatch)
        return life
