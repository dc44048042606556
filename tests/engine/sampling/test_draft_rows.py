# SPDX-License-Identifier: Apache-2.0
"""A row of logits behind draft tokens gets what its request would get after really having them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from stratakv.engine.sampling import row_states
from stratakv.engine.sampling.sampler import Sampled, Sampler

from .batches import VOCAB, RandomBatch, added
from .processor_contract import draft_rows

MAX_ROWS = 6


def wishes_of(rng: random.Random) -> dict[str, Any]:
    """Any wish, alone or with others; the draws by a seed, since others have no second time."""
    wishes: dict[str, Any] = {"temperature": rng.choice([0.0, 0.5, 1.0, 3.0])}
    wishes["seed"] = rng.randrange(2**40)
    for name, values in {
        "top_k": (2, 5),
        "top_p": (0.5, 0.9),
        "min_p": (0.05, 0.5),
        "repetition_penalty": (0.5, 1.7),
        "presence_penalty": (-1.5, 2.0),
        "frequency_penalty": (-0.7, 1.1),
        "min_tokens": (2, 6),
        "logit_bias": ({4: 3.0}, {5: -100.0, 6: 1.5}),
        "bad_words_token_ids": (((4,), (5, 6)), ((6, 6, 8), (2, 4, 5, 6)), ((8,) * 4,)),
        "logprobs": (0, 3),
    }.items():
        if rng.random() < 0.4:
            wishes[name] = rng.choice(values)
    return wishes


def sampler() -> Sampler:
    return Sampler(MAX_ROWS, VOCAB, (2, 3), seed=0)


def entries(sampled: Sampled) -> list[Any]:
    logprobs = sampled.logprobs or [None] * len(sampled.token_ids)
    there = zip(sampled.is_finite, sampled.has_choice, logprobs, strict=True)
    return [
        (token if choice else None, finite, choice, one)
        for token, (finite, choice, one) in zip(sampled.token_ids, there, strict=True)
    ]


@pytest.mark.parametrize("chunk", [2**20, 2 * VOCAB])
def test_a_row_behind_drafts_is_as_if_they_were_there(chunk, rng, scale, monkeypatch):
    monkeypatch.setattr(row_states, "LOGITS_CHUNK_CPU", chunk)
    batch, together, differ = RandomBatch(rng, MAX_ROWS, VOCAB), sampler(), 0
    for _ in range(80 if scale == "ci" else 4000):
        together.apply_batch_update(batch.change([wishes_of(rng) for _ in range(3)]))
        rows, offsets, drafts = draft_rows(batch, rng)
        generator = torch.Generator().manual_seed(rng.randrange(2**32))
        logits = 3 * torch.randn(len(rows), VOCAB, generator=generator, dtype=torch.float64)
        if len(rows):
            logits[rng.randrange(len(rows))] = logits[0]
            found = entries(together.sample(logits.clone(), rows, offsets=offsets, drafts=drafts))
            plain = entries(together.sample(logits.clone(), rows))
            differ += found != plain
            for index, row in enumerate(rows.tolist()):
                one = batch.rows[row]
                output = [*one.output_token_ids, *drafts[index][: offsets[index]]]
                alone = sampler()
                alone.apply_batch_update(added(one._replace(row=0, output_token_ids=output)))
                sampled = alone.sample(logits[index : index + 1].clone(), np.array([0]))
                assert entries(sampled) == found[index : index + 1]
        batch.grow()
    assert differ > 10, "the draft tokens hardly ever mattered"


def test_offsets_of_zero_are_as_none(rng):
    """Draws without a seed among them: the generator is asked for the same numbers."""
    batch, one, other = RandomBatch(rng, MAX_ROWS, VOCAB), sampler(), sampler()
    for _ in range(40):
        update = batch.change([wishes_of(rng), {"temperature": 1.0}, {}])
        one.apply_batch_update(update)
        other.apply_batch_update(update)
        rows = np.array(sorted(batch.rows), np.int64)
        logits = torch.randn(len(rows), VOCAB, dtype=torch.float64)
        drafts = [[4, 5, 6]] * len(rows)
        expected = one.sample(logits.clone(), rows)
        got = other.sample(logits.clone(), rows, offsets=np.zeros_like(rows), drafts=drafts)
        assert entries(got) == entries(expected)
        batch.grow()


@pytest.mark.parametrize(
    ("offsets", "drafts", "words"),
    [
        ([0, 1], [[4]], "2 rows of logits need as many offsets and lists of draft tokens"),
        ([0], [[4], [4]], "not 1 and 2"),
        ([1, 1], None, "not 2 and 0"),
        ([0, 2], [[4], [4]], r"offsets \[0, 2\] for lists of \[1, 1\] draft tokens"),
        ([0, -1], [[4], [4]], r"offsets \[0, -1\]"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(offsets, drafts, words):
    one = sampler()
    with pytest.raises(ValueError, match=words):
        one.sample(
            torch.zeros(2, VOCAB), np.array([0, 0]), offsets=np.array(offsets), drafts=drafts
        )
