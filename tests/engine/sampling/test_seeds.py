# SPDX-License-Identifier: Apache-2.0
"""A seeded request draws the same tokens in any batch, in any row, after moves and preemptions."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.sampling import row_states
from stratakv.engine.sampling.sampler import Sampler
from stratakv.engine.worker.block_table import BlockTable, MultiGroupBlockTable
from stratakv.engine.worker.input_batch import InputBatch, WorkerRequest

MAX_ROWS, VOCAB, LENGTH, STEPS = 6, 300, 200, 40

WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 3.0, "top_p": 0.9},
    {"top_k": 40, "min_p": 0.01, "logit_bias": {7: 2.0}},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "temperature": 2.0},
    {"bad_words_token_ids": ((5,), (6, 7)), "min_tokens": 30, "top_p": 0.8, "top_k": 100},
]
OTHERS = [*WISHES, {"temperature": 0.0}, {"seed": 42}, {"temperature": 0.0, "logprobs": 3}]


def logits_of(request: WorkerRequest) -> torch.Tensor:
    """Like a model's: they depend on the text alone."""
    text = hash((*request.prompt_token_ids.tolist(), *request.output_token_ids))
    generator = torch.Generator().manual_seed(text % 2**63)
    return 3 * torch.randn(VOCAB, generator=generator)


class Life:
    """A sampler behind a real batch, and a followed request in it."""

    def __init__(self, params: SamplingParams) -> None:
        table = BlockTable(MAX_ROWS, LENGTH, 1)
        self.batch = InputBatch(MAX_ROWS, LENGTH, MultiGroupBlockTable([table]))
        self.sampler = Sampler(MAX_ROWS, VOCAB, (2,))
        self.followed = WorkerRequest("followed", np.array([3, 4, 5], np.int32), params)
        self.seen_rows: set[int] = set()

    def add(self, request: WorkerRequest) -> None:
        self.batch.add(request, (list(range(request.num_tokens)),), 0)

    def step(self, rows: list[int]) -> None:
        """Sample for these rows, in this order."""
        requests = [one for row in rows if (one := self.batch.requests[row]) is not None]
        logits = torch.stack([logits_of(one) for one in requests])
        tokens = self.sampler.sample(logits, np.array(rows)).token_ids
        self.batch.take_tokens(self.batch.expect_tokens(np.array(rows)), tokens)

    def finish(self) -> None:
        update = self.batch.condense_rows()
        if update is not None:
            self.sampler.apply_batch_update(update)


def alone(params: SamplingParams) -> list[int]:
    life = Life(params)
    life.add(life.followed)
    life.finish()
    for _ in range(STEPS):
        life.step([0])
    return life.followed.output_token_ids


def in_company(params: SamplingParams, rng: random.Random) -> list[int]:
    life, count = Life(params), 0
    batch, followed = life.batch, life.followed
    while len(followed.output_token_ids) < STEPS:
        gone = [name for name in batch.row_of if rng.random() < 0.15]  # the followed one too
        for name in gone:
            batch.remove_request(name)
        while len(batch) < MAX_ROWS and rng.random() < 0.7:
            if "followed" not in batch.row_of and rng.random() < 0.5:
                life.add(followed)
                continue
            count += 1
            wishes = SamplingParams(max_tokens=LENGTH, **rng.choice(OTHERS))
            life.add(WorkerRequest(f"other {count}", np.array([count], np.int32), wishes))
        life.finish()
        if len(batch):
            life.seen_rows.add(batch.row_of.get("followed", 0))
            life.step(rng.sample(range(len(batch)), rng.randint(1, len(batch))))
    assert len(life.seen_rows) > 3
    return followed.output_token_ids[:STEPS]


@pytest.mark.parametrize("wishes", WISHES)
def test_a_seed_gives_the_same_tokens_in_any_batch(wishes, rng, monkeypatch):
    params = SamplingParams(max_tokens=LENGTH, seed=42, **wishes)
    expected = alone(params)
    assert len(set(expected)) > 10
    assert in_company(params, rng) == expected
    monkeypatch.setattr(row_states, "LOGITS_CHUNK_CPU", 2 * VOCAB)
    assert in_company(params, rng) == expected
    assert alone(SamplingParams(max_tokens=LENGTH, seed=43, **wishes)) != expected
