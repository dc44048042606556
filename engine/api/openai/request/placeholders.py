# SPDX-License-Identifier: Apache-2.0
"""Checks that the placeholders in a prompt are those of the conversation's pictures.

A client's text with a placeholder could take a picture's place, so such texts are refused before
the template renders them. A template may leave out or move pictures; the prompt is refused then."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ...api_errors import ApiError
from ..message_parts import arguments_in, joined_texts
from ..templates.rendering import Rendering
from ..templates.template_probe import PICTURE_MARK, Seen
from .protocol import ChatMessage, ContentPart


def refuse_placeholders(
    placeholder: str,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, object]] | None,
    variables: Mapping[str, object],
) -> None:
    """Raise ApiError for the first item with a placeholder among all that a template can render."""
    items = [*_items_of(messages), ("tools", tools), ("chat_template_kwargs", variables)]
    words = [(word, word.encode()) for word in (placeholder, PICTURE_MARK)]
    for place, value in items:
        try:
            found = msgspec.json.encode(value)
        except RecursionError:
            message = f"`{place}` nests lists or objects too deeply; send a flat one"
            raise ApiError(message, param=place, code="invalid_value") from None
        for word, encoded in words:
            if encoded in found:
                message = (
                    f"`{place}` contains {word!r}, which stands for a picture in the prompt; leave "
                    "it out, and send a picture as a part of the type image_url"
                )
                raise ApiError(message, param=place, code="invalid_value")


def _items_of(messages: Sequence[ChatMessage]) -> Iterator[tuple[str, object]]:
    """Yield the place and value of each item of the messages that a template can render."""
    for number, message in enumerate(messages):
        for name in message.__struct_fields__:
            place, value = f"messages[{number}].{name}", getattr(message, name)
            if isinstance(value, list):
                for index, item in enumerate(value):
                    yield f"{place}[{index}]", _rendered(item)
            else:
                yield place, value
        yield f"messages[{number}].content", joined_texts(message)


def _rendered(item: object) -> object:
    """Return a part of a content without its URL, or a tool call with its parsed arguments."""
    if isinstance(item, ContentPart):
        return msgspec.structs.replace(item, image_url=None)
    function = getattr(item, "function", None)
    return [item, arguments_in(function.arguments)] if function else item


async def check_shown(
    placeholder: str,
    rendering: Rendering,
    messages: Sequence[ChatMessage],
    seen: Sequence[Seen],
    origins: Sequence[int],
) -> None:
    """Raise ApiError unless the prompt shows each picture in its message, in order. A mark behind
    each message with pictures divides the prompt; `origins` has the index of each message."""
    mark, marked, wanted = uuid.uuid4().hex, list(seen), []
    for place, message in enumerate(seen):
        num_pictures = str(message.get("content")).count(PICTURE_MARK)
        if num_pictures:
            marked[place] = {**message, "content": f"{message['content']}{mark}{place}."}
            wanted.append((place, num_pictures))
    rest = await rendering.make_prompt(marked) if wanted else ""
    for place, num_pictures in wanted:
        before, found, rest = rest.partition(f"{mark}{place}.")
        num_shown = before.count(placeholder) if found else 0
        if num_shown != num_pictures:
            origin = f"messages[{origins[place]}]"
            words = (
                f"the model's chat template shows {num_shown} pictures in the place of `{origin}`, "
                f"of the role {messages[origins[place]].role}, which has {num_pictures}; move them "
                "into a user's message, or start the server with a --chat-template that shows them"
            )
            raise ApiError(words, param=origin, code="chat_template_failed")
