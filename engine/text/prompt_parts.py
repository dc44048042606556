# SPDX-License-Identifier: Apache-2.0
"""PromptParts: tokenizes a prompt that arrives in parts, with the same result as for the whole
prompt.

A tokenizer may join characters across the border of two parts. So `add_part` returns only the
tokens before the last word of the text. Whenever the text is tokenized again, its tokens are
compared with the tokens that were returned (`told`):

    parts    "The quick br" "own fox"
    told     The quick      brown       at the end also: fox

If a returned token differs nevertheless, only the returned tokens before it are valid. A text is
tokenized again after it has grown by a sixteenth, so that many small parts take only a few times as
long as the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from .tokenizer import PromptTooLong, Tokenizer

_LEAST_GROWTH = 64  # characters, between two tokenizations
_GROWTH_SHARE = 16
_SPACES = " \n\t\r"


class PromptParts:
    """The parts of one prompt, texts or lists of token ids in any order. An invalid part raises
    ValueError and has no effect; invalid are a text without a tokenizer, invalid Unicode, and
    (PromptTooLong) tokens beyond `max_tokens`. With `add_special_tokens`, a text at the start of
    the prompt gets the special tokens that the tokenizer puts around a text."""

    def __init__(
        self, tokenizer: Tokenizer | None, max_tokens: int, *, add_special_tokens: bool = True
    ) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._add_special_tokens = add_special_tokens
        self._fixed: list[int] = []  # the tokens before the text that still grows
        self._text = ""
        self._num_cut = 0  # length of `_text` at its last tokenization
        self._told: list[int] = []
        self._num_right = 0  # first tokens of `_told` that equal the prompt's
        self._num_checked = 0  # first tokens of `_told` that will stay equal

    @property
    def num_characters(self) -> int:
        """The length, in characters, of the text that may still grow."""
        return len(self._text)

    @property
    def told(self) -> Sequence[int]:
        """All tokens that `add_part` has returned so far, in order."""
        return self._told

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the whole prompt; complete only after `end_prompt`."""
        return self._fixed

    def add_part(self, part: str | Sequence[int]) -> list[int]:
        """Add a part. Return further tokens of the prompt."""
        if not isinstance(part, str):
            self._fix(part)
            return self._tell(self._fixed)
        text = self._joined(part)
        if len(text) - self._num_cut < max(_LEAST_GROWTH, len(text) // _GROWTH_SHARE):
            self._text = text
            return []
        end = _end_of_words(text)
        # The last token may be a special token that the tokenizer puts after every text.
        cut = self._encode(text[:end])[:-1] if end else []
        self._text, self._num_cut = text, len(text)
        return self._tell(self._fixed + cut)

    def end_prompt(self, part: str | Sequence[int] = "") -> tuple[int, list[int]]:
        """Add the last part. Return how many tokens of `told` are valid, and the prompt's tokens
        after the valid ones."""
        if isinstance(part, str):
            text = self._joined(part)
            self._fixed = self._fixed + (self._encode(text) if text else [])
            self._text = ""
        else:
            self._fix(part)
        self._check_told(self._fixed)
        return self._num_right, self._fixed[self._num_right :]

    def _tell(self, known: list[int]) -> list[int]:
        """Return the tokens of `known` after those in `told`; none if a token in `told` differs."""
        self._check_told(known)
        if self._num_right < len(self._told):
            return []
        new = known[len(self._told) :]
        self._told += new
        self._num_right = len(self._told)
        return new

    def _check_told(self, known: list[int]) -> None:
        """Count the tokens in `told` that equal the first tokens of `known`. Fixed tokens are
        compared once only."""
        start = min(self._num_checked, self._num_right)
        pairs = zip(count(start), self._told[start:], known[start:], strict=False)
        differs = next((place for place, told, own in pairs if told != own), None)
        self._num_right = min(len(self._told), len(known)) if differs is None else differs
        self._num_checked = min(len(self._fixed), self._num_right)

    def _fix(self, part: Sequence[int]) -> None:
        """Add to `_fixed` the tokens of the text, which is complete now, and of the part after
        it."""
        text = self._encode(self._text) if self._text else []
        if (num_tokens := len(self._fixed) + len(text) + len(part)) > self._max_tokens:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens and at most {self._max_tokens} fit; shorten it"
            )
        self._fixed += [*text, *part]
        self._text, self._num_cut = "", 0

    def _joined(self, part: str) -> str:
        """Return the growing text extended by a part."""
        if part and self._tokenizer is None:
            raise ValueError("the model has no tokenizer.json; give parts as lists of token ids")
        try:
            part.encode()
        except UnicodeEncodeError:
            raise ValueError(
                "the text holds half of a surrogate pair, which is no Unicode character; send "
                "valid UTF-8"
            ) from None
        text = self._text + part
        if self._tokenizer is not None:
            self._tokenizer.check_length(text, self._max_tokens)
        return text

    def _encode(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        is_first = not self._fixed
        return self._tokenizer.encode(
            text,
            add_special_tokens=is_first and self._add_special_tokens,
            max_tokens=self._max_tokens,
        )


def _end_of_words(text: str) -> int:
    """Return the index after the last word whose end is certain; 0 without such a word."""
    last = max(text.rfind(space) for space in _SPACES)
    return len(text[: last + 1].rstrip())
