# SPDX-License-Identifier: Apache-2.0
"""Texts and bytes of single tokens by every kind of tokenizer, and the forms made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from stratakv.engine.api.openai.response.logprobs_form import (
    CompletionForm,
    chat_logprobs,
    prompt_logprobs,
)
from stratakv.engine.api.token_texts import TokenTexts
from stratakv.engine.request.logprobs import PositionLogprobs
from stratakv.engine.text.tokenizer import Tokenizer

TEXTS = ["hello world", "grüße €", "日本 語", "a  b\n\tc", "naïve 🙂 end"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def byte_fallback(directory: Path) -> Tokenizer:
    """SentencePiece's way: words with ▁, and bytes as tokens of their own."""
    letters = ["▁", *"abcdehlnorwüï", "▁w", "日"]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", *BYTES, *letters])}
    fast = FastTokenizer(
        models.BPE(vocabulary, [("▁", "w")], byte_fallback=True, unk_token="<unk>")
    )
    fast.add_special_tokens(["<s>"])
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return Tokenizer(fast)


def word_pieces(directory: Path) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(["[UNK]", "a", "hello", "##s", "world"])}
    fast = FastTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(fast)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_join_to_the_text(
    model_path: Path, make: Callable[[Path], Tokenizer], text: str
) -> None:
    tokenizer = make(model_path)
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    raw = b"".join(bytes(texts.get_token_text(i).raw or []) for i in ids).decode()
    assert raw.removeprefix(" ") == text
    assert any(texts.get_token_text(i).text == "\ufffd" for i in ids) == (not text.isascii())


def test_a_word_keeps_the_space_before_it(model_path: Path) -> None:
    fallback, pieces = byte_fallback(model_path), word_pieces(model_path)
    spaced = fallback.token_id("▁w")
    assert spaced is not None
    assert TokenTexts(fallback).get_token_text(spaced) == (" w", [32, 119], False)
    assert [TokenTexts(pieces).get_token_text(i).text for i in (2, 3)] == [" hello", "s"]


def test_special_tokens_and_ids_without_a_token(model_path: Path) -> None:
    texts = TokenTexts(byte_level(model_path))
    assert texts.get_token_text(0) == ("<s>", [60, 115, 62], True)
    assert texts.get_token_text(319) == ("", [], False), "the model has more ids than its tokenizer"
    assert texts.spelling(0) == "<s>"
    assert texts.spelling(319) == ""
    assert texts.get_token_text(7, as_id=True) == ("token_id:7", texts.get_token_text(7).raw, False)


def test_without_a_tokenizer_a_token_is_its_id() -> None:
    assert TokenTexts(None).get_token_text(5) == ("token_id:5", None, False)
    assert TokenTexts(None).spelling(5) == ""


def test_texts_that_lost_their_bytes_have_none() -> None:
    """A token that is no character and is not spelt in bytes either."""
    fast = FastTokenizer(models.WordLevel({"a": 0, "x\ufffdy": 1}, unk_token="a"))
    assert TokenTexts(Tokenizer(fast)).get_token_text(1).raw is None


@pytest.mark.parametrize("pieces", [1, 2, 3, 100], ids=lambda size: f"in pieces of {size}")
def test_offsets_are_those_of_the_text(model_path: Path, pieces: int) -> None:
    tokenizer = byte_level(model_path)
    whole = "grüße € 🙂 hello"
    ids = tokenizer.encode(whole, add_special_tokens=False)
    euro = tokenizer.encode("€", add_special_tokens=False)
    # A character begun and not ended, a special token, and one that is no beginning.
    ids += [*euro[:2], *tokenizer.encode("a", add_special_tokens=False), 0, euro[1], *euro]
    text = tokenizer.decode(ids)
    form = CompletionForm(TokenTexts(tokenizer), 0, as_ids=False, skip_special_tokens=True)
    offsets: list[int] = []
    for start in range(0, len(ids), pieces):
        part = ids[start : start + pieces]
        offsets += form.format_tokens(part, [None] * len(part)).text_offset
    assert len(offsets) == len(ids)
    texts = TokenTexts(tokenizer)
    for token, offset in zip(ids, offsets, strict=True):
        known = texts.get_token_text(token)
        if known.is_special:
            continue
        assert text.startswith(known.text, offset) or text[offset] in "üß€🙂\ufffd"
    assert text == f"{whole}\ufffda\ufffd€"
    assert offsets[-8:] == [15, 15, 16, 17, 17, 18, 18, 18]


def test_several_tokens_of_one_text_count_as_the_likeliest(model_path: Path) -> None:
    tokenizer = byte_level(model_path)
    euro = tokenizer.encode("€", add_special_tokens=False)
    position = PositionLogprobs([euro[0], euro[1], euro[0], 40], [-3.0, -0.5, -3.0, -4.0], 2)
    form = CompletionForm(TokenTexts(tokenizer), 3, as_ids=False, skip_special_tokens=True)
    of_forty = TokenTexts(tokenizer).get_token_text(40).text
    made = form.format_tokens([euro[0]], [position])
    assert made.top_logprobs == [{"\ufffd": -0.5, of_forty: -4.0}]
    assert made.token_logprobs == [-3.0]
    by_id = CompletionForm(TokenTexts(tokenizer), 1, as_ids=True, skip_special_tokens=True)
    assert by_id.format_tokens([euro[0]], [position]).top_logprobs == [
        {f"token_id:{euro[0]}": -3.0, f"token_id:{euro[1]}": -0.5}
    ]


def test_form_of_chats(model_path: Path) -> None:
    texts = TokenTexts(byte_level(model_path))
    position = PositionLogprobs([50, 60, 61], [-5.0, -0.1, -2.0], 9)
    (entry,) = chat_logprobs([position], 2, texts, as_ids=False).content
    assert (entry.token, entry.logprob) == (texts.get_token_text(50).text, -5.0)
    assert [top.logprob for top in entry.top_logprobs] == [-0.1, -2.0]
    (bare,) = chat_logprobs([position], 0, texts, as_ids=True).content
    assert (bare.token, bare.top_logprobs) == ("token_id:50", [])


def test_form_of_prompts(model_path: Path) -> None:
    texts = TokenTexts(byte_level(model_path))
    rare = PositionLogprobs([50, 60, 61], [-5.0, -0.1, -2.0], 9)
    likely = PositionLogprobs([60, 60, 61], [-0.1, -0.1, -2.0], 1)
    first, second, third = prompt_logprobs([None, rare, likely], 2, texts, as_ids=False)
    assert first is None
    assert second is not None
    assert third is not None
    assert [(i, each.logprob, each.rank) for i, each in second.items()] == [
        (50, -5.0, 9), (60, -0.1, 1), (61, -2.0, 2),
    ]  # fmt: skip
    assert [(i, each.rank) for i, each in third.items()] == [(60, 1), (61, 2)]
    assert third[60].decoded_token == texts.get_token_text(60).text
