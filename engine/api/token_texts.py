# SPDX-License-Identifier: Apache-2.0
"""`TokenTexts`: the text and the bytes of single tokens, cached by token id.

A token's text is the text that the token adds to a text before it, with the space before a word:

    vocabulary     text        bytes
    Ġworld         " world"    20 77 6f 72 6c 64
    ▁world         " world"    20 77 6f 72 6c 64
    âĤ             "\ufffd"    e2 82                 two thirds of a character
    <0xE2>         "\ufffd"    e2"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# The text before a token that is decoded: at the start of a text a token may lose its space.
_ANCHOR = "a"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenText(NamedTuple):
    """The text and bytes of a token. `raw` is None if the token's bytes are unknown. `is_special`:
    texts without special tokens leave the token out."""

    text: str
    raw: list[int] | None
    is_special: bool = False


class TokenTexts:
    """Caches the texts of one tokenizer's tokens, at most one for each id of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}
        self._anchor = (
            [] if tokenizer is None else tokenizer.encode(_ANCHOR, add_special_tokens=False)
        )
        self._before = "" if tokenizer is None else self._decode_token_ids(tokenizer, self._anchor)

    def get_token_text(self, token_id: int, *, as_id: bool = False) -> TokenText:
        """Return a token's text and bytes. With `as_id`, the text is the id, as `token_id:5`."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known._replace(text=f"token_id:{token_id}") if as_id else known

    def spelling(self, token_id: int) -> str:
        """Return the token's spelling in the vocabulary; "" for an id outside of the vocabulary."""
        return "" if self._tokenizer is None else _spelling(self._tokenizer, token_id)

    def _look_up(self, token_id: int) -> TokenText:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return TokenText(f"token_id:{token_id}", None)
        joined = self._decode_token_ids(tokenizer, [*self._anchor, token_id])
        if joined.startswith(self._before):
            text = joined[len(self._before) :]
        else:
            text = self._decode_token_ids(tokenizer, [token_id])
        is_special = bool(text) and not tokenizer.decode([token_id], skip_special_tokens=True)
        return TokenText(text, _bytes_of(text, _spelling(tokenizer, token_id)), is_special)

    @staticmethod
    def _decode_token_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)


def _spelling(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token(token_id) or ""


def _bytes_of(text: str, spelling: str) -> list[int] | None:
    """Return the bytes of a token's text. If the text has replacement characters, the bytes come
    from the vocabulary's spelling; None if the spelling's bytes do not decode to the text."""
    if REPLACEMENT not in text:
        return list(text.encode())
    byte = _BYTE_TOKEN.fullmatch(spelling)
    if byte:
        raw = [int(byte.group(1), 16)]
    elif all(character in _BYTE_OF for character in spelling):
        raw = [_BYTE_OF[character] for character in spelling]
    else:
        return None
    return raw if bytes(raw).decode(errors="replace") == text else None


def _byte_alphabet() -> dict[str, int]:
    """Return the letters that stand for bytes in byte-level vocabularies. A printable byte has its
    own letter; each other byte has a letter from U+0100 upwards."""
    letters: dict[str, int] = {}
    hidden = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            letters[chr(byte)] = byte
        else:
            letters[chr(0x100 + hidden)] = byte
            hidden += 1
    return letters


_BYTE_OF = _byte_alphabet()
