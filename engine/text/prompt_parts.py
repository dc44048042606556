# SPDX-License-Identifier: Apache-2.0
"""PromptParts: the tokens of a prompt that comes in parts, as they are in the whole prompt.

A tokenizer joins what stands at the border of two parts. So a text is told up to its last word, and
when it is whole its tokens are held against those that were told:

    parts    "The quick br" "own fox"
    told     The quick      brown       behind them, at the end: fox

Where they differ after all, what was told counts up to there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .tokenizer import PromptTooLong, Tokenizer

_LAST_WORD = re.compile(r"\s+\S*\Z")


class PromptParts:
    """Parts are texts or lists of token ids, in any order. Raises ValueError for a text without a
    tokenizer, and PromptTooLong beyond `max_tokens`."""

    def __init__(self, tokenizer: Tokenizer | None, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._fixed: list[int] = []  # the tokens before the text that still grows
        self._text = ""
        self._told: list[int] = []

    def add_part(self, part: str | Sequence[int]) -> list[int]:
        """A part has come. The tokens that can be told now, behind those told before."""
        if isinstance(part, str):
            self._text += part
            last = _LAST_WORD.search(self._text)
            # The last token may be one that ends every text.
            known = self._fixed + self._encode(self._text[: last.start()])[:-1] if last else []
        else:
            self._end_text()
            if len(self._fixed) + len(part) > self._max_tokens:
                raise PromptTooLong(
                    f"the prompt has {len(self._fixed) + len(part)} tokens and at most "
                    f"{self._max_tokens} fit; shorten it"
                )
            self._fixed = [*self._fixed, *part]
            known = self._fixed
        new = known[len(self._told) :]
        if known[: len(self._told)] != self._told:
            return []
        self._told += new
        return new

    def end_prompt(self) -> tuple[int, list[int]]:
        """The prompt is whole: how many of the tokens that were told are its own, and those behind
        them."""
        self._end_text()
        pairs = zip(self._told, self._fixed, strict=False)
        num_kept = next((i for i, (told, own) in enumerate(pairs) if told != own), None)
        if num_kept is None:
            num_kept = min(len(self._told), len(self._fixed))
        return num_kept, self._fixed[num_kept:]

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the whole prompt; to be asked for behind `end_prompt`."""
        return self._fixed

    def _end_text(self) -> None:
        if self._text:
            self._fixed = self._fixed + self._encode(self._text)
            self._text = ""

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise ValueError("the model has no tokenizer.json; give parts as lists of token ids")
        is_first = not self._fixed
        return self._tokenizer.encode(
            text, add_special_tokens=is_first, max_tokens=self._max_tokens
        )
