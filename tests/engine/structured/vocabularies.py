# SPDX-License-Identifier: Apache-2.0
"""A vocabulary with tokens of several bytes and half characters, and walks through grammars."""

from __future__ import annotations

import random
from functools import cache

import numpy as np

from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.structured.base import BITS, Grammar, Matcher
from stratakv.engine.structured.vocabulary import Vocabulary

VOCAB = 4096 + 32  # more logits than tokens, as padded models have
END = 0


@cache
def embedded() -> Vocabulary:
    return Vocabulary.load(EMBEDDED_MODEL, VOCAB, [END])


def words() -> np.ndarray:
    return np.zeros(-(-VOCAB // BITS), np.int32)


def allowed(matcher: Matcher) -> list[int]:
    row = words()
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def say(matcher: Matcher, text: str) -> bool:
    """Go on by a text, token by token, as far as every token is allowed; whether all were."""
    for token in embedded().spell(text.encode()):
        if token not in allowed(matcher) or not matcher.accept(token):
            return False
    return True


def walk(grammar: Grammar, rng: random.Random, most: int = 400) -> str | None:
    """A text by tokens drawn among the allowed ones, short ones and ends first; None where it has
    not ended after `most`."""
    matcher, text = grammar.matcher(), b""
    for _ in range(most):
        tokens = allowed(matcher)
        assert tokens, f"a dead end behind {text!r}"
        assert (END in tokens) == matcher.may_end
        if END in tokens and (len(tokens) == 1 or rng.random() < 0.5):
            return text.decode()
        tokens = [token for token in tokens if token != END]
        token = rng.choice(tokens)
        assert embedded().tokens[token], "a special token was allowed"
        assert matcher.accept(token)
        text += embedded().tokens[token]
    return None
