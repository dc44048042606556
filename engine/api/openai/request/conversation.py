# SPDX-License-Identifier: Apache-2.0
"""Renders a request's messages as one prompt text with the model's chat template."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from .....tiers.settings.format import format_value
from ....text.tokenizer import Tokenizer
from ...api_errors import ApiError
from ...api_settings import ApiSettings
from ...chat_template import RESERVED_VARIABLES, ChatTemplate
from ..message_parts import arguments_in, check_parts, text_of, thought_of
from ..templates.rendering import Rendering
from ..templates.sandbox import TemplateRefused
from ..templates.template_probe import ABSENT, NULL, CallForm, Seen
from .placeholders import check_shown, refuse_placeholders
from .protocol import NEUTRAL_IN_MESSAGES, ChatMessage, MadeCall, refuse_unsupported

_ROLES_OF_RULES = {"system", "developer"}


class TemplateFields(Protocol):
    """The fields of a request that concern the chat template."""

    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...


class Renders(Protocol):
    """The attributes of `Front` that `render` needs."""

    @property
    def template(self) -> ChatTemplate | None: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def settings(self) -> ApiSettings: ...
    @property
    def picture_placeholder(self) -> str | None: ...  # None: the model reads only text


async def render(
    front: Renders,
    messages: list[ChatMessage],
    fields: TemplateFields,
    tools: Sequence[Mapping[str, object]] | None = None,
) -> str:
    """Return the prompt text of a conversation. `tools` are in the form for the chat template.
    Raises ApiError for invalid messages, for a message that the template would leave out, for
    fields that contradict each other, and for a conversation that the template refuses."""
    placeholder = front.picture_placeholder
    _check_messages(front.settings, messages, reads_pictures=placeholder is not None)
    if front.template is None:
        raise _no_template(front)
    goes_on = bool(fields.continue_final_message)
    if goes_on and fields.add_generation_prompt:
        message = (
            "`continue_final_message` goes on with the last message and `add_generation_prompt` "
            "begins a new one; send one of them"
        )
        raise ApiError(message, param="continue_final_message", code="invalid_value")
    if goes_on and messages[-1].tool_calls:
        message = (
            "`continue_final_message` goes on with a text, and the last message calls tools; leave "
            "it out"
        )
        raise ApiError(message, param="continue_final_message", code="invalid_value")
    wants_turn = fields.add_generation_prompt
    rendering = Rendering(
        front.template.for_tools(tools),
        front.settings,
        not goes_on if wants_turn is None else wants_turn,
        _variables(front, fields),
        tools,
    )
    if placeholder is not None:
        refuse_placeholders(placeholder, messages, tools, rendering.variables)
    try:
        async with asyncio.timeout(front.settings.request_timeout_seconds):  # the queue counts too
            return await _prompt(rendering, messages, placeholder, goes_on=goes_on)
    except TemplateRefused as error:
        raise ApiError(str(error), param="messages", code="chat_template_failed") from None


def _check_messages(
    settings: ApiSettings, messages: list[ChatMessage], *, reads_pictures: bool
) -> None:
    """Raise ApiError for the first invalid message. The error has the message's index."""
    most = settings.max_messages_per_request
    if not 1 <= len(messages) <= most:
        message = f"`messages` must hold 1 to {most} messages, not {len(messages)}"
        raise ApiError(message, param="messages", code="invalid_value")
    for index, each in enumerate(messages):
        place = f"messages[{index}]"
        if each.role == "function":
            message = f"`{place}.role` is function, the older form of tool; send tool"
            raise ApiError(message, param=f"{place}.role", code="unsupported_parameter")
        refuse_unsupported(each, NEUTRAL_IN_MESSAGES, f"{place}.")
        check_parts(each, place, reads_pictures=reads_pictures)
        _check_tools_in(each, place)
        # An assistant's message may lack content: clients send an empty answer back in this form.
        if each.content is None and each.role != "assistant":
            message = f"`{place}` has no `content`; add a text, or leave the message out"
            raise ApiError(message, param=f"{place}.content", code="missing_field")


def _check_tools_in(message: ChatMessage, place: str) -> None:
    """Raise ApiError if a message of another role than assistant has calls, if a message of another
    role than tool has a `tool_call_id`, and if a tool's message has no `tool_call_id`."""
    for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and message.role != role:
            words = f"`{place}.{name}` is for messages of the role {role}, not {message.role}"
            raise ApiError(f"{words}; leave it out", param=f"{place}.{name}", code="invalid_value")
    if message.role == "tool" and not message.tool_call_id:
        words = f"`{place}` has no `tool_call_id`; add the `id` of the call that it answers"
        raise ApiError(words, param=f"{place}.tool_call_id", code="missing_field")


