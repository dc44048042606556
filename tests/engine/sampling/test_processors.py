# SPDX-License-Identifier: Apache-2.0
"""Built-in logits processors one by one: edges that random trials do not reach."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stratakv.engine.sampling.processor_set import LogitsRows, ProcessorSet
from stratakv.engine.sampling.processors.base import LogitsProcessor, ProcessorContext
from stratakv.engine.sampling.processors.builtin import BadWords, LogitBias, MinTokens, Penalties

from .batches import VOCAB, added, row_of

CONTEXT = ProcessorContext(max_rows=4, vocab_size=VOCAB, eos_token_ids=(2,))


def with_row(
    kind: type[LogitsProcessor], wishes: dict[str, Any], prompt: list[int] | None = None
) -> tuple[LogitsProcessor, list[int]]:
    """A processor of one row, and its growing output."""
    processor = kind(CONTEXT)
    row = row_of(0, wishes, [1] if prompt is None else prompt)
    processor.update_state(added(row))
    return processor, row.output_token_ids


def changed(processor: LogitsProcessor, value: float = 1.0) -> dict[int, float]:
    """What becomes of logits that are all `value`, where it is something else."""
    result = processor.apply(torch.full((1, VOCAB), value), np.array([0]))[0]
    return {i: x for i, x in enumerate(result.tolist()) if x != value}


BANNED = float("-inf")


def test_min_tokens_is_done_once_the_output_is_long_enough():
    processor, output = with_row(MinTokens, {"min_tokens": 2, "stop_token_ids": (5,)})
    for token in (7, 8):
        assert changed(processor) == {2: BANNED, 5: BANNED}
        output.append(token)
    assert changed(processor) == {}
    assert not processor.is_active


@pytest.mark.parametrize(
    "wishes",
    [{"min_tokens": 3, "ignore_eos": True}, {"stop_token_ids": (5,)}, {"min_tokens": 0}],
)
def test_min_tokens_has_nothing_to_ban(wishes):
    processor, _ = with_row(MinTokens, wishes)
    assert not processor.is_active


def test_a_request_that_returns_has_its_minimum_behind_it():
    processor = MinTokens(CONTEXT)
    processor.update_state(added(row_of(0, {"min_tokens": 3}, output=(4, 5, 6))))
    assert not processor.is_active


def test_biases_of_one_token_add_up():
    processor, _ = with_row(LogitBias, {"logit_bias": ((3, 1.5), (4, -2.0), (3, 0.25))})
    assert changed(processor) == {3: 2.75, 4: -1.0}


def test_a_bias_lifts_no_ban():
    processor, _ = with_row(LogitBias, {"logit_bias": {3: 100.0}})
    assert changed(processor, BANNED) == {}


def test_bad_words_follow_prompt_and_output():
    sequences = ((3,), (1, 4), (1, 5, 6), (0, 1, 7), (1, 5, 6, 8))
    processor, output = with_row(BadWords, {"bad_words_token_ids": sequences}, prompt=[0, 1])
    assert set(changed(processor)) == {3, 4, 7}
    output.append(5)
    assert set(changed(processor)) == {3, 6}
    output.append(6)
    assert set(changed(processor)) == {3, 8}
    output.append(1)
    assert set(changed(processor)) == {3, 4}


def test_a_bad_sequence_longer_than_the_text_waits():
    processor, output = with_row(BadWords, {"bad_words_token_ids": ((9,) * 5,)}, prompt=[9])
    for _ in range(3):
        assert changed(processor) == {}
        output.append(9)
    assert set(changed(processor)) == {9}


def test_bad_words_after_no_prompt():
    processor, output = with_row(BadWords, {"bad_words_token_ids": ((1, 2), (3,))}, prompt=[])
    assert set(changed(processor)) == {3}
    output.append(1)
    assert set(changed(processor)) == {2, 3}


@pytest.mark.parametrize("kind", [BadWords, LogitBias, Penalties])
def test_only_unknown_ids_are_as_good_as_none(kind):
    wishes = {
        BadWords: {"bad_words_token_ids": ((VOCAB,), (1, -1), (VOCAB, 1))},
        LogitBias: {"logit_bias": {VOCAB: 5.0, -1: 5.0}},
        Penalties: {"repetition_penalty": 2.0},
    }[kind]
    processor, output = with_row(kind, wishes, prompt=[VOCAB, -1, VOCAB + 5])
    output += [VOCAB + 1, -3]
    assert changed(processor) == {}


def test_penalties_grow_with_the_output():
    wishes = {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    processor, output = with_row(Penalties, wishes, prompt=[7, 7, 9])
    assert changed(processor) == {7: 0.5, 9: 0.5}
    assert changed(processor, -1.0) == {7: -2.0, 9: -2.0}
    output += [7, 4, 4]
    assert changed(processor) == {7: 0.5 - 0.75, 9: 0.5, 4: 0.5 - 1.0}
    output += [4]
    assert changed(processor) == {7: 0.5 - 0.75, 9: 0.5, 4: 0.5 - 1.25}
    assert changed(processor) == {7: 0.5 - 0.75, 9: 0.5, 4: 0.5 - 1.25}  # nothing counted twice


def test_presence_and_frequency_leave_the_prompt_alone():
    processor, output = with_row(Penalties, {"presence_penalty": 1.0}, prompt=[3, 4])
    assert changed(processor) == {}
    output.append(4)
    assert changed(processor) == {4: 0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-40])
def test_the_smallest_repetition_penalty_leaves_finite_logits(penalty, dtype):
    processor, _ = with_row(Penalties, {"repetition_penalty": penalty}, prompt=[0, 1, 2])
    logits = torch.tensor([[30.0, 0.0, -1.0] + [1.0] * (VOCAB - 3)], dtype=dtype)
    result = processor.apply(logits, np.array([0]))
    assert bool(torch.isfinite(result).all()) and result.argmax() == 0


def test_penalties_of_more_tokens_than_the_first_room():
    processor = Penalties(ProcessorContext(1, 5000))
    row = row_of(0, {"frequency_penalty": 1.0})
    processor.update_state(added(row))
    logits = torch.zeros(1, 5000)
    for start in range(0, 3000, 150):
        row.output_token_ids.extend(range(start, start + 150))
        row.output_token_ids.extend(range(0, start, 7))
        processor.apply(torch.zeros(1, 5000), np.array([0]))
    counts = np.bincount(row.output_token_ids, minlength=5000)
    assert (processor.apply(logits, np.array([0]))[0].numpy() == -counts).all()


def test_penalties_see_the_signs_that_biases_leave():
    wishes = {"logit_bias": {3: -3.0, 4: -3.0}, "repetition_penalty": 2.0}
    processors = ProcessorSet.built_in(CONTEXT)
    processors.update_state(added(row_of(0, wishes, prompt=[3])))
    logits = processors.before_choice(torch.ones(1, VOCAB), LogitsRows(np.array([0])))
    assert logits[0, [2, 3, 4]].tolist() == [1.0, -4.0, -2.0]


def test_only_what_keeps_the_likeliest_waits_for_the_temperature():
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    processors = ProcessorSet.built_in(CONTEXT)
    processors.update_state(added(row_of(0, {"min_p": 0.5, "logit_bias": {3: 9.0}})))
    before = processors.before_choice(logits.clone(), LogitsRows(np.array([0])))
    assert before[0, :5].tolist() == [0.0, 1.0, 2.0, 12.0, 4.0]
    after = processors.after_temperature(before.clone(), LogitsRows(np.array([0])))
    assert (after[0] > -torch.inf).nonzero().flatten().tolist() == [3]
    assert after[0, 3] == 12.0
