# SPDX-License-Identifier: Apache-2.0
"""Bad words: the token ids with which a tokenizer may represent each word."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

import msgspec

from ..request.sampling_params import MAX_BAD_SEQUENCE_TOKENS, SamplingParams
from .tokenizer import Tokenizer

# An arbitrary text before the space, so that a tokenizer's mark for the start of a text is on it.
_ANCHOR = "a"


def with_spelt_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return the parameters with the token ids of their bad words added to `bad_words_token_ids`.

    A second call changes nothing. Raises ValueError without a tokenizer, and the errors of
    `spell_bad_words`."""
    if not params.bad_words:
        return params
    if tokenizer is None:
        raise ValueError("bad_words need a tokenizer; use bad_words_token_ids instead")
    spelt = spell_bad_words(tokenizer, params.bad_words)
    sequences = tuple(dict.fromkeys((*params.bad_words_token_ids, *spelt)))
    return msgspec.structs.replace(params, bad_words_token_ids=sequences)


def spell_bad_words(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word at the start of a text and after a space, without special
    tokens around the word and without duplicates. Raises ValueError, which names the word, if the
    vocabulary cannot represent the word or the word takes too many tokens.

    A word is often tokenized in another way at the start of a text than after a space:

        byte-level    "word" → word       "a word" → a Ġword
        SentencePiece "word" → ▁word      "a word" → ▁a ▁word      the same, kept once

    Both tokenizations are returned, so spaces around a word in the request have no effect."""
    spelt: dict[tuple[int, ...], None] = {}
    for word in words:
        spelt.update(dict.fromkeys(_spellings(tokenizer, word)))
    return tuple(spelt)


def _spellings(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    bare = word.strip(" ")
    try:
        candidates = [_encode(tokenizer, bare), _encode_after_space(tokenizer, bare)]
    except ValueError as error:
        raise ValueError(f"bad_words must be valid texts, got {word!r}: {error}") from error
    # Some vocabularies drop characters that they lack, or have one token for all such characters.
    found = [ids for ids in candidates if ids and _same(_decode(tokenizer, ids), bare)]
    if not found:
        raise ValueError(
            f"bad_words must be words that the model's tokens can spell, got {word!r}; leave it out"
        )
    longest = max(map(len, found))
    if longest > MAX_BAD_SEQUENCE_TOKENS:
        raise ValueError(
            f"bad_words must take at most {MAX_BAD_SEQUENCE_TOKENS} tokens each, got {word!r}, "
            f"which takes {longest}"
        )
    return found


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _encode_after_space(tokenizer: Tokenizer, word: str) -> tuple[int, ...]:
    """Return the word's tokens after `_ANCHOR` and a space; empty if tokens mix anchor and word."""
    anchor = _encode(tokenizer, _ANCHOR)
    whole = _encode(tokenizer, f"{_ANCHOR} {word}")
    return whole[len(anchor) :] if whole[: len(anchor)] == anchor else ()


def _decode(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def _same(first: str, second: str) -> bool:
    """Whether two texts are equal except for changes by a tokenizer's normalization."""
    return _folded(first) == _folded(second) != ""


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold().replace(" ", "")
