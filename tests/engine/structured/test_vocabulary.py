# SPDX-License-Identifier: Apache-2.0
"""The bytes of tokens: of every kind of tokenizer they join to the text that was encoded."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratakv.engine.structured.vocabulary import NoVocabulary, Vocabulary

from ..text.small_tokenizers import BYTE_FALLBACK, TEXT, TOKENIZERS
from .vocabularies import VOCAB, embedded


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_bytes_join_to_the_text(kind: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[kind]()
    tokenizer._fast.save(str(tmp_path / "tokenizer.json"))
    size = tokenizer.vocab_size + 5
    vocabulary = Vocabulary.load(tmp_path, size, [])
    assert len(vocabulary.tokens) == size and not any(vocabulary.tokens[-5:])
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    joined = b"".join(vocabulary.tokens[token] for token in ids).decode()
    assert joined.removeprefix(" ") == TEXT, "a mark may stand before the first word"
    every = kind == "byte-level" or kind in BYTE_FALLBACK
    for text in (TEXT.encode(), "{é}".encode(), b"\xc3", b"\n"):
        spelt = b"".join(vocabulary.tokens[token] for token in vocabulary.spell(text))
        assert spelt == text or not every


def test_ends_and_special_tokens_say_nothing() -> None:
    vocabulary = embedded()
    assert vocabulary.end_ids == (0,)
    assert vocabulary.tokens[0] == vocabulary.tokens[1] == vocabulary.tokens[VOCAB - 1] == b""
    assert Vocabulary([b"a", b"b"], [1, 7]).tokens == (b"a", b"")
    assert Vocabulary([b"a", b"bc", b"b"], []).spell(b"abcxb") == [0, 1, 2]


def test_without_a_tokenizer_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(NoVocabulary, match=r"holds no tokenizer\.json"):
        Vocabulary.load(tmp_path, 9, [])
