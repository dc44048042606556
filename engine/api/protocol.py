# SPDX-License-Identifier: Apache-2.0
"""The words of the API: what requests may hold and what answers look like, field by field.

Knows nothing of HTTP or of generation. Requests refuse unknown fields; a field of OpenAI's API
that is not built is listed with the values that change nothing, and every other value is refused.
Answers leave out the fields that are ours and were not asked for.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from .errors import ApiError


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`include_usage`: one more chunk at the end, without choices, that holds the usage."""

    include_usage: bool = False


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of request share. `None` is the default of each field."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Ours and vLLM's: the token ids beside the text, and a secret that separates cached blocks.
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    # A name that OpenAI's service keeps for its own records; it changes nothing here.
    user: str | None = None
    # Not built: see NEUTRAL_VALUES.
    n: Any = None
    best_of: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    response_format: Any = None
    priority: Any = None


# A whole prompt is a string or a list of ids; a list of either is several prompts.
Prompt = str | list[int | str | list[int]]


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: Prompt
    echo: Any = None
    suffix: Any = None


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    parallel_tool_calls: Any = None
    top_logprobs: Any = None
    modalities: Any = None


# Fields that are not built, with the values (None aside) under which nothing is asked of them.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "priority": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "top_logprobs": (0,),
    "modalities": (["text"],),
}


def refuse_unsupported(request: SamplingFields) -> None:
    """Raises ApiError naming the first field that asks for something that is not built."""
    for name, neutral in NEUTRAL_VALUES.items():
        value = getattr(request, name, None)
        # By type as well: `logprobs: 0` asks for something, although 0 == False.
        if value is None or any(value == v and _alike(value, v) for v in neutral):
            continue
        cure = f"leave it out or send {_shown(neutral[0])}" if neutral else "leave it out"
        message = f"`{name}` is not supported by this server; {cure}"
        raise ApiError(message, param=name, code="unsupported_parameter")


def _alike(value: object, neutral: object) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool)


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()


class PromptTokensDetails(msgspec.Struct):
    """Prompt tokens that were not computed anew, in all and by the tier they came from."""

    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]


class Usage(msgspec.Struct):
    """Tokens of one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(msgspec.Struct):
    """One completion, or in a stream what was added to it."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class AssistantMessage(msgspec.Struct):
    """A whole message."""

    role: Literal["assistant"]
    content: str


class ChatChoice(msgspec.Struct):
    """One whole message and how it ended."""

    index: int
    message: AssistantMessage
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What was added to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """One message's growth."""

    index: int
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(msgspec.Struct):
    """Each chunk of its stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct):
    """One model of /v1/models."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(msgspec.Struct):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


def now() -> int:
    """Seconds since 1970, for `created`; nothing is decided by it."""
    return int(datetime.now(UTC).timestamp())
