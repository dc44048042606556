# SPDX-License-Identifier: Apache-2.0
"""The sampler: exact choices, right distributions, draws that do not depend on the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stratakv.engine.batch.batch_update import AddedRow, BatchUpdate, MovedRow
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.sampling import row_states, truncation
from stratakv.engine.sampling.sampler import Sampled, Sampler, highest, uniform_of
from stratakv.engine.sampling.truncation import FIRST_CANDIDATES

from .batches import VOCAB, added, row_of
from .chi_square import assert_follows


def sampler_for(
    *requests: dict[str, Any], vocab: int = VOCAB, eos: tuple[int, ...] = (2,)
) -> tuple[Sampler, list[list[int]]]:
    """A sampler with one row for each request, and the output lists it watches."""
    sampler = Sampler(64, vocab, eos, seed=5)
    rows = [row_of(row, one) for row, one in enumerate(requests)]
    sampler.apply_batch_update(added(*rows))
    return sampler, [row.output_token_ids for row in rows]


def draw(sampler: Sampler, logits: torch.Tensor, rows: list[int] | None = None) -> list[int]:
    indices = np.arange(len(logits)) if rows is None else np.array(rows)
    sampled = sampler.sample(logits.clone(), indices)
    assert all(sampled.is_finite)
    return sampled.token_ids


def count_draws(params: dict[str, Any], logits: torch.Tensor, draws: int = 4000) -> np.ndarray:
    sampler, _ = sampler_for(*[params] * 40, vocab=len(logits))
    tokens = [t for _ in range(draws // 40) for t in draw(sampler, logits.expand(40, -1))]
    return np.bincount(tokens, minlength=len(logits))


LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, 1.5, -0.5, 0.8, -2.0, 0.1, 1.2, 0.6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_highest_is_found_by_blocks_as_by_torch(dtype, rng):
    vocab_size = 128 * 128 + 77
    logits = torch.randn(12, vocab_size, dtype=dtype).clamp_(max=3.0)
    places = [[5], [0, 9], [200, 130], [16_383], [16_384], [16_460, 7], [50, 16_400]]
    for row, highest_ones in enumerate(places):
        logits[row, highest_ones] = 9.0
    logits[7] = -torch.inf
    logits[8, 16_390] = logits[9, 300] = torch.nan
    logits[10, rng.randrange(vocab_size)] = torch.inf
    values, indices = highest(logits)
    expected = logits.max(dim=-1).values
    assert torch.equal(values.nan_to_num(nan=99.0), expected.nan_to_num(nan=99.0))
    for row in (*range(8), 10, 11):
        assert int(indices[row]) == int((logits[row] == values[row]).nonzero()[0])
    assert int(indices[8]) == 16_390 and int(indices[9]) == 300
    assert highest(logits[:, :100])[1].tolist() == logits[:, :100].argmax(dim=-1).tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_draws_follow_the_softmax(temperature):
    measured = count_draws({"temperature": temperature}, LOGITS)
    assert_follows(measured, torch.softmax(LOGITS.double() / temperature, -1))


def test_top_k_keeps_the_best():
    measured = count_draws({"top_k": 3}, LOGITS)
    kept = torch.where(LOGITS >= 1.2, LOGITS, -torch.inf)
    assert_follows(measured, torch.softmax(kept.double(), -1))


def test_top_p_keeps_the_fewest_that_reach_the_share():
    probabilities = torch.softmax(LOGITS.double(), -1)
    ordered = probabilities.sort(descending=True).values
    # Just above the sum of four: a fifth is needed.
    share = float(ordered[:4].sum()) + 1e-4
    measured = count_draws({"top_p": share}, LOGITS)
    kept = torch.where(probabilities >= ordered[4], LOGITS, -torch.inf)
    assert_follows(measured, torch.softmax(kept.double(), -1))


def test_top_p_counts_over_what_top_k_left():
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    # Of the best two, 0.4 is 57 %: enough for a share of 0.55, though not of the whole.
    measured = count_draws({"top_k": 2, "top_p": 0.55}, probabilities.log())
    assert measured.tolist() == [4000, 0, 0, 0]


def test_equal_logits_are_kept_together():
    logits = torch.tensor([1.0, 3.0, 1.0, 3.0, 3.0, 0.0])
    for params in ({"top_k": 2}, {"top_p": 0.4}):
        measured = count_draws(params, logits)
        assert_follows(measured, torch.tensor([0, 1, 0, 1, 1, 0]) / 3)


def test_top_p_looks_further_where_the_first_candidates_do_not_reach():
    vocab = 3 * FIRST_CANDIDATES
    flat = torch.zeros(vocab)
    flat[::2] = 1e-4  # half of them a little better, so that there is an order
    sampler, _ = sampler_for(*[{"top_p": 0.9}] * 64, vocab=vocab)
    seen = {t for _ in range(100) for t in draw(sampler, flat.expand(64, -1))}
    # All of the better half and, ties kept, of the other half too.
    assert len(seen) > 0.95 * vocab
    better = torch.zeros(vocab)
    better[::2] = 1.0
    share = 0.99 * float(torch.softmax(better, -1)[::2].sum())
    sampler, _ = sampler_for(*[{"top_p": share}] * 64, vocab=vocab)
    seen = {t for _ in range(100) for t in draw(sampler, better.expand(64, -1))}
    assert all(t % 2 == 0 for t in seen) and len(seen) > FIRST_CANDIDATES


def test_limits_that_leave_everything_or_one_token():
    everything = {"top_k": 10**6, "top_p": 1.0}
    assert_follows(count_draws(everything, LOGITS), torch.softmax(LOGITS.double(), -1))
    for params in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30}):
        assert count_draws(params, LOGITS, 80)[2] == 80


def test_greedy_and_random_rows_share_a_batch():
    sampler, _ = sampler_for(
        {"temperature": 0.0}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.0, "top_k": 3}
    )
    logits = torch.stack([LOGITS, LOGITS, -LOGITS])
    seen = [draw(sampler, logits) for _ in range(20)]
    assert {(a, c) for a, _, c in seen} == {(2, 8)}


def test_seeded_numbers_are_uniform_and_unrelated():
    numbers = np.array([[uniform_of(seed, i) for i in range(60)] for seed in range(-30, 30)])
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert np.abs(counts - 360).max() < 6 * np.sqrt(360)
    for shifted in (numbers[:, 1:] - numbers[:, :-1], numbers[1:] - numbers[:-1]):
        # The difference of two independent uniform numbers has variance 1/6 and mean 0.
        assert abs(shifted.mean()) < 0.03 and abs(shifted.var() - 1 / 6) < 0.02
    assert uniform_of(7, 3) == uniform_of(7, 3) != uniform_of(2**32 + 7, 3)


def test_unseeded_rows_differ_from_each_other():
    sampler, _ = sampler_for(*[{"temperature": 1.0}] * 40)
    assert len(set(draw(sampler, LOGITS.expand(40, -1)))) > 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_token_left_is_named(temperature):
    everything = tuple((token,) for token in range(VOCAB))
    wishes = {"temperature": temperature, "bad_words_token_ids": everything, "logprobs": 1}
    sampler, _ = sampler_for({"temperature": temperature, "top_k": 1}, wishes)
    sampled = sampler.sample(torch.stack([LOGITS, LOGITS]), np.arange(2))
    assert sampled.is_finite == [True, True] and sampled.has_choice == [True, False]
    assert sampled.token_ids[0] == 2 and 0 <= sampled.token_ids[1] < VOCAB


def test_greedy_rows_obey_biases_bans_and_penalties():
    greedy = {"temperature": 0.0}
    sampler, outputs = sampler_for(
        greedy | {"logit_bias": {8: 5.0}},
        greedy | {"bad_words_token_ids": ((2,), (1, 5))},
        greedy | {"frequency_penalty": 0.3},
        greedy | {"presence_penalty": 2.0},
        greedy | {"repetition_penalty": 2.0},
        greedy | {"min_p": 1.0, "top_k": 1, "top_p": 0.1},
    )
    seen = []
    for _ in range(3):
        seen.append(draw(sampler, LOGITS.expand(6, -1)))
        for output, token in zip(outputs, seen[-1], strict=True):
            output.append(token)
    # The logits are 2.0 of token 2, 1.5 of 5, 1.2 of 10, 1.0 of 4. The prompt is token 1.
    by_row = list(zip(*seen, strict=True))
    assert by_row[0] == (8, 8, 8)
    assert by_row[1] == (10, 5, 5)
    assert by_row[2] == (2, 2, 5)
    assert by_row[3] == by_row[4] == (2, 5, 10)
    assert by_row[5] == (2, 2, 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_endings_are_banned_until_min_tokens(temperature):
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, [2, 4]] = 10.0  # the end of text and a stop token
    logits[0, 7] = 0.0
    params = {"temperature": temperature, "min_tokens": 2, "stop_token_ids": (4, 999), "seed": 3}
    sampler, [output] = sampler_for(params)
    for _ in range(2):
        token = draw(sampler, logits)[0]
        assert token not in (2, 4)
        output.append(token)
    assert draw(sampler, logits)[0] in (2, 4)


def test_a_request_that_ignores_the_end_may_sample_it():
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 50.0
    sampler, _ = sampler_for({"temperature": 0.0, "min_tokens": 5, "ignore_eos": True})
    assert draw(sampler, logits) == [2]


def test_rows_follow_moves_and_removals():
    sampler, outputs = sampler_for(
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.0, "min_tokens": 3},
        {"temperature": 5.0, "seed": 9},
    )
    logits = torch.stack([LOGITS] * 4)
    alone = draw(sampler, logits[:1], rows=[3])
    # Row 0 goes and row 3 moves into it; a new request takes row 3.
    greedy = AddedRow(3, SamplingParams(temperature=0.0), np.array([1], np.int32), [])
    sampler.apply_batch_update(BatchUpdate(3, (0,), (), [MovedRow(3, 0)]))
    sampler.apply_batch_update(BatchUpdate(4, (), [greedy], ()))
    assert draw(sampler, logits[:1], rows=[0]) == alone
    assert draw(sampler, logits[:1], rows=[3]) == [2]
    # Row 1 goes; row 3 moves into it, row 2 stays, and a new request takes row 3.
    new = AddedRow(3, SamplingParams(temperature=0.0), np.array([1], np.int32), [])
    sampler.apply_batch_update(BatchUpdate(3, (1,), (), [MovedRow(3, 1)]))
    sampler.apply_batch_update(BatchUpdate(4, (), [new], ()))
    assert draw(sampler, logits[1:], rows=[1, 2, 3]) == [2, 5, 2]
    sampler.apply_batch_update(BatchUpdate(3, (), (), [MovedRow(2, 1)]))
    assert draw(sampler, logits[:1], rows=[1]) == [5]
    # What a row held is gone once another request has it.
    sampler.apply_batch_update(BatchUpdate(3, (), [new._replace(row=1), new._replace(row=0)], ()))
    assert draw(sampler, logits[:2], rows=[0, 1]) == [2, 2]
    assert outputs == [[], [], [], []]


def test_rows_that_are_not_finite_are_named_and_harm_no_other():
    sampler, _ = sampler_for(*[{"temperature": 1.0, "top_p": 0.9, "top_k": 1}] * 4)
    logits = torch.stack([LOGITS] * 4)
    logits[0, 3] = torch.nan
    logits[2, 5] = torch.inf
    logits[3, 5] = -torch.inf
    sampled = sampler.sample(logits, np.arange(4))
    assert sampled.is_finite == [False, True, False, False]
    assert sampled.token_ids[1] == 2
    assert all(0 <= token < VOCAB for token in sampled.token_ids)


def test_half_precision_logits_are_widened():
    sampler, _ = sampler_for({"temperature": 1.0, "seed": 1})
    assert 0 <= draw(sampler, LOGITS.bfloat16()[None])[0] < VOCAB


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-40, 1e-38, 1e-30])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    sampler, _ = sampler_for({"temperature": temperature}, {"temperature": 1.0, "top_k": 1})
    assert draw(sampler, LOGITS.expand(2, -1)) == [2, 2]


@pytest.mark.parametrize("at_once", [2**20, 1])
def test_rows_drawn_again_after_the_wait_are_those_that_are_drawn_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU one sees only with the answer that top-p needed more candidates."""
    monkeypatch.setattr(row_states, "LOGITS_CHUNK_CPU", at_once)
    vocab, shares = 3 * FIRST_CANDIDATES, (0.97, 0.3, 1.0) * 4
    wishes: list[dict[str, Any]] = [
        *({"temperature": 1.0, "seed": i, "top_p": share} for i, share in enumerate(shares)),
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3, "top_k": 40, "top_p": 0.5},
    ]
    wishes = [wish | {"logprobs": 2} for wish in wishes]
    logits = torch.randn(len(wishes), vocab) * 0.1
    logits[4] *= 200  # whose first candidates are enough

    def run() -> Sampled:
        sampler = Sampler(64, vocab, (2,), seed=5)
        sampler.apply_batch_update(added(*(row_of(row, one) for row, one in enumerate(wishes))))
        return sampler.sample(logits.clone(), np.arange(len(wishes)))

    at_first = run()
    monkeypatch.setattr(truncation, "is_free_to_look", lambda device: False)
    again = run()
    assert again == at_first
    assert sum(token_id > 0 for token_id in again.token_ids) > 8
