# SPDX-License-Identifier: Apache-2.0
"""The fields of the HTTP API's requests; `replies.py` has the fields of answers.

Unknown fields of a request are refused. An unsupported field of OpenAI's or vLLM's API accepts only
its neutral values, which have no effect and which clients send by default. Unknown fields inside
messages, tools and `stream_options` are ignored (see `dropped.py`), because clients send fields of
other servers in these objects."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ....request.sampling_params import RepetitionDetection
from ...api_errors import ApiError

# Unsupported fields of requests, each with the accepted values, which like None have no effect.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "allowed_token_ids": (),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "min_completion_tokens": (),
    "data_parallel_rank": (0,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "documents": ([],),
    "chat_template": (),
}
# Unsupported fields in messages; only None is accepted, as in messages that other servers made.
NEUTRAL_IN_MESSAGES: dict[str, tuple[object, ...]] = {
    "function_call": (),
    "audio": (),
}
# The fields of OpenAI's older form of tools.
_OLDER_TOOLS = {"functions", "function_call"}


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream. `include_usage` adds a last chunk that has token counts and no choices.
    `continuous_usage_stats` adds the token counts so far to every chunk."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: Any = None  # ignored; OpenAI's service pads chunks to hide their lengths


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that completion and chat requests share. A field that is left out is None."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: str | list[str] | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = None
    vllm_xargs: dict[str, Any] | None = None  # vLLM's name of `extra_args`
    extra_args: dict[str, Any] | None = None  # arguments for logits processors of other packages
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    # True: the `n` answers come from a beam search; see beam_fields.py.
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Fields of vLLM and this server: additional data in answers, and `cache_salt`.
    prompt_logprobs: int | None = None
    routed_experts_prompt_start: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False
    priority: int | None = None
    job_id: str | None = None  # the id of the agent's job; the request is one turn of the job
    is_last_step: bool | None = None
    request_id: str | None = None
    # Fields that routers set: see kv_transfer_params.py. For several prompts or answers, a router
    # sends lists in the `bootstrap_` fields.
    kv_transfer_params: dict[str, Any] | None = None
    bootstrap_host: str | list[str | None] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int | None] | None = None
    # Fields for the records, bills and cache of OpenAI's service: accepted and ignored, because
    # these fields change no answer.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # Settings of thoughts in chats. Routers also add these fields to completions, without effect.
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    # Fields that set the required form of the answer: see structured.py.
    response_format: Any = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    # Unsupported fields: see NEUTRAL_VALUES.
    spaces_between_special_tokens: Any = None
    detokenize: Any = None
    allowed_token_ids: Any = None
    # Unsupported fields that routers add to every request.
    no_stop_trim: Any = None
    return_hidden_states: Any = None
    min_completion_tokens: Any = None
    data_parallel_rank: Any = None


# One prompt is a string or a list of token ids. A list of strings or id lists is several prompts.
Prompt = str | list[int | str | list[int]]


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions."""

    prompt: Prompt | None = None
    prompt_embeds: str | list[str] | None = None  # each string is base64 of a safetensors file
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Any = None

    @property
    def num_choices(self) -> int:
        """The number of answers to each prompt that the client gets."""
        return self.n or 1

    @property
    def num_generated(self) -> int:
        """The number of generated answers to each prompt, of which the client gets the best."""
        return max(self.num_choices, self.best_of or 0)


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/embeddings."""

    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None  # ignored; only OpenAI's service records a user


class ImageUrl(msgspec.Struct, kw_only=True):
    """The URL of a picture. `detail` has no effect: the model's settings size each picture."""

    url: str | None = None
    detail: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message's content; message_parts.py lists the types of parts."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: ImageUrl | str | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True):
    """A function that a model may call. `parameters` is a JSON schema; `strict` has no effect."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function that an earlier answer called. `arguments` is a JSON object, usually as text, or
    whatever other text the model wrote as arguments."""

    name: str
    arguments: Any = ""


class MadeCall(msgspec.Struct, kw_only=True):
    """A tool call in an earlier answer, as clients send it back."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = "function"
    index: int | None = None  # the call's number, which chunks of a stream have


class ChatMessage(msgspec.Struct, kw_only=True):
    """A message of the client, or an earlier answer that the client sends back."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    # The thoughts of an earlier answer for the template, under vLLM's older and newer name.
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None  # OpenAI's field for a text that refuses an answer
    tool_calls: list[MadeCall] | None = None  # the assistant's messages only may have tool calls
    tool_call_id: str | None = None  # in a tool's message: the id of the call with this result
    # Unsupported fields: see NEUTRAL_IN_MESSAGES.
    function_call: Any = None
    audio: Any = None
    # Fields in answers of OpenAI's service; ignored.
    id: Any = None
    annotations: Any = None


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # becomes a variable of the chat template
    tools: list[ToolDefinition] | None = None  # tools.py has the rules for tools
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # Unsupported fields: see NEUTRAL_VALUES.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    moderation: Any = None
    web_search_options: Any = None
    verbosity: Any = None
    documents: Any = None
    chat_template: Any = None

    @property
    def most_tokens(self) -> int | None:
        """The answer's token limit: `max_completion_tokens`, else the older `max_tokens`."""
        new = self.max_completion_tokens
        return self.max_tokens if new is None else new


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /tokenize: a text, or a conversation for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolDefinition] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


def refuse_unsupported(
    values: msgspec.Struct, neutral: dict[str, tuple[object, ...]], place: str = ""
) -> None:
    """Raise ApiError for the first field whose value is not in `neutral`. `place` is the path of
    `values` in the request, such as `messages[3].`."""
    for name, allowed in neutral.items():
        value = getattr(values, name, None)
        # Types must match too: `no_stop_trim: 0` is not neutral, although 0 == False in Python.
        if value is None or any(value == v and _alike(value, v) for v in allowed):
            continue
        cure = f"leave it out or send {_shown(allowed[0])}" if allowed else "leave it out"
        older = "takes `tools`, `tool_choice` and `tool_calls`, not their older form"
        what = older if name in _OLDER_TOOLS else "does not support"
        message = f"this server {what} `{place}{name}`; {cure}"
        raise ApiError(message, param=f"{place}{name}", code="unsupported_parameter")


def _alike(value: object, neutral: object) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool)


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()
