# SPDX-License-Identifier: Apache-2.0
"""ChatPrompts: makes prompts of conversations for `LLM.chat`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..api.openai.request.conversation import ChatOptions, ConversationRenderer
from ..pictures.processors.picture_processor import (
    ProcessedPicture,
    expand_placeholders,
    place_items,
)
from ..request.pictures import Picture
from ..text.tokenizer import Tokenizer
from .chat_pictures import ChatPictures


class ChatPrompt(NamedTuple):
    text: str
    token_ids: list[int]
    pictures: list[Picture]


class ChatPrompts:
    """The chat template of one model, and its reader of pictures."""

    def __init__(self, path: Path, tokenizer: Tokenizer, template: str | None) -> None:
        """`template` replaces the model's own. Raises ValueError if there is no template, or if it
        cannot be compiled; ConfigError for settings of pictures that are not supported."""
        self._tokenizer = tokenizer
        self._pictures = ChatPictures.load(path)
        self._renderer = ConversationRenderer(
            path, tokenizer, template, reads_pictures=self._pictures is not None
        )

    async def make_prompt(
        self,
        messages: Sequence[Any],
        options: ChatOptions,
        tools: Sequence[Mapping[str, object]] | None,
        max_tokens: int,
    ) -> ChatPrompt:
        """Make the prompt of one conversation. `max_tokens` limits the work for a text that is too
        long. Raises ValueError for invalid messages and for pictures that cannot be read."""
        reader, pictures = self._pictures, list[ProcessedPicture]()
        if reader is not None:
            messages, pictures = reader.take_pictures(messages)
        text = await self._renderer.render(messages, options, tools)
        if reader is not None:
            text = expand_placeholders(text, pictures, reader.processor.placeholder)
        # The template has written the special tokens already.
        ids = self._tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)
        if reader is None:
            return ChatPrompt(text, ids, [])
        return ChatPrompt(
            text, ids, place_items(np.asarray(ids, np.int32), pictures, reader.token_id)
        )
