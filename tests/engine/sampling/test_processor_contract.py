# SPDX-License-Identifier: Apache-2.0
"""Every built-in logits processor keeps the promise, and the promise notices what breaks it."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from stratakv.engine.sampling.processor_set import BUILT_IN
from stratakv.engine.sampling.processors.base import LogitsProcessor
from stratakv.engine.sampling.processors.builtin import (
    BadWords,
    LogitBias,
    MinP,
    MinTokens,
    Penalties,
)
from stratakv.engine.sampling.processors.thinking import ThinkingBudget

from ...pages import find_block
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
    ThinkingBudget: [
        {
            "thinking_token_budget": budget,
            "reasoning_start_token_ids": start,
            "reasoning_end_token_ids": end,
        }
        for budget, start, end in [(2, (4,), (8,)), (0, (5, 6), (6, 9)), (3, (4, 5), (8, 9, 8))]
    ],
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

    def apply(self, logits: Any, rows: Any, *drafts: Any) -> Any:
        return super().apply(logits, rows, *drafts).mul_(1.0000001)


class Lifts(Penalties):
    """Makes banned tokens possible again."""

    def apply(self, logits: Any, rows: Any, *drafts: Any) -> Any:
        return super().apply(logits, rows, *drafts).clamp_(min=-1e9)


class Recalls(Penalties):
    """Counts a token only when it is told of a row."""

    def apply(self, logits: Any, rows: Any, *drafts: Any) -> Any:
        for _, tokens in self._states.of(rows):
            tokens._num_counted = len(tokens._output_token_ids)
        return super().apply(logits, rows, *drafts)


class Deaf(BadWords):
    """Does not hear of draft tokens."""

    def apply(self, logits: Any, rows: Any, *drafts: Any) -> Any:
        return super().apply(logits, rows)


class RunsAhead(Penalties):
    """Takes the draft tokens behind a row for ones before it."""

    def apply(self, logits: Any, rows: Any, offsets: Any = None, drafts: Any = None) -> Any:
        if offsets is not None:
            offsets = np.array([len(tokens) for tokens in drafts])
        return super().apply(logits, rows, offsets, drafts)


class Believes(Penalties):
    """Keeps draft tokens as if they were there to stay."""

    def apply(self, logits: Any, rows: Any, offsets: Any = None, drafts: Any = None) -> Any:
        for index, tokens in self._states.of(rows) if offsets is not None else ():
            for token in drafts[index][: offsets[index]]:
                tokens._output_token_ids.append(token)
        return super().apply(logits, rows)


class Ends(MinTokens):
    """Forgets a minimum that draft tokens reach."""

    def apply(self, logits: Any, rows: Any, offsets: Any = None, drafts: Any = None) -> Any:
        for index, minimum in self._states.of(rows) if offsets is not None else ():
            if len(minimum.output_token_ids) + offsets[index] >= minimum.length:
                self._states.discard(int(rows[index]))
        return super().apply(logits, rows, offsets, drafts)


class Remembers(ThinkingBudget):
    """Takes draft tokens for a part of the thought."""

    def apply(self, logits: Any, rows: Any, offsets: Any = None, drafts: Any = None) -> Any:
        for index, thinking in self._states.of(rows) if offsets is not None else ():
            thinking._tracker.extend(drafts[index][: offsets[index]])
        return super().apply(logits, rows)


@pytest.mark.parametrize(
    "broken", [Stays, Keeps, Spills, Lifts, Recalls, Deaf, RunsAhead, Believes, Ends, Remembers]
)
def test_the_contract_notices(broken, rng):
    with pytest.raises(AssertionError):
        check_processor(broken, WISHES[broken.__base__], rng)


@pytest.mark.parametrize(
    ("module", "name", "args"),
    [
        ("processors", "NoRepeat", {"no_repeat": True}),
        ("countdown", "Countdown", {"countdown": 2}),
    ],
)
def test_the_examples_of_the_page_keep_the_promise(module, name, args, rng, tmp_path, monkeypatch):
    block = find_block("docs/logits-processors.md", f"# mypackage/{module}.py")
    (tmp_path / f"example_of_{module}.py").write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    example = importlib.import_module(f"example_of_{module}")
    check_processor(getattr(example, name), [{"extra_args": args}], rng)
