# SPDX-License-Identifier: Apache-2.0
"""Prompts with answers that quote them, and prompts that nobody quotes.

The embedded model is too small to quote on its own. So a logits processor has it say a text, as a
model of use says it by itself: `Quotes` raises the token that is next in `extra_args["quote"]`.
Both engines of a comparison have it.
"""

from __future__ import annotations

import inspect
import random
import textwrap
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...engine.batch.batch_update import AddedRow, IntArray
from ...engine.request.sampling_params import SamplingParams
from ...engine.sampling.processors.base import Drafts, StatefulProcessor
from ...engine.text.tokenizer import Tokenizer
from ..harness.workloads import documents

ANSWER = 128  # tokens
UNIQUE = 200
QUOTE = "quote"  # in `extra_args`
_RAISED = 1e4  # above every logit


class Asked(NamedTuple):
    """A prompt, and what is said behind it; nothing: what the model says."""

    prompt: list[int]
    quote: list[int]


class _Quoted(NamedTuple):
    token_ids: Sequence[int]
    output_token_ids: Sequence[int]


class Quotes(StatefulProcessor[_Quoted]):
    """See there."""

    @classmethod
    def applies_to(cls, params: SamplingParams) -> bool:
        return QUOTE in (params.extra_args or {})

    def _state_of(self, added: AddedRow) -> _Quoted | None:
        if not self.applies_to(added.params) or added.params.extra_args is None:
            return None
        return _Quoted(added.params.extra_args[QUOTE], added.output_token_ids)

    def apply(
        self,
        logits: Tensor,
        rows: IntArray,
        offsets: IntArray | None = None,
        drafts: Drafts | None = None,
    ) -> Tensor:
        places, tokens = [], []
        for index, state in self._states.of(rows):
            at = len(state.output_token_ids) + (0 if offsets is None else int(offsets[index]))
            if at < len(state.token_ids):
                places.append(index)
                tokens.append(state.token_ids[at])
        logits[np.array(places, np.int64), np.array(tokens, np.int64)] = _RAISED
        return logits


def repetitive(tokenizer: Tokenizer, count: int) -> list[Asked]:
    """In turn a passage that is quoted, and a function that is written again under other names."""
    passages = documents(tokenizer.encode, count, ANSWER)
    functions = _functions()
    asked = []
    for number in range(count):
        if number % 2:
            name, source = functions[number % len(functions)]
            shown = tokenizer.encode(source)[:ANSWER]
            again = source.replace(name, f"{name}_again").replace("self", "this")
            asked.append(Asked(shown, tokenizer.encode(again)[:ANSWER]))
        else:
            asked.append(Asked(passages[number], passages[number]))
    return asked


def unique(tokenizer: Tokenizer, count: int) -> list[Asked]:
    """Words in an order that no text has."""
    chosen = random.Random(11)
    words = range(4, tokenizer.vocab_size)
    return [Asked(chosen.choices(words, k=UNIQUE), []) for _ in range(count)]


def _functions() -> list[tuple[str, str]]:
    """Functions and methods of the standard library, by name."""
    found = []
    modules: tuple[ModuleType, ...] = (textwrap, random)
    for module in modules:
        for holder in (module, *vars(module).values()):
            if holder is module or inspect.isclass(holder):
                for name, member in sorted(vars(holder).items()):
                    if inspect.isfunction(member) and member.__module__ == module.__name__:
                        source = inspect.getsource(member)
                        if 700 < len(source) < 3000:
                            found.append((name, source))
    return found
