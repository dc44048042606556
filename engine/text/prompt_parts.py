# SPDX-License-Identifier: Apache-2.0
"""PromptParts: the tokens of a prompt that comes in parts, as they are in the whole prompt.

A tokenizer joins what stands at the border of two parts. So a text is told up to its last word, and
when it is whole its tokens are held against those that were told:

    parts    "The quick br" "own fox"
    told     The quick      brown       behind them, at the end: fox

Where they differ after all, what was told counts up to there. A text is cut into tokens anew when a
sixteenth has come to it, so that many small parts take no more than some times its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from .tokenizer import PromptTooLong, Tokenizer

_LEAST_GROWTH = 64  # characters
_GROWTH_SHARE = 16
_SPACES = " \n\t\r"


class PromptParts:
    """Parts are texts or lists of token ids, in any order. Raises ValueError for a part that cannot
    be, which is as if it had not come: for a text without a tokenizer or of no Unicode, and
    (PromptTooLong) beyond `max_tokens`. With `add_special_tokens` a first text has those that the
    tokenizer puts around one."""

    def __init__(
        self, tokenizer: Tokenizer | None, max_tokens: int, *, add_special_tokens: bool = True
    ) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._add_special_tokens = add_special_tokens
        self._fixed: list[int] = []  # the tokens before the text that still grows
        self._text = ""
        self._num_cut = 0  # characters of that when it was cut into tokens last
        self._told: list[int] = []
        self._num_right = 0  # of those, that are the prompt's own: the first ones, if not all
        self._num_checked = 0  # of those, that will always be

    @property
    def num_characters(self) -> int:
        """The length of the text that the next part may be joined to, in characters."""
        return len(self._text)

    @property
    def told(self) -> Sequence[int]:
        """The tokens that the calls of `add_part` have given so far, in order."""
        return self._told

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the whole prompt; to be asked for behind `end_prompt`."""
        return self._fixed

    def add_part(self, part: str | Sequence[int]) -> list[int]:
        """A part has come. The tokens that can be told now, behind those told before."""
        if not isinstance(part, str):
            self._fix(part)
            return self._tell(self._fixed)
        text = self._joined(part)
        if len(text) - self._num_cut < max(_LEAST_GROWTH, len(text) // _GROWTH_SHARE):
            self._text = text
            return []
        end = _end_of_words(text)
        # The last token may be one that ends every text.
        cut = self._encode(text[:end])[:-1] if end else []
        self._text, self._num_cut = text, len(text)
        return self._tell(self._fixed + cut)

    def end_prompt(self, part: str | Sequence[int] = "") -> tuple[int, list[int]]:
        """The last part has come: how many of the tokens that were told are the prompt's own, and
        those behind them."""
        if isinstance(part, str):
            text = self._joined(part)
            self._fixed = self._fixed + (self._encode(text) if text else [])
            self._text = ""
        else:
            self._fix(part)
        self._check_told(self._fixed)
        return self._num_right, self._fixed[self._num_right :]

    def _tell(self, known: list[int]) -> list[int]:
        """The tokens that have become known; none where others were told in their place."""
        self._check_told(known)
        if self._num_right < len(self._told):
            return []
        new = known[len(self._told) :]
        self._told += new
        self._num_right = len(self._told)
        return new

    def _check_told(self, known: list[int]) -> None:
        """Count the tokens that were told and are the first of those known. Those that are fixed
        are looked at once."""
        start = min(self._num_checked, self._num_right)
        pairs = zip(count(start), self._told[start:], known[start:], strict=False)
        differs = next((place for place, told, own in pairs if told != own), None)
        self._num_right = min(len(self._told), len(known)) if differs is None else differs
        self._num_checked = min(len(self._fixed), self._num_right)

    def _fix(self, part: Sequence[int]) -> None:
        """Tokens stand behind the text, which is whole."""
        text = self._encode(self._text) if self._text else []
        if (num_tokens := len(self._fixed) + len(text) + len(part)) > self._max_tokens:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens and at most {self._max_tokens} fit; shorten it"
            )
        self._fixed += [*text, *part]
        self._text, self._num_cut = "", 0

    def _joined(self, part: str) -> str:
        """The text that grows, with a part more."""
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
    """The place behind the last word of which the end is sure; 0: there is none."""
    last = max(text.rfind(space) for space in _SPACES)
    return len(text[: last + 1].rstrip())
