# SPDX-License-Identifier: Apache-2.0
"""`ChatPrompts`: converts conversations to prompts for `LLM.chat`."""

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
    """Converts conversations for one model, with its chat template and picture processor."""

    def __init__(self, path: Path, tokenizer: Tokenizer, template: str | None) -> None:
        """Load the chat template, or use `template` instead. Raises ValueError without a valid
        template, and ConfigError for unsupported settings of pictures."""
        self._tokenizer = tokenizer
        self._pictures = pictures = ChatPictures.load(path)
        placeholder = None if pictures is None else pictures.processor.placeholder
        self._renderer = ConversationRenderer(
            path, tokenizer, template, picture_placeholder=placeholder
        )

    async def make_prompt(
        self,
        messages: Sequence[Any],
        options: ChatOptions,
        tools: Sequence[Mapping[str, object]] | None,
        max_tokens: int,
    ) -> ChatPrompt:
        """Return the prompt of one conversation. The tokenizer may stop after `max_tokens` tokens.
        Raises ValueError for invalid messages and for pictures that cannot be read."""
        reader, pictures = self._pictures, list[ProcessedPicture]()
        if reader is not None:
            messages, pictures = reader.take_pictures(messages)
        text = await self._renderer.render(messages, options, tools)
        if reader is not None:
            text = expand_placeholders(text, pictures, reader.processor.placeholder)
        # No special tokens are added, because the chat template has written the special tokens.
        ids = self._tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)
        if reader is None:
            return ChatPrompt(text, ids, [])
        tokens, placed = place_items(np.asarray(ids, np.int32), pictures, reader.token_id)
        return ChatPrompt(text, tokens.tolist(), placed)
