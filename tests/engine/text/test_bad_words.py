# SPDX-License-Identifier: Apache-2.0
"""Bad words are spelt in every way a model may begin them, or refused by name."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers

from stratakv.engine.request.sampling_params import MAX_BAD_SEQUENCE_TOKENS, SamplingParams
from stratakv.engine.text.bad_words import spell_bad_words, with_spelt_bad_words
from stratakv.engine.text.tokenizer import Tokenizer

from .small_tokenizers import TOKENIZERS, WORDS

WHOLE_WORDS = [word for word in WORDS if word != "\n\tz"]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("word", WHOLE_WORDS)
def test_a_word_is_found_where_it_stands(name: str, word: str) -> None:
    """At the start of a text, and after a space, one of the spellings is in the tokens."""
    tokenizer = TOKENIZERS[name]()
    spellings = spell_bad_words(tokenizer, [word])
    assert 1 <= len(spellings) <= 2
    for text in (word, f"{word} the", f"the {word}", f"a {word} b"):
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        places = range(len(ids))
        assert any(ids[i : i + len(s)] == s for i in places for s in spellings), text
    for spelling in spellings:
        assert tokenizer.decode(spelling).strip() == word


def test_both_spellings_of_bytes_and_the_one_of_marked_words() -> None:
    tokenizer = TOKENIZERS["byte-level"]()
    expected = (tuple(tokenizer.encode("jagen")), tuple(tokenizer.encode(" jagen")))
    assert spell_bad_words(tokenizer, ["jagen"]) == expected
    tokenizer = TOKENIZERS["byte fallback"]()
    assert spell_bad_words(tokenizer, ["a"]) == (tuple(tokenizer.encode("a")),)


def test_spaces_around_a_word_and_repetitions_change_nothing() -> None:
    tokenizer = TOKENIZERS["byte-level"]()
    once = spell_bad_words(tokenizer, ["the", "123"])
    assert spell_bad_words(tokenizer, [" the", "the", "123 ", "the"]) == once
    assert len(once) == 4


def test_a_new_line_is_a_word() -> None:
    tokenizer = TOKENIZERS["byte-level"]()
    assert (tokenizer.encode("\n")[0],) in spell_bad_words(tokenizer, ["\n"])


def letters(unknown: str | None) -> Tokenizer:
    """Four letters and no space, nothing else, or one token for all else."""
    vocabulary = {"a": 0, "b": 1, "c": 2, "d": 3, "<unk>": 4}
    fast = FastTokenizer(models.BPE(vocabulary, [], unk_token=unknown))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(fast)


@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_a_word_beyond_the_vocabulary_is_refused(unknown: str | None) -> None:
    tokenizer = letters(unknown)
    assert spell_bad_words(tokenizer, ["abba"]) == ((0, 1, 1, 0),)
    for word in ("axb", "x", "  "):
        words = f"words that the model's tokens can spell, got {word!r}"
        with pytest.raises(ValueError, match=f"^bad_words must be {words}"):
            spell_bad_words(tokenizer, ["abba", word])


def test_a_word_of_too_many_tokens_is_refused() -> None:
    tokenizer = letters(None)
    longest = "a" * MAX_BAD_SEQUENCE_TOKENS
    assert spell_bad_words(tokenizer, [longest]) == ((0,) * MAX_BAD_SEQUENCE_TOKENS,)
    with pytest.raises(ValueError, match=r"at most 64 tokens each, got 'aa.*', which takes 65"):
        spell_bad_words(tokenizer, [longest + "a"])


def test_half_a_surrogate_is_no_word() -> None:
    with pytest.raises(ValueError, match=r"^bad_words must be valid texts, got 'a\\ud800'"):
        spell_bad_words(TOKENIZERS["byte-level"](), ["a\ud800"])


def test_parameters_get_the_spellings() -> None:
    tokenizer = TOKENIZERS["byte-level"]()
    params = SamplingParams(bad_words=("the",), bad_words_token_ids=((5, 6),), max_tokens=3)
    spelt = with_spelt_bad_words(params, tokenizer)
    assert spelt.bad_words_token_ids == ((5, 6), *spell_bad_words(tokenizer, ["the"]))
    assert (spelt.bad_words, spelt.max_tokens) == (("the",), 3)
    assert with_spelt_bad_words(spelt, tokenizer) == spelt


def test_without_bad_words_nothing_is_needed() -> None:
    params = SamplingParams(bad_words_token_ids=((5, 6),))
    assert with_spelt_bad_words(params, None) is params
    with pytest.raises(ValueError, match="bad_words need a tokenizer; use bad_words_token_ids"):
        with_spelt_bad_words(SamplingParams(bad_words=("x",)), None)


def test_more_spellings_than_are_taken() -> None:
    many = tuple((token,) for token in range(255))
    params = SamplingParams(bad_words=("the",), bad_words_token_ids=many)
    with pytest.raises(ValueError, match="bad_words_token_ids must be at most 256 lists, got 257"):
        with_spelt_bad_words(params, TOKENIZERS["byte-level"]())
