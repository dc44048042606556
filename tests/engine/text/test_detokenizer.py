# SPDX-License-Identifier: Apache-2.0
"""The incremental detokenizer gives the text of decoding at once, and never half a character."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from stratakv.engine.text.detokenizer import REPLACEMENT, IncrementalDetokenizer
from stratakv.engine.text.tokenizer import Tokenizer

from .small_tokenizers import BYTE_FALLBACK, TEXT, TOKENIZERS, WORDS, byte_fallback, byte_level


def in_pieces(
    tokenizer: Tokenizer, ids: Sequence[int], rng: random.Random, prompt: Sequence[int] = ()
) -> list[str]:
    """What comes out when `ids` arrive one to three at a time."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    pieces, start = [], 0
    while start < len(ids):
        count = rng.randrange(1, 4)
        pieces.append(detokenizer.push_tokens(ids[start : start + count]))
        start += count
    return [*pieces, detokenizer.decode_rest()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_pieces_are_the_whole_text(name: str, rng: random.Random) -> None:
    tokenizer = TOKENIZERS[name]()
    for turn in range(40):
        # Whole words, or letters torn out of what they belong to.
        parts = rng.choices(WORDS, k=12) if turn % 2 else rng.choices(TEXT, k=60)
        text = (" " if turn % 2 else "").join(parts).strip()
        ids = tokenizer.encode(text)
        pieces = in_pieces(tokenizer, ids, rng)
        assert "".join(pieces) == tokenizer.decode(ids) == text
        assert REPLACEMENT not in "".join(pieces)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_many_tokens_at_once(name: str) -> None:
    """A reader that was slow gets what came in the meantime, up to the middle of a character."""
    tokenizer = TOKENIZERS[name]()
    text = "👩\u200d👩\u200d👧\u200d👦🇩🇪🇯🇵" * 3 + "a"
    ids = tokenizer.encode(text)
    for cut in range(1, len(ids)):
        detokenizer = IncrementalDetokenizer(tokenizer)
        first = detokenizer.push_tokens(ids[:cut])
        assert text.startswith(first)
        assert first + detokenizer.push_tokens(ids[cut:]) + detokenizer.decode_rest() == text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_cut_between_prompt_and_output(name: str, rng: random.Random) -> None:
    """A prompt may also end within a character, which then comes out with the output."""
    tokenizer = TOKENIZERS[name]()
    for _ in range(60):
        text = " ".join(rng.choices(WORDS, k=6))
        ids = tokenizer.encode(text)
        for cut in rng.sample(range(len(ids)), 4):
            got = "".join(in_pieces(tokenizer, ids[cut:], rng, ids[:cut]))
            assert whole_characters(name, tokenizer, ids[:cut]) + got == text


def whole_characters(name: str, tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of `ids` without a character that they leave unfinished."""
    for missing in range(4):
        text = tokenizer.decode(ids[: len(ids) - missing])
        if name not in BYTE_FALLBACK:  # else whole characters may be shown as broken too
            text = text.rstrip(REPLACEMENT)
        if REPLACEMENT not in text:
            return text
    raise AssertionError(f"{ids} are no beginning of a text")


@pytest.mark.parametrize("name", sorted(TOKENIZERS.keys() - set(BYTE_FALLBACK)))
def test_any_tokens_at_all(name: str, rng: random.Random) -> None:
    """Bytes that are no UTF-8 come out as decoding at once shows them."""
    tokenizer = TOKENIZERS[name]()
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 50))]
        assert "".join(in_pieces(tokenizer, ids, rng)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", BYTE_FALLBACK)
def test_a_wrong_byte_spoils_only_what_stands_together(name: str, rng: random.Random) -> None:
    """Decoding at once takes characters back that had been whole until a wrong byte came. What is
    out cannot be taken back, but all that comes after another token is right."""
    tokenizer = TOKENIZERS[name]()
    wrong = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in (0xFF, 0x80, 0xF0)]
    for _ in range(100):
        before, after = ("a" + "".join(rng.choices(TEXT, k=20)) + "a" for _ in range(2))
        bad = [token for token in rng.choices(wrong, k=rng.randrange(1, 40)) if token is not None]
        ids = [*tokenizer.encode(before), *bad, *tokenizer.encode(after)]
        got = "".join(in_pieces(tokenizer, ids, rng))
        assert got == tokenizer.decode(ids)
        assert got == before + REPLACEMENT * len(bad) + " " + after


def test_the_output_goes_on_from_the_prompt(rng: random.Random) -> None:
    tokenizer = byte_fallback()
    prompt, output = tokenizer.encode("a b"), tokenizer.encode("a é 漢 b")
    whole = tokenizer.decode([*prompt, *output])
    assert "".join(in_pieces(tokenizer, output, rng, prompt)) == whole.removeprefix("a b")
    assert whole == "a b a é 漢 b"


def test_a_prompt_that_ends_within_a_character() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("道")
    assert len(ids) == 3
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:2])
    assert detokenizer.push_tokens(ids[2:]) == "道"
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:2])
    assert detokenizer.push_tokens(tokenizer.encode("x")) == "x"


def test_a_character_is_held_back_until_it_is_whole() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a道b")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push_tokens([token]) for token in ids] == ["a", "", "", "道", "b"]


def test_half_a_character_at_the_end_shows_as_one_mark() -> None:
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push_tokens(tokenizer.encode("a道")[:-1]) == "a"
    assert detokenizer.decode_rest() == REPLACEMENT
    assert detokenizer.decode_rest() == ""


def test_special_tokens_are_left_out_or_shown() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_id("<end>")
    assert end is not None
    ids = [*tokenizer.encode("a"), end, *tokenizer.encode("b")]
    for skip, expected in ((True, "ab"), (False, "a<end>b")):
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        assert "".join([detokenizer.push_tokens([token]) for token in ids]) == expected


def test_a_space_after_a_special_token_is_kept() -> None:
    tokenizer = byte_fallback()
    end = tokenizer.token_id("</s>")
    assert end is not None
    word = tokenizer.encode("b")
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("a"))
    assert [detokenizer.push_tokens([end]), detokenizer.push_tokens(word)] == ["", " b"]


def test_the_work_per_token_is_bounded() -> None:
    """However long the output, clean or not, each push decodes a short window."""
    tokenizer = byte_level()
    decoded: list[int] = []

    class Counting:
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            decoded.append(len(token_ids))
            return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    broken = tokenizer.encode("道")[1]
    end = tokenizer.token_id("<end>")
    for ids in ([broken] * 500, [end] * 500, tokenizer.encode(TEXT * 5)):
        detokenizer = IncrementalDetokenizer(Counting())
        for token in ids:
            detokenizer.push_tokens([token or 0])
    assert max(decoded) <= 40
