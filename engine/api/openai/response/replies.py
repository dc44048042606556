# SPDX-License-Identifier: Apache-2.0
"""What answers look like, field by field, in the forms of OpenAI's API and of vLLM.

Fields that are no part of OpenAI's API are left out unless they were asked for.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

KvParams = dict[str, Any] | UnsetType  # UNSET where nothing was handed over
TokenIds = list[int] | UnsetType  # UNSET where the client did not ask for them


class PromptTokensDetails(msgspec.Struct):
    """Prompt tokens that were not computed anew, in all and by the tier they came from."""

    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]


class CompletionTokensDetails(msgspec.Struct):
    """Completion tokens that belong to thoughts, without the marks around these."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Tokens of one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    # UNSET where thoughts are not split off.
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptToken(msgspec.Struct, gc=False):
    """One token at a position of the prompt, be it the one that stands there or a likely one.

    An answer may hold thousands, so the garbage collector does not track them (`gc=False`); they
    cannot be part of a cycle.
    """

    logprob: float
    rank: int
    decoded_token: str


# By token id, one entry for each prompt token; the first has nothing before it, so it has none.
PromptTokens = list[dict[int, PromptToken] | None] | UnsetType


class CompletionLogprobs(msgspec.Struct):
    """Four lists with one entry for each token. `text_offset` counts characters of the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One completion, or in a stream what was added to it."""

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
    """A token that was likely. `bytes` is null where the tokenizer cannot tell them."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    """The token that was taken, and the likeliest ones at its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry for each token of the message."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    """What is called. `arguments` is JSON where the model wrote JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A whole call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionDelta(msgspec.Struct):
    """What a chunk adds to a call: in its first one the name too."""

    name: str | UnsetType
    arguments: str


class ToolCallDelta(msgspec.Struct):
    """The same, with the number of the call; `id` and `type` are in its first chunk."""

    index: int
    id: str | UnsetType
    type: Literal["function"] | UnsetType
    function: FunctionDelta


class AssistantMessage(msgspec.Struct):
    """A whole message. `content` is null where there are calls and nothing else."""

    role: Literal["assistant"]
    content: str | None
    # The thoughts, by vLLM's older and newer name; UNSET where there are none.
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One whole message and how it ended."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: TokenIds = UNSET
    token_ids: TokenIds = UNSET
    warning: str | UnsetType = UNSET  # UNSET where there is nothing to say
    routed_experts: str | UnsetType = UNSET


class Delta(msgspec.Struct):
    """The part of a message that a chunk adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """One message's growth."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: TokenIds = UNSET
    token_ids: TokenIds = UNSET
    warning: str | UnsetType = UNSET  # UNSET where there is nothing to say
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
    """Each chunk of its stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: KvParams = UNSET


class Tokens(msgspec.Struct):
    """The answer of /tokenize. `token_strs` is as the vocabulary spells them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedPrompt(msgspec.Struct):
    """The answer of /detokenize."""

    prompt: str


class ModelCard(msgspec.Struct):
    """One model of /v1/models. `root` is the path that it also answers to, or the name again."""

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
