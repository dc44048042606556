# SPDX-License-Identifier: Apache-2.0
"""Answers that are drawn with drafts follow the distribution that they follow without.

The model is a table: what comes next depends on the last token alone, and on what the request
wishes. So the probability of every answer of three tokens is known, and the answers are counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from stratakv.engine.sampling.sampler import Sampler
from stratakv.engine.worker.speculation.drafted_rows import DraftedRows

from ...sampling.batches import added, row_of
from ...sampling.chi_square import assert_follows

WORDS = 5
LENGTH = 3  # tokens of an answer
PROMPT = (1,)
ROWS = 1024
ANSWERS = {"ci": 6 * ROWS, "long": 200 * ROWS}
TABLE = torch.tensor(
    [
        [0.3, 1.5, -0.4, 0.9, 0.0],
        [1.1, -0.7, 0.8, 0.2, 1.3],
        [-0.2, 0.6, 1.9, -1.0, 0.4],
        [0.7, 0.7, -0.3, 1.2, -0.9],
        [0.1, -0.5, 1.0, 0.3, 1.6],
    ]
)  # fmt: skip
DRAFTS = (4, 2, 2)  # at the places of an answer
PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": -0.3}


def step_probabilities(
    before: Sequence[int],
    *,
    temperature: float,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
) -> np.ndarray:
    """What comes after the prompt and these tokens, written down once more."""
    logits = TABLE[(*PROMPT, *before)[-1]].double().numpy().copy()
    for word in {*PROMPT, *before}:
        logits[word] *= 1 / repetition_penalty if logits[word] > 0 else repetition_penalty
    for word in set(before):
        logits[word] -= frequency_penalty * before.count(word) + presence_penalty
    odds = np.exp((logits - logits.max()) / temperature)
    odds /= odds.sum()
    kept, total = [], 0.0
    for word in np.argsort(-odds):
        if total < top_p:
            kept.append(word)
            total += odds[word]
    cut = np.zeros(WORDS)
    cut[kept] = odds[kept] / odds[kept].sum()
    return cut


def answer_probabilities(wishes: dict[str, Any]) -> torch.Tensor:
    found = []
    for answer in itertools.product(range(WORDS), repeat=LENGTH):
        chance = 1.0
        for place, word in enumerate(answer):
            chance *= step_probabilities(list(answer[:place]), **wishes)[word]
        found.append(chance)
    return torch.tensor(found, dtype=torch.float64)


class Drafting:
    """Requests that all have the same wishes, and drafts behind every token."""

    def __init__(self, wishes: dict[str, Any], most_drafts: int) -> None:
        self.sampler = Sampler(ROWS, WORDS, (), seed=7)
        self.rows = [row_of(row, wishes, PROMPT) for row in range(ROWS)]
        self.most_drafts = most_drafts
        self.num_accepted = 0

    def answers(self) -> np.ndarray:
        """The answers of all rows, each as a number."""
        self.sampler.apply_batch_update(added(*self.rows))
        outputs = [row.output_token_ids for row in self.rows]
        while any(len(output) < LENGTH for output in outputs):
            self.step(outputs)
        words = np.array([output[:LENGTH] for output in outputs])
        for output in outputs:
            output.clear()
        return words @ WORDS ** np.arange(LENGTH - 1, -1, -1)

    def step(self, outputs: list[list[int]]) -> None:
        going_on = [row for row, output in enumerate(outputs) if len(output) < LENGTH]
        drafts = []
        for row in going_on:
            at = len(outputs[row])
            drafts.append(list(DRAFTS[at : min(at + self.most_drafts, LENGTH - 1)]))
        drafted = rows_with(np.array(going_on), drafts)
        behind = [
            (*PROMPT, *outputs[row], *own[:offset])[-1]
            for row, own, offset in zip(
                drafted.rows, drafted.draft_token_ids, drafted.offsets, strict=True
            )
        ]
        sampled = self.sampler.sample(
            TABLE[behind].clone(), drafted.rows,
            offsets=drafted.offsets, drafts=drafted.draft_token_ids,
        )  # fmt: skip
        for row, tokens in zip(going_on, drafted.accept(sampled), strict=True):
            assert 1 <= len(tokens) <= 1 + self.most_drafts
            self.num_accepted += len(tokens) - 1
            outputs[row].extend(tokens)


def rows_with(rows: np.ndarray, drafts: list[list[int]]) -> DraftedRows:
    counts = np.array([1 + len(own) for own in drafts])
    firsts = np.cumsum(counts) - counts
    return DraftedRows(
        np.repeat(rows, counts),
        np.arange(counts.sum()) - np.repeat(firsts, counts),
        [own for own in drafts for _ in range(1 + len(own))],
        firsts,
        counts,
    )


@pytest.mark.parametrize(
    ("wishes", "most_drafts"),
    [
        ({"temperature": 1.0}, 1),
        ({"temperature": 1.0}, 2),
        ({"temperature": 0.6}, 2),
        ({"temperature": 2.0}, 2),
        ({"temperature": 1.0, "top_p": 0.7}, 2),
        ({"temperature": 0.9, **PENALTIES}, 2),
        ({"temperature": 1.2, "top_p": 0.8, **PENALTIES}, 1),
    ],
)
def test_answers_follow_their_distribution(
    wishes: dict[str, Any], most_drafts: int, scale: str
) -> None:
    drafting = Drafting(wishes, most_drafts)
    counts = np.zeros(WORDS**LENGTH, np.int64)
    for _ in range(ANSWERS[scale] // ROWS):
        counts += np.bincount(drafting.answers(), minlength=len(counts))
    assert drafting.num_accepted > counts.sum() // 10
    assert_follows(counts, answer_probabilities(wishes))


def test_a_bias_of_four_in_a_hundred_is_found() -> None:
    """The test itself: answers of a draft that is taken too often."""
    wishes = {"temperature": 1.0}
    expected = answer_probabilities(wishes)
    drafting = Drafting(wishes, 2)
    counts = np.zeros(WORDS**LENGTH, np.int64)
    for _ in range(ANSWERS["ci"] // ROWS):
        counts += np.bincount(drafting.answers(), minlength=len(counts))
    [likely] = (WORDS ** np.arange(LENGTH - 1, -1, -1)) @ np.array([DRAFTS]).T
    counts[likely] += counts.sum() // 25
    with pytest.raises(AssertionError):
        assert_follows(counts, expected)
