# SPDX-License-Identifier: Apache-2.0
"""The incremental detokenizer gives the text of decoding at once, and never half a character."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from stratakv.engine.text.detokenizer import REPLACEMENT, IncrementalDetokenizer
from stratakv.engine.text.tokenizer import Tokenizer

TEXT = "Zwölf Boxkämpfer jagen Виктор quer über 漢字の道 🙂🙃 the naïve café, 123 times. "


def byte_level() -> Tokenizer:
    """Bytes and a few merges; one character may take four tokens."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator([TEXT], trainer)
    return Tokenizer(fast)


def byte_fallback() -> Tokenizer:
    """Words with a mark for the space before them, and bytes for what is unknown."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    for piece in ["▁", "▁a", "▁b", "a", "b", "é", "▁é"]:
        vocabulary[piece] = len(vocabulary)
    fast = FastTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    fast.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(fast)


def in_pieces(
    tokenizer: Tokenizer, ids: Sequence[int], rng: random.Random, prompt: Sequence[int] = ()
) -> list[str]:
    """What comes out when `ids` arrive one to three at a time."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    pieces, start = [], 0
    while start < len(ids):
        count = rng.randrange(1, 4)
        pieces.append(detokenizer.push(ids[start : start + count]))
        start += count
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_pieces_are_the_whole_text(make: object, rng: random.Random) -> None:
    tokenizer = byte_level() if make is byte_level else byte_fallback()
    for _ in range(20):
        text = "".join(rng.choices(TEXT, k=80)).strip()
        ids = tokenizer.encode(text)
        pieces = in_pieces(tokenizer, ids, rng)
        assert "".join(pieces) == tokenizer.decode(ids) == text
        assert REPLACEMENT not in "".join(pieces)


def test_any_tokens_at_all(rng: random.Random) -> None:
    """Bytes that are no UTF-8 come out as decoding at once shows them."""
    tokenizer = byte_level()
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 50))]
        assert "".join(in_pieces(tokenizer, ids, rng)) == tokenizer.decode(ids)


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
    assert detokenizer.push(ids[2:]) == "道"
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:2])
    assert detokenizer.push(tokenizer.encode("x")) == "x"


def test_a_character_is_held_back_until_it_is_whole() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a道b")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([token]) for token in ids] == ["a", "", "", "道", "b"]


def test_half_a_character_at_the_end_shows_as_one_mark() -> None:
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("a道")[:-1]) == "a"
    assert detokenizer.finish() == REPLACEMENT
    assert detokenizer.finish() == ""


def test_special_tokens_are_left_out_or_shown() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_id("<end>")
    assert end is not None
    ids = [*tokenizer.encode("a"), end, *tokenizer.encode("b")]
    for skip, expected in ((True, "ab"), (False, "a<end>b")):
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        assert "".join([detokenizer.push([token]) for token in ids]) == expected


def test_a_space_after_a_special_token_is_kept() -> None:
    tokenizer = byte_fallback()
    end = tokenizer.token_id("</s>")
    assert end is not None
    word = tokenizer.encode("b")
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("a"))
    assert [detokenizer.push([end]), detokenizer.push(word)] == ["", " b"]


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
            detokenizer.push([token or 0])
    assert max(decoded) <= 40
