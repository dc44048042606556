# SPDX-License-Identifier: Apache-2.0
"""The text and the thought of a message, from its content, parts, refusal and reasoning fields."""

from __future__ import annotations

from ..api_errors import ApiError
from .request.protocol import ChatMessage, ContentPart

# Types of parts that hold text, each with its field. Chats use the first type; the next two are its
# names in OpenAI's newer API.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_THOUGHTS = {"thinking": "thinking", "reasoning": "text"}
_FIELDS = {**_TEXTS, **_THOUGHTS}
_MAX_QUOTED_CHARACTERS = 64


def text_of(message: ChatMessage) -> str:
    """Return the text of a message: its parts, joined by line breaks, and the model's refusal."""
    content = message.content
    texts = [content] if isinstance(content, str) else _texts_in(content, _TEXTS)
    if isinstance(message.refusal, str):
        texts.append(message.refusal)
    return "\n".join(texts) if len(texts) > 1 and texts[0] else "".join(texts)


def thought_of(message: ChatMessage) -> str:
    """Return the thought of an earlier answer; empty if the answer has no thought."""
    content = message.content
    parts = [] if isinstance(content, str) else _texts_in(content, _THOUGHTS)
    return message.reasoning_content or message.reasoning or "\n".join(parts)


def check_parts(message: ChatMessage, place: str) -> None:
    """Raise ApiError for the first part that holds no text."""
    if not isinstance(message.content, list):
        return
    for index, part in enumerate(message.content):
        at = f"{place}.content[{index}]"
        field = _FIELDS.get(part.type)
        if field is None:
            kind = part.type[:_MAX_QUOTED_CHARACTERS]
            words = (
                f"`{at}` is a part of the type {kind}; models read text here, no pictures, sounds "
                "or files, so send parts of the type text"
            )
            raise ApiError(words, param=f"{at}.type", code="unsupported_content_part")
        if getattr(part, field) is None:
            words = f"`{at}` is a part of the type {part.type} without `{field}`; add it"
            raise ApiError(words, param=f"{at}.{field}", code="missing_field")


def _texts_in(parts: list[ContentPart] | None, fields: dict[str, str]) -> list[str]:
    found = [getattr(part, fields[part.type]) for part in parts or () if part.type in fields]
    return [text for text in found if text is not None]
