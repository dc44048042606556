# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: answers a conversation with the assistant's next message.

The model's chat template converts the conversation and the available tools to one prompt."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from ...pictures.processors.picture_processor import ProcessedPicture
from ...request.pictures import Picture
from ...request.request import BYTES_PER_TOKEN
from ...text.reasoning import ReasoningMarks, Thoughts
from ...text.tool_calls.base import CallPiece
from ..api_errors import ApiError
from ..front import Front
from .follow import follow
from .message_parts import picture_urls
from .request.checks import read_chat
from .request.conversation import render
from .request.protocol import ChatRequest
from .request.sampling import chat_params
from .response.answer import Answer, Part, UsageField, kv_params_of
from .response.array_form import encode_array
from .response.generation import Task, job_of, make_generations, tenant_of
from .response.logprobs_form import chat_logprobs, prompt_logprobs
from .response.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    FunctionCall,
    FunctionDelta,
    PromptTokens,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from .response.tools import ToolUse, tools_of


@dataclass(slots=True)
class ChatAnswer(Answer):
    """The answer to a chat request: whole messages, or the chunks of a stream."""

    request: ChatRequest
    tools: ToolUse

    def whole(self, parts: list[Part], usage: Usage) -> ChatCompletion:
        choices = [
            ChatChoice(
                part.index,
                self._message(part),
                self._logprobs(part),
                part.finish_reason,
                part.stop_reason,
                part.prompt_token_ids,
                part.token_ids,
                part.warning,
                encode_array(part.routed_experts),
            )
            for part in parts
        ]
        name, handed = str(self.request.model), kv_params_of(parts)
        of_prompt = self._prompt_logprobs(parts[0])
        return ChatCompletion(
            self.answer_id, "chat.completion", self.created, name, choices, usage, of_prompt, handed
        )

    def chunk(self, parts: list[Part], usage: UsageField) -> ChatChunk:
        choices = [
            ChatChunkChoice(
                part.index,
                self._delta(part),
                self._logprobs(part),
                part.finish_reason,
                part.stop_reason,
                part.prompt_token_ids,
                part.token_ids,
                part.warning,
                encode_array(part.routed_experts),
            )
            for part in parts
        ]
        name, handed = str(self.request.model), kv_params_of(parts)
        return ChatChunk(
            self.answer_id, "chat.completion.chunk", self.created, name, choices, usage, handed
        )

    def _message(self, part: Part) -> AssistantMessage:
        message = AssistantMessage("assistant", part.text, part.reasoning, part.reasoning)
        if part.tool_calls:
            message.content = part.text or None
            message.tool_calls = [
                ToolCall(self.tools.new_id(), "function", FunctionCall(call.name, call.arguments))
                for call in part.tool_calls
            ]
        return message

    def _delta(self, part: Part) -> Delta:
        """Return a part as a delta; a part with only a thought or tool calls has no content."""
        is_empty = part.reasoning is UNSET and not part.tool_calls
        content = part.text if part.text or is_empty else UNSET
        delta = Delta("assistant" if part.is_first else UNSET, content)
        delta.reasoning_content = delta.reasoning = part.reasoning
        if part.tool_calls:
            delta.tool_calls = [self._call_delta(call) for call in part.tool_calls]
        return delta

    def _call_delta(self, call: CallPiece) -> ToolCallDelta:
        if not call.name:
            return ToolCallDelta(call.number, UNSET, UNSET, FunctionDelta(UNSET, call.arguments))
        function = FunctionDelta(call.name, call.arguments)
        return ToolCallDelta(call.number, self.tools.new_id(), "function", function)

    def _logprobs(self, part: Part) -> ChatLogprobs | None:
        if not self.request.logprobs or part.logprobs is None:
            return None
        count, as_ids = self.request.top_logprobs or 0, self._as_ids
        return chat_logprobs(part.logprobs, count, self.front.texts, as_ids=as_ids)

    def _prompt_logprobs(self, part: Part) -> PromptTokens:
        count = self.request.prompt_logprobs
        if count is None or part.prompt_logprobs is None:
            return UNSET
        texts, as_ids = self.front.texts, self._as_ids
        return prompt_logprobs(part.prompt_logprobs, count, texts, as_ids=as_ids)

    @property
    def _as_ids(self) -> bool:
        return bool(self.request.return_tokens_as_token_ids)