def _no_template(front: Renders) -> ApiError:
    if front.tokenizer is None:
        message = (
            "this server has no tokenizer, so it takes no texts: send token ids as `prompt` to "
            "/v1/completions, or put tokenizer.json into the model's directory"
        )
        return ApiError(message, param="messages", code="no_chat_template")
    message = (
        "the model has no chat template; use /v1/completions with a prompt, or start the server "
        "with --chat-template"
    )
    return ApiError(message, param="messages", code="no_chat_template")


async def _prompt(
    rendering: Rendering, messages: list[ChatMessage], placeholder: str | None, *, goes_on: bool
) -> str:
    form = CallForm()
    if any(message.tool_calls or message.role == "tool" for message in messages):
        form = await rendering.call_form()
    seen: list[Seen] = []
    origins: list[int] = []
    names_developer = rendering.template.probe.names_developer
    for index, message in as_template_orders(messages, form):
        turns = as_template_sees(message, form, names_developer=names_developer)
        seen += turns
        origins += [index] * len(turns)
    for one, other in set(_rules_in_a_row(seen)):
        if not await rendering.takes_both(one, other):
            seen, origins = _join_rules(seen, origins)
            break
    # A mark after the last message's text shows where the text ends in the prompt.
    mark = f"end-{uuid.uuid4().hex}" if goes_on else ""
    if goes_on:  # the blank after the mark shows whether the template trims messages
        seen[-1]["content"] = f"{seen[-1]['content']}{mark} "
    text, left_out = await rendering.render(seen)
    prompt = _until(mark, text) if goes_on else text
    if left_out:
        place = origins[left_out[0]]
        raise _left_out(place, messages[place])
    if placeholder is not None:
        await check_shown(placeholder, rendering, messages, seen, origins)
    return prompt


def _rules_in_a_row(seen: Sequence[Seen]) -> Iterator[tuple[str, str]]:
    """Yield the two roles of each pair of neighbouring system or developer messages."""
    for one, other in pairwise(message["role"] for message in seen):
        if {one, other} <= _ROLES_OF_RULES:
            yield one, other


def _join_rules(seen: list[Seen], origins: list[int]) -> tuple[list[Seen], list[int]]:
    """Join each row of neighbouring system and developer messages to one message, a paragraph for
    each joined message. Return the resulting messages, and the original index of each."""
    joined: list[Seen] = []
    places: list[int] = []
    for message, origin in zip(seen, origins, strict=True):
        if joined and {joined[-1]["role"], message["role"]} <= _ROLES_OF_RULES:
            content = f"{joined[-1]['content']}\n\n{message['content']}"
            joined[-1] = {**joined[-1], "content": content}
        else:
            joined.append(message)
            places.append(origin)
    return joined, places


def _left_out(index: int, message: ChatMessage) -> ApiError:
    what = f"`messages[{index}]`, of the role {message.role},"
    words = (
        f"{what} would leave no trace in the prompt, since the model's chat template leaves it out "
        "there; send what it says in another message, or start the server with a --chat-template "
        "that shows it"
    )
    return ApiError(words, param=f"messages[{index}]", code="message_left_out")


def as_template_orders(
    messages: Sequence[ChatMessage], form: CallForm
) -> Iterator[tuple[int, ChatMessage]]:
    """Yield each message with its index, in the order for the template. If the template shows only
    one call of a message, a message with several calls becomes one message for each call, followed
    by the call's results. If the template shows no tool results, neighbouring tool results become
    one user message."""
    place = 0
    while place < len(messages):
        origin, message = place, messages[place]
        place += message.role != "tool"
        results = []
        while place < len(messages) and messages[place].role == "tool":
            results.append((place, messages[place]))
            place += 1
        calls = message.tool_calls or []
        if form.is_shown and not form.several and len(calls) > 1:
            by_call: dict[str | None, list[tuple[int, ChatMessage]]] = {}
            for each in results:
                by_call.setdefault(each[1].tool_call_id, []).append(each)
            for number, call in enumerate(calls):
                alone = replace(message, tool_calls=[call])
                if number:
                    alone = ChatMessage(role=message.role, name=message.name, tool_calls=[call])
                yield origin, alone
                own = by_call.pop(call.id, [])
                if number == len(calls) - 1:
                    own += [each for rest in by_call.values() for each in rest]
                yield from own if form.shows_results else _as_users(own)
            continue
        if message.role != "tool":
            yield origin, message
        yield from results if form.shows_results else _as_users(results)


def _as_users(results: Sequence[tuple[int, ChatMessage]]) -> Iterator[tuple[int, ChatMessage]]:
    texts = [text_of(message) for _, message in results]
    if texts:
        yield results[0][0], ChatMessage(role="user", content="\n".join(texts))


