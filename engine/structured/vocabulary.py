# SPDX-License-Identifier: Apache-2.0
"""The bytes of each token of a model, read from tokenizer.json, in the form that grammars need.

The decoder in the file determines the form of the token texts: byte-level (a letter for each byte),
byte fallback (`<0x0A>`, and ▁ for a space), or plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from ..models.checkpoint.files import is_there

_FILE = "tokenizer.json"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


class NoVocabulary(ValueError):
    """The model's directory has no tokenizer, so the bytes of its tokens are unknown."""


class Vocabulary:
    """The bytes of a model's tokens. `tokens[i]` are the bytes of token i, `b""` for special tokens
    and for ids that the tokenizer lacks; there is an entry for each of the model's logits. An
    answer must not contain a token without bytes, except `end_ids`, the model's end tokens."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        end_ids: Sequence[int],
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        ends = dict.fromkeys(each for each in end_ids if 0 <= each < len(tokens))
        self.end_ids = tuple(ends)
        self.tokens = tuple(b"" if i in ends else token for i, token in enumerate(tokens))
        self._encode = encode
        self._by_bytes = {token: i for i, token in reversed([*enumerate(self.tokens)]) if token}
        self._longest = max(map(len, self._by_bytes), default=1)

    @classmethod
    def load(cls, directory: Path, vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
        """Read the vocabulary from a model's directory. Raises NoVocabulary for a directory without
        a tokenizer."""
        path = directory / _FILE
        if not is_there(path):
            raise NoVocabulary(
                f"an answer can follow a grammar only where the model has a tokenizer, and "
                f"{directory} holds no {_FILE}; copy the model's there"
            )
        data = path.read_bytes()
        settings, fast = json.loads(data), FastTokenizer.from_buffer(data)
        to_bytes = _reader_of(settings)
        special = {each["id"] for each in settings.get("added_tokens") or () if each.get("special")}
        added = {each["id"] for each in settings.get("added_tokens") or ()}
        tokens = [b""] * vocab_size
        for text, token in fast.get_vocab(with_added_tokens=True).items():
            if token < vocab_size and token not in special:
                tokens[token] = text.encode() if token in added else to_bytes(text)
        return cls(tokens, end_ids, lambda text: fast.encode(text, add_special_tokens=False).ids)

    def spell(self, text: bytes) -> list[int]:
        """Return tokens with the bytes of this text: the tokenizer's tokens if their bytes match
        exactly, else the longest tokens that fit, from the left. A byte that is in no token is left
        out."""
        if self._encode is not None:
            try:
                ids = list(self._encode(text.decode()))
            except UnicodeDecodeError:
                ids = []
            if b"".join(self.tokens[i] for i in ids if i < len(self.tokens)) == text:
                return ids
        ids, place = [], 0
        while place < len(text):
            for size in range(min(self._longest, len(text) - place), 0, -1):
                token = self._by_bytes.get(text[place : place + size])
                if token is not None:
                    ids.append(token)
                    break
            else:
                size = 1
            place += size
        return ids


def _reader_of(settings: dict[str, Any]) -> Callable[[str], bytes]:
    kinds = {part["type"]: part for part in _parts(settings.get("decoder"))}
    if "ByteLevel" in kinds:
        return _from_letters
    if "ByteFallback" in kinds or (settings.get("model") or {}).get("byte_fallback"):
        return _from_pieces
    marks = "Metaspace" in kinds or (kinds.get("Replace", {}).get("pattern") == {"String": _SPACE})
    return _from_marked if marks else str.encode


def _parts(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a decoder and, for a sequence of decoders, all its parts."""
    if decoder:
        yield decoder
        for part in decoder.get("decoders") or ():
            yield from _parts(part)


def _letters() -> dict[str, int]:
    """Return the byte of each letter in byte-level vocabularies. Printable bytes are their own
    letters; all other bytes use the letters from code point 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _letters()


def _from_letters(token: str) -> bytes:
    if all(letter in _BYTE_OF for letter in token):
        return bytes(_BYTE_OF[letter] for letter in token)
    return token.encode()


def _from_pieces(token: str) -> bytes:
    piece = _BYTE_PIECE.fullmatch(token)
    return bytes([int(piece[1], 16)]) if piece else _from_marked(token)


def _from_marked(token: str) -> bytes:
    return token.replace(_SPACE, " ").encode()
