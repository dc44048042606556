# SPDX-License-Identifier: Apache-2.0
"""What a request of a random life asks of the sampler, and what it must get for it.

Greedy all of them, so that transformers can say which tokens must come: plain, with a repetition
penalty, or forced by a bias.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.request.sampling_params import SamplingParams

from .tiny_models import VOCAB, load_reference

OUTPUT_TOKENS = 10
PENALTY = 1.7

# (prompt, repetition penalty) -> the first OUTPUT_TOKENS tokens of its answer
Reference = Callable[[tuple[int, ...], float], Sequence[int]]


@dataclass(frozen=True)
class World:
    """What lives have in common."""

    model: Path
    head: Path  # an EAGLE head of the model
    prompts: Sequence[tuple[int, ...]]
    answer: Reference

    @property
    def has_states(self) -> bool:
        return load_model_spec(self.model).state is not None

    def state_pages(self, block_size: int) -> int:
        """The pages of a checkpoint of states, in blocks of so many tokens."""
        spec = load_model_spec(self.model)
        if spec.state is None:
            return 0
        page_bytes = spec.layout(block_size, "float64").page_bytes
        return -(-spec.state.slot_bytes("float64") // page_bytes)


def draw_params(
    world: World, prompt: tuple[int, ...], rng: random.Random
) -> tuple[SamplingParams, list[int]]:
    """What is asked for, and the tokens that must come."""
    count = rng.randint(1, OUTPUT_TOKENS)
    asked: dict[str, Any] = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True}
    kind = rng.random()
    if kind < 0.1:
        token = rng.randrange(VOCAB)
        asked["logit_bias"] = {token: 100.0}
        expected = [token] * count
    else:
        penalty = PENALTY if kind < 0.2 else 1.0
        asked["repetition_penalty"] = penalty
        expected = list(world.answer(prompt, penalty))[:count]
    if rng.random() < 0.2:
        stop = rng.choice(expected)
        asked["stop_token_ids"] = (stop,)
        expected = expected[: expected.index(stop) + 1]
    if rng.random() < 0.2:
        asked["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.1:
        asked["prompt_logprobs"] = rng.randint(0, 3)
    return SamplingParams(**asked), expected


@torch.inference_mode()
def penalised_reference(
    model: Path, prompt: Sequence[int], num_tokens: int, penalty: float
) -> list[int]:
    """transformers' greedy answer where tokens that were there before are made less likely."""
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = load_reference(model)(torch.tensor([ids])).logits[0, -1]
        seen = torch.tensor(sorted(set(ids)))
        old = logits[seen]
        logits[seen] = torch.where(old > 0, old / penalty, old * penalty)
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]
