# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities: of whom, how many, which rank, and never a number that JSON cannot hold."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from stratakv.engine.sampling import row_states
from stratakv.engine.sampling.logprob_tensors import (
    LOGPROB_FLOOR,
    prompt_logprobs,
    raw_logprobs,
)
from stratakv.engine.sampling.sampler import Sampled, Sampler

from .batches import VOCAB, added, position_logprobs, row_of

PROBABILITIES = torch.tensor([0.5, 0.2, 0.2, 0.1])
GREEDY = {"temperature": 0.0}


def sample(*requests: dict[str, Any], logits: torch.Tensor, order: list[int]) -> Sampled:
    sampler = Sampler(8, VOCAB, (2,), seed=5)
    sampler.apply_batch_update(added(*(row_of(row, one) for row, one in enumerate(requests))))
    return sampler.sample(logits[order], np.array(order))


def test_ranks_count_strictly_likelier_tokens():
    logprobs = raw_logprobs(PROBABILITIES.log().expand(4, -1))
    entries = position_logprobs(logprobs, torch.arange(4), [2, 0, 4, 9])
    assert [entry.rank for entry in entries] == [1, 2, 2, 4]
    assert [len(entry.token_ids) for entry in entries] == [3, 1, 5, 5]  # 9 of 4 are 4
    assert [len(entry.logprobs) for entry in entries] == [3, 1, 5, 5]
    assert entries[0].token_ids[:2] == [0, 0]  # itself, and again among the likeliest
    assert entries[3].token_ids[0] == entries[3].token_ids[4] == 3
    assert entries[2].logprobs == pytest.approx([math.log(p) for p in (0.2, 0.5, 0.2, 0.2, 0.1)])


def test_nobody_asks():
    logits = torch.randn(2, VOCAB)
    assert sample(GREEDY, GREEDY, logits=logits, order=[1, 0]).logprobs is None


def test_only_rows_that_ask_get_entries_and_as_many_as_they_ask():
    logits = torch.randn(4, VOCAB)
    expected = torch.log_softmax(logits, -1)
    requests = (GREEDY, {"logprobs": 3}, GREEDY | {"logprobs": 0}, {"temperature": 1.0})
    order = [3, 2, 1, 0]
    sampled = sample(*requests, logits=logits, order=order)
    assert sampled.logprobs is not None
    assert [entry is None for entry in sampled.logprobs] == [True, False, False, True]
    _, second, first, _ = sampled.logprobs
    assert first is not None and second is not None
    assert second.token_ids == [int(logits[2].argmax())] and second.rank == 1
    assert first.token_ids[0] == sampled.token_ids[2]
    assert first.token_ids[1:] == expected[1].topk(3).indices.tolist()
    assert first.logprobs == expected[1, first.token_ids].tolist()


def test_they_are_the_models_own_whatever_the_request_does_to_its_logits():
    wishes = {
        "logprobs": 4,
        "logit_bias": {3: 100.0},
        "repetition_penalty": 2.0,
        "bad_words_token_ids": ((4,),),
        "min_tokens": 5,
        "min_p": 0.5,
        "top_k": 2,
        "temperature": 0.3,
    }
    logits = torch.randn(2, VOCAB)
    expected = torch.log_softmax(logits, -1)
    sampled = sample(wishes, wishes | GREEDY, logits=logits, order=[0, 1])
    assert sampled.token_ids == [3, 3] and sampled.logprobs is not None
    for row, entry in enumerate(sampled.logprobs):
        assert entry is not None
        assert entry.token_ids == [3, *expected[row].topk(4).indices.tolist()]
        assert entry.logprobs == expected[row, entry.token_ids].tolist()
        assert entry.rank == int((expected[row] > expected[row, 3]).sum()) + 1


def test_prompt_logprobs_are_those_of_each_position():
    logits = torch.randn(50, VOCAB, dtype=torch.float64)
    token_ids = torch.randint(0, VOCAB, (50,), dtype=torch.int32)
    expected = torch.log_softmax(logits, -1)
    for i, entry in enumerate(prompt_logprobs(logits, token_ids, 2)):
        assert entry.token_ids == [int(token_ids[i]), *expected[i].topk(2).indices.tolist()]
        assert entry.logprobs == expected[i, entry.token_ids].tolist()
    assert prompt_logprobs(logits[:0], token_ids[:0], 2) == []
    assert [len(entry.token_ids) for entry in prompt_logprobs(logits, token_ids, 0)] == [1] * 50


def test_cutting_the_work_changes_nothing(monkeypatch):
    logits, token_ids = torch.randn(50, VOCAB), torch.randint(0, VOCAB, (50,))
    whole = prompt_logprobs(logits, token_ids, 3)
    monkeypatch.setattr(row_states, "LOGITS_CHUNK_CPU", 7 * VOCAB)
    assert prompt_logprobs(logits, token_ids, 3) == whole
    assert position_logprobs(raw_logprobs(logits), token_ids, [3] * 50) == whole


def test_half_precision_is_widened_before_the_softmax():
    logits = torch.randn(5, VOCAB).bfloat16()
    token_ids = torch.arange(5)
    assert prompt_logprobs(logits, token_ids, 3) == prompt_logprobs(logits.float(), token_ids, 3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, -1e30])
def test_what_has_no_number_is_the_floor(bad):
    logits = torch.randn(2, VOCAB)
    logits[0, 3] = bad
    first, second = prompt_logprobs(logits, torch.tensor([3, 3]), VOCAB)
    assert first.logprobs[0] == LOGPROB_FLOOR
    assert min(second.logprobs) > -100.0
    assert json.loads(msgspec.json.encode(first))[1] == first.logprobs
    assert 1 <= first.rank <= VOCAB
