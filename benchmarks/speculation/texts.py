# SPDX-License-Identifier: Apache-2.0
"""Prompts whose answers quote the prompt, and prompts of random words."""

from __future__ import annotations

import inspect
import random
import textwrap
from types import ModuleType
from typing import NamedTuple

from ...engine.text.tokenizer import Tokenizer
from ..harness.workloads import documents

ANSWER = 128  # tokens of an answer
UNIQUE = 200


class Asked(NamedTuple):
    """A prompt, and the answer that the model must quote; empty for a free answer."""

    prompt: list[int]
    quote: list[int]


def repetitive(tokenizer: Tokenizer, count: int) -> list[Asked]:
    """Return prompts with passages to quote and, in turn, functions to rewrite under other
    names."""
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
    """Return prompts of random words, in an order that no text has."""
    chosen = random.Random(11)
    words = range(4, tokenizer.vocab_size)
    return [Asked(chosen.choices(words, k=UNIQUE), []) for _ in range(count)]


def _functions() -> list[tuple[str, str]]:
    """Return (name, source) of functions and methods of the standard library."""
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
