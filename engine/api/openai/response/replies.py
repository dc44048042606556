# SPDX-License-Identifier: Apache-2.0
"""The fields of the HTTP API's answers, in the forms of OpenAI's API and of vLLM.

Most fields that are not in OpenAI's API are left out unless the request asks for the field."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

KvParams = dict[str, Any] | UnsetType  # UNSET: the request is not handed over to a decode node
TokenIds = list[int] | UnsetType  # UNSET: the request does not ask for token ids


class PromptTokensDetails(msgspec.Struct):
    """The numbers of prompt tokens that came from a cache, in total and by tier."""

    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]


class CompletionTokensDetails(msgspec.Struct):
    """The number of completion tokens in thoughts, without the marks around the thoughts."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    # UNSET if thoughts are not split off from the answer's text.
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptToken(msgspec.Struct, gc=False):
    """A token at a position of the prompt: the prompt's own token, or a likely token. An answer may
    have thousands of these objects, so the garbage collector does not track them (`gc=False`); no
    `PromptToken` can be part of a reference cycle."""

    logprob: float
    rank: int
    decoded_token: str


# One entry for each prompt token: tokens by id, or None for the prompt's first token.
PromptTokens = list[dict[int, PromptToken] | None] | UnsetType


class CompletionLogprobs(msgspec.Struct):
    """Four lists with one entry for each token of a completion. `text_offset` is in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """A completion, or the piece that a chunk of a stream adds to a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: TokenIds = UNSET
    token_ids: TokenIds = UNSET
    prompt_logprobs: PromptTokens = UNSET
    routed_experts: str | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: KvParams = UNSET


class TopLogprob(msgspec.Struct, gc=False):
    """A likely token at a position of the answer. `bytes` is null if the bytes are unknown."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    """The chosen token, and the likeliest tokens at the same position."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The log-probabilities of a message, with one entry for each token."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    """The function that a tool call names. `arguments` is JSON if the model wrote JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionDelta(msgspec.Struct):
    """The piece of a called function that a chunk adds; a call's first chunk has the name."""

    name: str | UnsetType
    arguments: str


class ToolCallDelta(msgspec.Struct):
    """The piece of tool call `index` that a chunk adds. A first chunk has `id` and `type`."""

    index: int
    id: str | UnsetType
    type: Literal["function"] | UnsetType
    function: FunctionDelta


class AssistantMessage(msgspec.Struct):
    """The message of a chat's answer. `content` is null for a message of only tool calls."""

    role: Literal["assistant"]
    content: str | None
    # The message's thoughts, under vLLM's older and newer name; UNSET without thoughts.
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: TokenIds = UNSET
    token_ids: TokenIds = UNSET
    warning: str | UnsetType = UNSET  # UNSET without a warning
    routed_experts: str | UnsetType = UNSET


class Delta(msgspec.Struct):
    """The piece that a chunk of a stream adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: TokenIds = UNSET
    token_ids: TokenIds = UNSET
    warning: str | UnsetType = UNSET  # UNSET without a warning
    routed_experts: str | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptTokens = UNSET
    kv_transfer_params: KvParams = UNSET


class ChatChunk(msgspec.Struct):
    """A chunk of the stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: KvParams = UNSET


class Tokens(msgspec.Struct):
    """The answer of /tokenize. `token_strs` has the tokens as the vocabulary spells them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedPrompt(msgspec.Struct):
    """The answer of /detokenize."""

    prompt: str


class ModelCard(msgspec.Struct):
    """A model in /v1/models, or a LoRA adapter, whose `parent` is the base model. `root` is the
    path, which requests may also use as the model's name, or the name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    parent: str | UnsetType = UNSET
    fingerprint: str | UnsetType = UNSET


class ModelList(msgspec.Struct):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


def now() -> int:
    """Return the seconds since 1970, for the field `created` only."""
    return int(datetime.now(UTC).timestamp())
