# SPDX-License-Identifier: Apache-2.0
"""Functions that read texts, thoughts, picture URLs and calls' arguments from messages' fields."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..api_errors import ApiError
from .request.protocol import ChatMessage, ContentPart, ImageUrl
from .templates.template_probe import PICTURE_MARK

# Types of content parts that hold text, each with the field of the text. Chats use `text`; OpenAI's
# Responses API has the names `input_text` and `output_text` for the same type.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_THOUGHTS = {"thinking": "thinking", "reasoning": "text"}
_PICTURES = {"image_url": "image_url", "input_image": "image_url"}
_FIELDS = {**_TEXTS, **_THOUGHTS, **_PICTURES}
_MAX_QUOTED_CHARACTERS = 64
_NO_ARGUMENTS = ("", "null", "None")  # `arguments` that clients send for a call without arguments


def text_of(message: ChatMessage) -> str:
    """Return a message's text: the text parts joined by line breaks, and the model's refusal."""
    content = message.content
    if isinstance(content, list) and any(part.type in _PICTURES for part in content):
        return "".join(_texts_in(content, {**_TEXTS, **_PICTURES}))
    texts = [content] if isinstance(content, str) else _texts_in(content, _TEXTS)
    if isinstance(message.refusal, str):
        texts.append(message.refusal)
    return "\n".join(texts) if len(texts) > 1 and texts[0] else "".join(texts)


def joined_texts(message: ChatMessage) -> str:
    """Return a message's texts without anything between them, as if no picture were there."""
    content = message.content
    texts = [content or ""] if not isinstance(content, list) else _texts_in(content, _TEXTS)
    return "".join(texts) + (message.refusal or "")


def thought_of(message: ChatMessage) -> str:
    """Return the thought of an earlier answer; empty if the answer has no thought."""
    content = message.content
    parts = [] if isinstance(content, str) else _texts_in(content, _THOUGHTS)
    return message.reasoning_content or message.reasoning or "\n".join(parts)


def picture_urls(messages: Sequence[ChatMessage]) -> list[tuple[str, str]]:
    """Return, for each picture of a conversation in order, its path in the request and its URL."""
    found = []
    for number, message in enumerate(messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            given = part.image_url
            url = given.url if isinstance(given, ImageUrl) else given
            if part.type in _PICTURES and url is not None:
                found.append((f"messages[{number}].content[{index}]", url))
    return found


def check_parts(message: ChatMessage, place: str, *, reads_pictures: bool = False) -> None:
    """Raise ApiError for the first content part of an unsupported type or without its content."""
    if not isinstance(message.content, list):
        return
    for index, part in enumerate(message.content):
        at = f"{place}.content[{index}]"
        field = _FIELDS.get(part.type)
        if field is None or (part.type in _PICTURES and not reads_pictures):
            kind = part.type[:_MAX_QUOTED_CHARACTERS]
            reads = "this model reads text and pictures, no sounds or files"
            if not reads_pictures:
                reads = "models read text here, no pictures, sounds or files"
            words = (
                f"`{at}` is a part of the type {kind}; {reads}, so send parts of the type text"
                + " or image_url" * reads_pictures
            )
            raise ApiError(words, param=f"{at}.type", code="unsupported_content_part")
        given = getattr(part, field)
        if isinstance(given, ImageUrl):
            field, given = f"{field}.url", given.url
        if given is None:
            words = f"`{at}` is a part of the type {part.type} without `{field}`; add it"
            raise ApiError(words, param=f"{at}.{field}", code="missing_field")


def arguments_in(given: object) -> dict[str, Any] | None:
    """Return a call's arguments as an object, {} for a call without arguments; None if the
    arguments are no JSON object, as in an answer that was cut off."""
    if given is None or (isinstance(given, str) and given.strip() in _NO_ARGUMENTS):
        return {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    return given if isinstance(given, dict) else None


def _texts_in(parts: list[ContentPart] | None, fields: dict[str, str]) -> list[str]:
    found = [
        PICTURE_MARK if part.type in _PICTURES else getattr(part, fields[part.type])
        for part in parts or ()
        if part.type in fields
    ]
    return [text for text in found if text is not None]
