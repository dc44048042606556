# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the requests of chats and completions. The checks refuse fields that are out of
bounds, contradict each other, or are unsupported."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from ....request.core_messages import check_priority
from ....request.logprobs import MAX_LOGPROBS
from ....request.routed_rows import check_routed_start
from ...api_errors import ApiError
from ...front import Front
from .body import read_request
from .protocol import (
    NEUTRAL_VALUES,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    refuse_unsupported,
)

MAX_CACHE_SALT_CHARACTERS = 256
MAX_REQUEST_ID_CHARACTERS = 128

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


async def read_completion(front: Front, http: Request) -> CompletionRequest:
    """Return a completion's checked request. Raises like `check_completion` and `read_request`."""
    request, body = await read_request(http, front.settings, _completion_decoder)
    check_completion(front, request)
    if request.stream_options is not None:
        front.dropped.report_unknown(body)
    return request


def check_completion(front: Front, request: CompletionRequest) -> None:
    """Raise ApiError for the first invalid field of a completion request."""
    _check_shared(front, request)
    _check_best_of(front, request)
    if request.echo:
        front.need_tokenizer("echo", "ask for `return_token_ids` in place of `echo`")
    if request.max_tokens == 0:
        if not request.echo:
            message = "`max_tokens` must be at least 1, got 0; 0 is for `echo: true`"
            raise _invalid("max_tokens", message)
        if request.min_tokens:
            message = f"`min_tokens` is {request.min_tokens} and `max_tokens` is 0; leave it out"
            raise _invalid("min_tokens", message)


async def read_chat(front: Front, http: Request) -> ChatRequest:
    """Return a chat's request with unchecked messages and tools. Raises like `read_completion`."""
    request, body = await read_request(http, front.settings, _chat_decoder)
    _check_shared(front, request)
    top = request.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        message = f"`top_logprobs` must be between 0 and {MAX_LOGPROBS}, got {top}"
        raise _invalid("top_logprobs", message)
    if top and not request.logprobs:
        raise _invalid("top_logprobs", "`top_logprobs` needs `logprobs: true`; send it as well")
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = (
            f"`max_tokens` is {old} and `max_completion_tokens`, its newer name, is {new}; "
            "send one of them"
        )
        raise _invalid("max_completion_tokens", message)
    front.dropped.report_unknown(body)
    return request


def check_ids_of_request(cache_salt: str | None, request_id: str | None) -> None:
    """Raise ApiError if `cache_salt` or `request_id` is too long."""
    if len(cache_salt or "") > MAX_CACHE_SALT_CHARACTERS:
        message = (
            f"`cache_salt` has more than {MAX_CACHE_SALT_CHARACTERS} characters; send a digest"
        )
        raise _invalid("cache_salt", message)
    if len(request_id or "") > MAX_REQUEST_ID_CHARACTERS:
        message = f"`request_id` has more than {MAX_REQUEST_ID_CHARACTERS} characters"
        raise _invalid("request_id", f"{message}; send a shorter one")


def _check_best_of(front: Front, request: CompletionRequest) -> None:
    n, best_of, most = request.num_choices, request.best_of, front.settings.max_n
    if best_of is None or best_of == n:
        return
    said = f"`best_of` is {best_of} and `n` is {n}; `best_of`"
    if best_of < n:
        raise _invalid("best_of", f"{said} must be at least `n`")
    if request.use_beam_search:
        raise _invalid("best_of", f"{said} is of sampled answers; a beam search gives its `n` best")
    if best_of > most:
        raise _invalid("best_of", f"{said} must be at most {most}")
    if request.stream:
        cure = "beyond `n` is known at the end only; leave out `stream`"
        raise _invalid("best_of", f"{said} {cure}")


def _check_shared(front: Front, request: SamplingFields) -> None:
    request.model = front.check_model(request.model)
    refuse_unsupported(request, NEUTRAL_VALUES)
    most = front.settings.max_n
    if request.n is not None and not 1 <= request.n <= most:
        raise _invalid("n", f"`n` must be between 1 and {most}, got {request.n}")
    if request.stream_options is not None and not request.stream:
        message = "`stream_options` is for streams; send `stream: true` with it"
        raise _invalid("stream_options", message)
    if request.stream and request.prompt_logprobs is not None:
        message = "`prompt_logprobs` come with whole answers only; leave out `stream`"
        raise _invalid("prompt_logprobs", message)
    try:
        check_routed_start(request.routed_experts_prompt_start, front.client.ready.tells_experts)
    except ValueError as error:
        raise _invalid("routed_experts_prompt_start", str(error)) from error
    check_ids_of_request(request.cache_salt, request.request_id)
    try:
        check_priority(request.priority or 0, front.client.ready.takes_priority)
    except ValueError as error:
        raise _invalid("priority", f"`priority` cannot be used: {error}") from error


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(message, param=param, code="invalid_value")
