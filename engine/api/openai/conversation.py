# SPDX-License-Identifier: Apache-2.0
"""The messages of a request become one prompt text, by the model's chat template."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ....tiers.settings.format import format_value
from ..errors import ApiError
from ..front import Front
from .chat_template import RESERVED_VARIABLES, TemplateRefused
from .checks import check_messages
from .protocol import ChatMessage, MadeCall


class TemplateFields(Protocol):
    """What requests say about the template."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


async def render(
    front: Front,
    messages: list[ChatMessage],
    fields: TemplateFields,
    tools: Sequence[Mapping[str, object]] | None = None,
) -> str:
    """The prompt, with `tools` as the template is to show them. Raises ApiError for messages that
    are no conversation, for fields that contradict each other, and where the template refuses."""
    check_messages(front, messages)
    if front.template is None:
        message = "the model has no chat template; use /v1/completions with a prompt"
        raise ApiError(message, param="messages", code="no_chat_template")
    goes_on = bool(fields.continue_final_message)
    if goes_on and fields.add_generation_prompt:
        message = (
            "`continue_final_message` goes on with the last message and `add_generation_prompt` "
            "begins a new one; send one of them"
        )
        raise ApiError(message, param="continue_final_message", code="invalid_value")
    seen = [_as_template_sees(each, f"messages[{i}]") for i, each in enumerate(messages)]
    # Where the last message ends in the prompt is only known to the template.
    mark = f"end-{uuid.uuid4().hex}" if goes_on else ""
    seen[-1]["content"] = f"{seen[-1]['content']}{mark}"
    wants_turn = fields.add_generation_prompt
    settings = front.settings
    try:
        async with asyncio.timeout(settings.request_timeout_seconds):  # others may be before it
            text = await front.template.render(
                seen,
                add_generation_prompt=not goes_on if wants_turn is None else wants_turn,
                variables=_variables(front, fields.chat_template_kwargs or {}),
                max_characters=settings.max_rendered_characters,
                timeout_seconds=settings.template_timeout_seconds,
                tools=tools,
            )
    except TemplateRefused as error:
        raise ApiError(str(error), param="messages", code="chat_template_failed") from None
    return _until(mark, text) if goes_on else text


def _as_template_sees(message: ChatMessage, place: str) -> dict[str, object]:
    """Most templates know only text, so the parts of a message are joined line by line."""
    content = message.content or ""
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    seen: dict[str, object] = {"role": message.role, "content": content}
    if message.name is not None:
        seen["name"] = message.name
    thought = message.reasoning_content or message.reasoning
    if thought:
        seen["reasoning_content"] = thought
    if message.tool_call_id is not None:
        seen["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        seen["tool_calls"] = [
            _call(each, f"{place}.tool_calls[{i}]") for i, each in enumerate(message.tool_calls)
        ]
    return seen


def _call(call: MadeCall, place: str) -> dict[str, object]:
    """Templates write arguments out themselves, so they get them as an object."""
    given = call.function.arguments
    try:
        arguments = msgspec.json.decode(given or b"{}") if isinstance(given, str) else given
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        place = f"{place}.function.arguments"
        message = f"`{place}` must be a JSON object as text, got {format_value(given)}; correct it"
        raise ApiError(message, param=place, code="invalid_value")
    function = {"name": call.function.name, "arguments": arguments}
    seen: dict[str, object] = {"type": "function", "function": function}
    return seen if call.id is None else {"id": call.id, **seen}


def _variables(front: Front, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The client's own variables, such as `enable_thinking`."""
    param = "chat_template_kwargs"
    taken = RESERVED_VARIABLES.intersection(given)
    if taken:
        message = f"`{param}` may not hold {sorted(taken)[0]}, which the server sets; leave it out"
        raise ApiError(message, param=param, code="invalid_value")
    size, most = len(msgspec.json.encode(given)), front.settings.max_template_kwargs_bytes
    if size > most:
        message = f"`{param}` takes {size} bytes as JSON and at most {most} are taken; send less"
        raise ApiError(message, param=param, code="invalid_value")
    return given


def _until(mark: str, text: str) -> str:
    before, found, _ = text.rpartition(mark)
    if not found:
        message = (
            "the chat template leaves out the last message, so nothing can go on from it; leave "
            "out `continue_final_message`"
        )
        raise ApiError(message, param="continue_final_message", code="chat_template_failed")
    return before.replace(mark, "")