async def create_chat_completion(front: Front, http: Request, *, follows: bool = False) -> ASGIApp:
    """Answer a chat request. With `follows`, only load the prompt's KV blocks (see `follow.py`)."""
    arrival_seconds = time.monotonic()
    request = await read_chat(front, http)
    tools = tools_of(front, request)
    text = await render(front, request.messages, request, tools.shown)
    own_id = uuid.uuid4().hex
    generations = make_generations(
        front,
        request,
        [await _make_task(front, request, text, tools)],
        f"chatcmpl-{own_id}",
        arrival_seconds,
        tenant=tenant_of(front, http),
        job=job_of(http, request, _answered_tool(request)),
    )
    if follows:
        return await follow(front, generations)
    for generation in generations:
        generation.calls, generation.decoder = tools.reader(), tools.decoder
        generation.thoughts = thoughts_of(tools.marks, request, text)
    answer_id = f"chatcmpl-{request.request_id or own_id}"
    return await ChatAnswer(front, answer_id, request, generations, tools).respond(http)


async def _make_task(front: Front, request: ChatRequest, text: str, tools: ToolUse) -> Task:
    """Return the task of a conversation with the prompt `text`, which has no pictures yet. The
    caller keeps no reference to the task, so that pictures are freed when the engine has them."""
    found: list[ProcessedPicture] = []
    placed: list[Picture] = []
    reservation = None
    if front.pictures is not None:
        _refuse_truncation(request)
        most = front.max_prompt_tokens
        found, reservation = await front.pictures.read_pictures(request.messages, most)
        text = front.pictures.expand_text(text, found)
    (prompt,) = await front.resolve_prompts(
        text,
        # The chat template writes special tokens, so by default the tokenizer adds no more.
        add_special_tokens=bool(request.add_special_tokens),
        truncate_to=request.truncate_prompt_tokens,
        max_tokens=request.most_tokens,
        param="messages",
    )
    if front.pictures is not None:
        prompt, placed = front.pictures.place_items(prompt, found)
        front.check_prompt_size(len(prompt) // BYTES_PER_TOKEN, "messages")
    num_tokens = len(prompt) // BYTES_PER_TOKEN
    params = chat_params(front, request, num_tokens, tools.structured_outputs)
    return Task(prompt, params, pictures=placed, reservation=reservation)


def _refuse_truncation(request: ChatRequest) -> None:
    if request.truncate_prompt_tokens is not None and picture_urls(request.messages):
        message = "`truncate_prompt_tokens` could cut a picture; leave it out"
        raise ApiError(message, param="truncate_prompt_tokens", code="invalid_value")


def _answered_tool(request: ChatRequest) -> str:
    """Return the tool whose result is the last message; "" for a last message of another role."""
    last = request.messages[-1] if request.messages else None
    if last is None or last.role != "tool":
        return ""
    for message in reversed(request.messages):
        for call in message.tool_calls or ():
            if call.id == last.tool_call_id:
                return call.function.name
    return last.name or ""


def thoughts_of(marks: ReasoningMarks | None, request: ChatRequest, prompt: str) -> Thoughts | None:
    """Return the splitter of thoughts for a prompt's answer; None if thoughts stay in the text."""
    if marks is None or request.separate_reasoning is False:
        return None
    goes_on = bool(request.continue_final_message)
    return Thoughts(
        marks,
        is_inside=marks.is_open(prompt, goes_on=goes_on),
        included=request.include_reasoning is not False,
        streamed=request.stream_reasoning is not False,
    )
