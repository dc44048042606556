# SPDX-License-Identifier: Apache-2.0
"""Every built-in logits processor keeps the promise, and the promise notices what breaks it."""

from __future__ import annotations

from typing import Any

import pytest

from stratakv.engine.sampling.processors.base import LogitsProcessor
from stratakv.engine.sampling.processors.builtin import (
    BadWords,
    LogitBias,
    MinP,
    MinTokens,
    Penalties,
)
from stratakv.engine.sampling.sampler import BUILT_IN

from .processor_contract import check_processor

UNKNOWN = 999  # beyond the vocabulary

WISHES: dict[type[LogitsProcessor], list[dict[str, Any]]] = {
    MinTokens: [
        {"min_tokens": 4},
        {"min_tokens": 7, "stop_token_ids": (9, UNKNOWN, -1)},
        {"min_tokens": 6, "stop_token_ids": (11,), "ignore_eos": True},
    ],
    BadWords: [
        {"bad_words_token_ids": ((7,), (UNKNOWN,), (-1,))},
        {"bad_words_token_ids": tuple((6, token) for token in range(10))},
        {"bad_words_token_ids": ((6, 8), (5, 6, 8), (4, 5, 6, 5, 6, 9), (UNKNOWN, 6, 1))},
    ],
    LogitBias: [
        {"logit_bias": ((4, 2.5), (UNKNOWN, 9.0), (-1, 9.0))},
        {"logit_bias": ((4, -100.0), (7, 100.0), (4, 50.0))},
    ],
    Penalties: [
        {"repetition_penalty": 1.3},
        {"presence_penalty": -1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 0.8, "presence_penalty": 0.3, "frequency_penalty": -0.2},
    ],
    MinP: [{"min_p": 0.5}, {"min_p": 0.1, "temperature": 0.7}, {"min_p": 1.0}],
}


def test_every_built_in_processor_is_here():
    assert set(WISHES) == set(BUILT_IN)


@pytest.mark.parametrize("processor", BUILT_IN)
def test_the_promise(processor, rng, scale):
    check_processor(processor, WISHES[processor], rng, steps=150 if scale == "ci" else 20_000)


class Stays(LogitBias):
    """Does not follow moves."""

    def update_state(self, update: Any) -> None:
        self._states.update(type(update)(update.batch_size, update.removed, update.added, ()))


class Keeps(MinTokens):
    """Keeps what was removed."""

    def update_state(self, update: Any) -> None:
        self._states.update(type(update)(update.batch_size, (), update.added, update.moved))


class Spills(LogitBias):
    """Changes rows that asked for nothing."""

    def apply(self, logits: Any, rows: Any) -> Any:
        return super().apply(logits, rows).mul_(1.0000001)


class Lifts(Penalties):
    """Makes banned tokens possible again."""

    def apply(self, logits: Any, rows: Any) -> Any:
        return super().apply(logits, rows).clamp_(min=-1e9)


class Recalls(Penalties):
    """Counts a token only when it is told of a row."""

    def apply(self, logits: Any, rows: Any) -> Any:
        for _, tokens in self._states.of(rows):
            tokens._num_counted = len(tokens._output_token_ids)
        return super().apply(logits, rows)


@pytest.mark.parametrize("broken", [Stays, Keeps, Spills, Lifts, Recalls])
def test_the_contract_notices(broken, rng):
    with pytest.raises(AssertionError):
        check_processor(broken, WISHES[broken.__base__], rng)
