# SPDX-License-Identifier: Apache-2.0
"""The incremental detokenizer, which turns token ids, as they are generated, into whole characters.

A character may be spread over several tokens, and a token's text may depend on the previous token
(the space before a word). So new tokens are decoded in a short window, together with earlier
tokens:

    ids      ... | a b c | d e            window = a b c d e
                 ^ start ^ read           text(a b c) was returned before, so the rest of
                                          text(a b c d e) is returned now

Text that ends in U+FFFD may end in half a character, which is held back until the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# After this many tokens without the end of a character, the output counts as invalid UTF-8.
_MAX_PENDING_TOKENS = 24
# In invalid UTF-8, only bytes that may still become a character are held back, at most 3.
_MAX_HELD_CHARACTERS = 3
# The number of last tokens that surely contains the held characters, at 3 bytes each.
_HELD_TOKENS = 10
# The number of prompt tokens on which the text of the first output token may depend.
_CONTEXT_TOKENS = 6


class Decoder(Protocol):
    """The part of a tokenizer that detokenizing needs."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class HidingDecoder:
    """A decoder that omits only the special tokens in `hidden` instead of all special tokens."""

    def __init__(self, decoder: Decoder, hidden: frozenset[int]) -> None:
        self._decoder, self._hidden = decoder, hidden

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if token_id not in self._hidden]
        return self._decoder.decode(token_ids, skip_special_tokens=False)


class IncrementalDetokenizer:
    """The text of one growing sequence.

    The results of `push_tokens` and `decode_rest`, joined, are the text that the output adds to the
    prompt."""

    __slots__ = ("_decoder", "_given", "_ids", "_read", "_skip_special_tokens")

    def __init__(
        self,
        decoder: Decoder,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._ids = self._context_of(prompt_token_ids)
        self._read = len(self._ids)
        self._given = self._decode_ids(self._ids)  # the part of the window's text returned so far

    def push_tokens(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the whole characters that they complete."""
        if not token_ids:
            return ""
        before = len(self._ids)
        self._ids.extend(token_ids)
        text = self._decode_ids(self._ids)
        if not text.endswith(REPLACEMENT):
            return self._advance(text)
        if len(token_ids) > 1:
            # Add the tokens one at a time, so that every whole character is returned.
            del self._ids[before:]
            return "".join([self.push_tokens([token]) for token in token_ids])
        if len(self._ids) - self._read > _MAX_PENDING_TOKENS:
            return self._shorten(text)
        # In some vocabularies all byte tokens of a run become replacement characters together, even
        # byte tokens whose character was returned already; no text is added in this case.
        given, stable = self._given_of(text), text.rstrip(REPLACEMENT)
        if len(stable) <= len(given) or not stable.startswith(given):
            return ""
        self._given = stable
        return stable[len(given) :]

    def decode_rest(self) -> str:
        """Return the remaining text. Half a character becomes U+FFFD."""
        return self._advance(self._decode_ids(self._ids))

    def _context_of(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the prompt's last tokens, from the beginning of a character on: a wrong byte would
        corrupt the text of a whole run of byte tokens. If the prompt ends within a character,
        return only that character's tokens, because its missing bytes would corrupt the tokens
        before it."""
        longest = [int(t) for t in prompt_token_ids[-_CONTEXT_TOKENS - _MAX_HELD_CHARACTERS :]]
        for unfinished in range(_MAX_HELD_CHARACTERS + 1):
            end = max(0, len(longest) - unfinished)
            for size in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _MAX_HELD_CHARACTERS + 1):
                start = max(0, len(longest) - size)
                if REPLACEMENT not in self._decode_ids(longest[start:end]):
                    return longest[end:] if unfinished else longest[start:]
        return longest[-_CONTEXT_TOKENS:]

    def _advance(self, text: str) -> str:
        """Return all new text of the window, and drop the tokens before the newest tokens."""
        new = text[len(self._given_of(text)) :]
        newest = self._ids[self._read :]
        alone = self._decode_ids(newest)
        # The window is kept after tokens without text (special tokens), which do not show how the
        # next token joins, and after the rest of a character, which would corrupt the bytes after
        # it.
        joins = alone and not alone.startswith(REPLACEMENT)
        if joins or len(self._ids) > _MAX_PENDING_TOKENS:
            self._ids, self._given = newest, alone
        else:
            self._given = text
        self._read = len(self._ids)
        return new

    def _shorten(self, text: str) -> str:
        """Return the text that is certain now, and cut the window down to the last tokens."""
        new = _without_held_tail(text)[len(self._given_of(text)) :]
        self._ids = self._ids[-_HELD_TOKENS:]
        self._read = 0
        self._given = _without_held_tail(self._decode_ids(self._ids))
        return new

    def _given_of(self, text: str) -> str:
        """Return the part of `text` that earlier calls returned. Half a character that was
        returned, or that ends the prompt, may have become whole meanwhile."""
        given = self._given
        for _ in range(_MAX_HELD_CHARACTERS):
            if text.startswith(given) or not given.endswith(REPLACEMENT):
                break
            given = given[:-1]
        return given

    def _decode_ids(self, ids: list[int]) -> str:
        if not ids:
            return ""
        return self._decoder.decode(ids, skip_special_tokens=self._skip_special_tokens)


def _without_held_tail(text: str) -> str:
    """Return the text without replacement characters at the end that may become a character."""
    end = len(text)
    while end > 0 and len(text) - end < _MAX_HELD_CHARACTERS and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]
