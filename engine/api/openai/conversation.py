# SPDX-License-Identifier: Apache-2.0
"""The messages of a request become one prompt text, by the model's chat template."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ....tiers.settings.format import format_value
from ...text.tokenizer import Tokenizer
from ..errors import ApiError
from ..settings import ApiSettings
from .chat_template import RESERVED_VARIABLES, SPECIAL_TOKENS, ChatTemplate, TemplateRefused
from .checks import check_messages
from .protocol import ChatMessage, MadeCall


class TemplateFields(Protocol):
    """What requests say about the template."""

    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


class Renders(Protocol):
    """What a rendering needs of the HTTP front."""

    @property
    def template(self) -> ChatTemplate | None: ...
    @property
    def settings(self) -> ApiSettings: ...


async def render(
    front: Renders,
    messages: list[ChatMessage],
    fields: TemplateFields,
    tools: Sequence[Mapping[str, object]] | None = None,
) -> str:
    """The prompt, with `tools` as the template is to show them. Raises ApiError for messages that
    are no conversation, for fields that contradict each other, and where the template refuses."""
    check_messages(front.settings, messages)
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


def _variables(front: Renders, given: Mapping[str, Any]) -> Mapping[str, Any]:
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


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The fields of a request that are about the template, for callers without HTTP. Raises
    ValueError for another type."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("add_generation_prompt", "continue_final_message"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"{name} takes True or False, not {format_value(value)}")
        given = self.chat_template_kwargs
        is_plain = given is None or isinstance(given, dict)
        try:
            msgspec.json.encode(given)
        except (TypeError, ValueError, RecursionError):
            is_plain = False
        if not is_plain:
            raise ValueError(
                "chat_template_kwargs takes a dict of plain values of JSON, not "
                f"{format_value(given)}"
            )


class ConversationRenderer:
    """Renders the conversations of callers without HTTP, under the limits that HTTP has without
    settings. `source` is a template in place of the model's own one.

    Raises ValueError where there is no template, or one that cannot be compiled.
    """

    def __init__(self, model_path: Path, tokenizer: Tokenizer, source: str | None = None) -> None:
        self.settings = ApiSettings()
        self.template: ChatTemplate | None
        if source is None:
            self.template = ChatTemplate.load(model_path, tokenizer)
        elif isinstance(source, str):
            found = {name: tokenizer.special_token(name) for name in SPECIAL_TOKENS}
            tokens = {name: text for name, text in found.items() if text}
            self.template = ChatTemplate(source, tokens, "chat_template")
        else:
            raise ValueError(f"chat_template takes a Jinja template, not {format_value(source)}")
        if self.template is None:
            raise ValueError(
                f"{model_path} has no chat template; give one as chat_template, or use `generate` "
                "with a prompt"
            )

    async def render(
        self,
        messages: object,
        options: ChatOptions,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """The prompt of a list of messages, which are as in HTTP's JSON, with `tools` as the
        template is to show them. Raises ValueError."""
        try:
            return await render(self, msgspec.convert(messages, list[ChatMessage]), options, tools)
        except msgspec.ValidationError as error:
            raise ValueError(f"messages cannot be used: {error}") from None
        except ApiError as error:
            raise ValueError(error.message) from None
