# SPDX-License-Identifier: Apache-2.0
"""Converts log-probabilities to OpenAI's two forms, and to vLLM's form for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ....request.logprobs import PositionLogprobs, PromptLogprobs
from ...token_texts import REPLACEMENT, TokenTexts
from .replies import ChatLogprobs, CompletionLogprobs, PromptToken, TokenLogprob, TopLogprob


def chat_logprobs(
    positions: Sequence[PositionLogprobs], count: int, texts: TokenTexts, *, as_ids: bool
) -> ChatLogprobs:
    """Return log-probabilities in OpenAI's form for chats, with `count` tokens at each position."""
    content = []
    for position in positions:
        each = [
            TopLogprob(known.text, logprob, known.raw)
            for known, logprob in zip(
                [
                    texts.get_token_text(token, as_id=as_ids)
                    for token in position.token_ids[: count + 1]
                ],
                position.logprobs,
                strict=False,
            )
        ]
        taken, likeliest = each[0], each[1:]
        content.append(TokenLogprob(taken.token, taken.logprob, taken.bytes, likeliest))
    return ChatLogprobs(content)


def prompt_logprobs(
    positions: PromptLogprobs, count: int, texts: TokenTexts, *, as_ids: bool
) -> list[dict[int, PromptToken] | None]:
    """Return a prompt's log-probabilities in vLLM's form, with `count` tokens besides its own."""
    form: list[dict[int, PromptToken] | None] = []
    for position in positions:
        if position is None:
            form.append(None)
            continue
        ranks = (position.rank, *range(1, count + 1))
        tokens: dict[int, PromptToken] = {}
        for token, logprob, rank in zip(position.token_ids, position.logprobs, ranks, strict=False):
            if token not in tokens:
                text = texts.get_token_text(token, as_id=as_ids).text
                tokens[token] = PromptToken(logprob, rank, text)
        form.append(tokens)
    return form


class CompletionForm:
    """Converts one choice's log-probabilities to OpenAI's form for completions, in pieces. Offsets
    come from tokens' bytes, so tokens that are parts of one character have the same offset."""

    def __init__(
        self, texts: TokenTexts, count: int, *, as_ids: bool, skip_special_tokens: bool
    ) -> None:
        self._texts = texts
        self._count = count
        self._as_ids = as_ids
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def format_tokens(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> CompletionLogprobs:
        form = CompletionLogprobs([], [], [], [])
        for token, position in zip(token_ids, positions, strict=True):
            form.tokens.append(self._texts.get_token_text(token, as_id=self._as_ids).text)
            form.text_offset.append(self._advance_offset(token))
            if position is None:
                form.token_logprobs.append(None)
                form.top_logprobs.append(None)
            else:
                form.token_logprobs.append(position.logprobs[0])
                form.top_logprobs.append(self._top(position))
        return form

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """Return the log-probabilities of the likeliest tokens and the chosen token, by text. If
        several tokens have the same text, the likeliest of these tokens counts."""
        top: dict[str, float] = {}
        for token, logprob in zip(
            position.token_ids[: self._count + 1], position.logprobs, strict=False
        ):
            text = self._texts.get_token_text(token, as_id=self._as_ids).text
            top[text] = max(logprob, top.get(text, logprob))
        return top

    def _advance_offset(self, token: int) -> int:
        """Return the token's offset in the text in characters, and advance to the token's end."""
        known = self._texts.get_token_text(token)
        if known.is_special and self._skip_special_tokens:
            return self._offset
        raw = known.text.encode() if known.raw is None else bytes(known.raw)
        waits = bool(self._decoder.getstate()[0])
        first = self._decoder.decode(raw[:1])
        # REPLACEMENT stands for the incomplete character before a token that does not continue it.
        apart = len(first) > 1 or bool(self._decoder.getstate()[0])
        begin = self._offset + (waits and apart and first.startswith(REPLACEMENT))
        self._offset += len(first) + len(self._decoder.decode(raw[1:]))
        return begin
