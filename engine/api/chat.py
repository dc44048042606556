# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: a conversation in, the assistant's next message out.

The model's chat template makes one prompt of the conversation. Tools are refused, not ignored.
"""

from __future__ import annotations

import asyncio
import time
import uuid

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from .answer import Answer, Part
from .body import decode_body, read_body
from .chat_template import TemplateRefused
from .errors import ApiError
from .front import Front
from .generation import Generation
from .protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    Delta,
    Usage,
)

_decoder = msgspec.json.Decoder(ChatRequest)


class ChatAnswer(Answer):
    """A whole message, or the pieces of one."""

    def whole(self, parts: list[Part], usage: Usage) -> ChatCompletion:
        choices = [
            ChatChoice(
                part.index,
                AssistantMessage("assistant", part.text),
                finish_reason=part.finish_reason,
                stop_reason=part.stop_reason,
                prompt_token_ids=part.prompt_token_ids,
                token_ids=part.token_ids,
            )
            for part in parts
        ]
        name = self.front.model_name
        return ChatCompletion(self.answer_id, "chat.completion", self.created, name, choices, usage)

    def chunk(self, parts: list[Part], usage: Usage | UnsetType | None) -> ChatChunk:
        choices = [
            ChatChunkChoice(
                part.index,
                Delta("assistant" if part.is_first else UNSET, part.text),
                finish_reason=part.finish_reason,
                stop_reason=part.stop_reason,
                prompt_token_ids=part.prompt_token_ids,
                token_ids=part.token_ids,
            )
            for part in parts
        ]
        name = self.front.model_name
        return ChatChunk(
            self.answer_id, "chat.completion.chunk", self.created, name, choices, usage
        )


async def create_chat_completion(front: Front, http: Request) -> ASGIApp:
    """The route."""
    arrival_seconds = time.monotonic()
    request = decode_body(await read_body(http, front.settings), _decoder)
    front.check(request)
    max_tokens = _max_tokens(request)
    async with asyncio.timeout(front.settings.request_timeout_seconds):  # others may be before it
        text = await _render(front, request)
    # The template has written the special tokens itself.
    (ids,) = await front.encode([text], add_special_tokens=False, param="messages")
    prompt = front.check_ids(ids, "messages")
    # Without a limit, the answer may take what the context has left, as in OpenAI's API.
    params = front.sampling_params(request, prompt, max_tokens, front.client.ready.max_model_len)
    answer_id = f"chatcmpl-{uuid.uuid4().hex}"
    message = front.make_request(f"{answer_id}-0", prompt, params, request)
    generations = [Generation(0, message, arrival_seconds)]
    return await ChatAnswer(front, answer_id, request, generations).respond(http)


async def _render(front: Front, request: ChatRequest) -> str:
    settings = front.settings
    count = len(request.messages)
    if not 1 <= count <= settings.max_messages_per_request:
        most = settings.max_messages_per_request
        message = f"`messages` must hold 1 to {most} messages, not {count}"
        raise ApiError(message, param="messages", code="invalid_value")
    if front.template is None:
        message = "the model has no chat template; use /v1/completions with a prompt"
        raise ApiError(message, param="messages", code="no_chat_template")
    try:
        return await front.template.render(
            [_as_template_sees(message) for message in request.messages],
            add_generation_prompt=request.add_generation_prompt,
            max_characters=settings.max_rendered_characters,
            timeout_seconds=settings.template_timeout_seconds,
        )
    except TemplateRefused as error:
        raise ApiError(str(error), param="messages", code="chat_template_failed") from None


def _as_template_sees(message: ChatMessage) -> dict[str, object]:
    """Most templates know only text, so the parts of a message are joined line by line."""
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    seen: dict[str, object] = {"role": message.role, "content": content}
    if message.name is not None:
        seen["name"] = message.name
    return seen


def _max_tokens(request: ChatRequest) -> int | None:
    """`max_tokens` under either of its names."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = (
            f"`max_tokens` is {old} and `max_completion_tokens`, its newer name, is {new}; "
            "send one of them"
        )
        raise ApiError(message, param="max_completion_tokens", code="invalid_value")
    return new if new is not None else old