def as_template_sees(message: ChatMessage, form: CallForm, *, names_developer: bool) -> list[Seen]:
    """Convert one message to the form for the template. The content is one text, the parts joined
    by line breaks, because most templates accept no other form. Tool calls have the form `form`. If
    the template shows no tool calls, the calls become part of the text; if the template shows no
    calls in a message with text, the calls become a separate message."""
    is_systems = message.role == "developer" and not names_developer
    content = text_of(message)
    seen: Seen = {"role": "system" if is_systems else message.role, "content": content}
    if message.name is not None:
        seen["name"] = message.name
    thought = thought_of(message)
    if thought:
        # Templates read thoughts under `reasoning_content` or, as in transformers, `thinking`.
        seen["reasoning_content"] = seen["thinking"] = thought
        if message.reasoning:
            seen["reasoning"] = thought
    if message.tool_call_id is not None:
        seen["tool_call_id"] = message.tool_call_id
    calls = message.tool_calls
    if not calls:
        return [seen]
    if not form.is_shown:
        lines = [_call_as_text(call) for call in calls]
        seen["content"] = "\n".join([content, *lines] if content else lines)
        return [seen]
    of_calls = {**seen, "tool_calls": [_call(each, form) for each in calls]}
    if content.strip() and form.beside_text:
        return [of_calls]
    if form.content == ABSENT:
        del of_calls["content"]
    else:
        of_calls["content"] = None if form.content == NULL else ""
    if not content.strip():
        return [of_calls]
    for name in ("reasoning_content", "thinking", "reasoning"):
        of_calls.pop(name, None)
    return [seen, of_calls]


def _call(call: MadeCall, form: CallForm) -> Seen:
    """Return a call in the template's form. Arguments that are not a JSON object become a text, or
    {} if the template accepts no text."""
    given = call.function.arguments
    found = arguments_in(given)
    arguments: object = found
    if found is None:
        arguments = _plain_text(given) if form.as_text or form.takes_text else {}
    elif form.as_text:
        arguments = given if isinstance(given, str) and given.strip()[:1] == "{" else _json(found)
    function = {"name": call.function.name, "arguments": arguments}
    seen: Seen = {"type": "function", "function": function}
    return seen if call.id is None else {"id": call.id, **seen}


def _call_as_text(call: MadeCall) -> str:
    found = arguments_in(call.function.arguments)
    arguments = _plain_text(call.function.arguments) if found is None else found
    return _json({"name": call.function.name, "arguments": arguments})


def _plain_text(given: object) -> str:
    return given if isinstance(given, str) else _json(given)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _variables(front: Renders, fields: TemplateFields) -> Mapping[str, Any]:
    """Return the template's variables: the client's `chat_template_kwargs`, and `reasoning_effort`,
    which has the same name in templates and in OpenAI's API."""
    param, given = "chat_template_kwargs", fields.chat_template_kwargs or {}
    if fields.reasoning_effort is not None:
        given = {"reasoning_effort": fields.reasoning_effort, **given}
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
    before, found, behind = text.rpartition(mark)
    if not found:
        message = (
            "the chat template leaves out the last message, so nothing can go on from it; leave "
            "out `continue_final_message`"
        )
        raise ApiError(message, param="continue_final_message", code="chat_template_failed")
    if not behind.startswith(" "):  # the template trims messages, so the last text is trimmed too
        before = before.rstrip()
    return before.replace(f"{mark} ", "").replace(mark, "")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The options of the chat template for callers of the Python API. Raises ValueError for a field
    of a wrong type."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

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
    """Renders conversations for callers of the Python API, with the HTTP server's default limits.
    `source` is a template that replaces the model's own. Raises ValueError if there is no template,
    or if the template cannot be compiled."""

    def __init__(
        self,
        model_path: Path,
        tokenizer: Tokenizer,
        source: str | None = None,
        *,
        picture_placeholder: str | None = None,
    ) -> None:
        self.settings, self.picture_placeholder = ApiSettings(), picture_placeholder
        self.tokenizer = tokenizer
        self.template: ChatTemplate | None
        if source is None:
            self.template = ChatTemplate.load(model_path, tokenizer)
        elif isinstance(source, str):
            self.template = ChatTemplate.from_source(source, tokenizer, "chat_template")
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
        """Return the prompt text for `messages`, a list in the form of the HTTP API's JSON, and
        `tools` in the form for the template. Raises ValueError."""
        try:
            return await render(self, msgspec.convert(messages, list[ChatMessage]), options, tools)
        except msgspec.ValidationError as error:
            raise ValueError(f"messages cannot be used: {error}") from None
        except ApiError as error:
            raise ValueError(error.message) from None
