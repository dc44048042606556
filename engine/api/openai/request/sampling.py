# SPDX-License-Identifier: Apache-2.0
"""Makes a request's sampling parameters from the request's fields. A field that the request leaves
out gets its value from the model's generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from ....request.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS_IDS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    UnreadExtraArgs,
    with_changes,
)
from ....request.structured_params import StructuredOutputsParams
from ....text.bad_words import with_spelt_bad_words
from ....text.reasoning import with_reasoning_marks
from ...api_errors import ApiError
from ...front import Front
from .protocol import ChatRequest, SamplingFields
from .structured import structured_outputs_of

# Limits of the entries of lists, checked first, because a body may have millions of entries.
_MOST_ENTRIES = {
    "stop": (MAX_STOP_STRINGS, "strings"),
    "bad_words": (MAX_BAD_WORDS, "strings"),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, "ids"),
    "logit_bias": (MAX_LOGIT_BIAS_IDS, "ids"),
}


def chat_params(
    front: Front,
    request: ChatRequest,
    num_prompt_tokens: int,
    structured_outputs: StructuredOutputsParams | None,
) -> SamplingParams:
    """Return a chat's sampling parameters, with `max_tokens` within the server's limits. Raises
    ApiError like `sampling_params`, `fit_max_tokens` and `fit_logprobs`."""
    max_tokens, asked = request.most_tokens, request.most_tokens is not None
    if max_tokens is None:  # a chat's answer may fill the rest of the context, as in OpenAI's API
        max_tokens = default_max_tokens(front, front.max_model_len)
    params = sampling_params(
        front,
        request,
        max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        splits_thoughts=True,
        structured_outputs=structured_outputs,
    )
    params = fit_max_tokens(front, params, num_prompt_tokens, asked=asked)
    return fit_logprobs(front, params, request.n or 1, asked=asked)


def sampling_params(
    front: Front,
    request: SamplingFields,
    max_tokens: int,
    *,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    splits_thoughts: bool = False,
    structured_outputs: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """Return the client's sampling parameters; `max_tokens` may exceed the context. If given,
    `structured_outputs` replaces the request's own. Raises ApiError that names an invalid field."""
    _check_counts(request)
    if request.stop:
        front.need_tokenizer("stop", "it takes `stop_token_ids` but no `stop`")
    if request.bad_words:
        front.need_tokenizer("bad_words", "leave out `bad_words`")
    front.check_vocabulary(request.stop_token_ids or (), "stop_token_ids")
    defaults = front.default_sampling

    def chosen(given: float | None, name: str, neutral: float) -> float:
        return defaults.get(name, neutral) if given is None else given

    top_k = defaults.get("top_k", 0) if request.top_k is None else request.top_k
    structured_outputs = structured_outputs or structured_outputs_of(front, request)
    penalty = chosen(request.repetition_penalty, "repetition_penalty", 1.0)
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=request.min_tokens or 0,
            temperature=chosen(request.temperature, "temperature", 1.0),
            top_k=int(top_k),
            top_p=chosen(request.top_p, "top_p", 1.0),
            min_p=chosen(request.min_p, "min_p", 0.0),
            seed=request.seed,
            stop=_texts(request.stop),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=request.ignore_eos,
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            repetition_penalty=penalty,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=_logit_bias(front, request.logit_bias or {}),
            bad_words=_texts(request.bad_words),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            repetition_detection=request.repetition_detection,
            thinking_token_budget=request.thinking_token_budget,
            extra_args=_extra_args(request),
            structured_outputs=structured_outputs,
            skip_reading_prefix_cache=request.skip_reading_prefix_cache,
            routed_experts_prompt_start=request.routed_experts_prompt_start,
        )
        params = with_spelt_bad_words(params, front.tokenizer)
        params = with_reasoning_marks(params, front.marks, are_split=splits_thoughts)
    except ValueError as error:
        raise _invalid(error) from None
    # The tokenizer may have more tokens than the model, so the ids are checked.
    for ids in params.bad_words_token_ids:
        front.check_vocabulary(ids, "bad_words")
    for ids in (params.reasoning_start_token_ids, params.reasoning_end_token_ids):
        front.check_vocabulary(ids, "thinking_token_budget")
    try:
        front.check_params(params)
    except UnreadExtraArgs as error:
        if request.vllm_xargs is None:
            raise ApiError(str(error), param="extra_args", code="invalid_value") from None
        # As in vLLM, arguments that no logits processor reads are ignored.
        params = with_changes(params, extra_args=None)
    except ValueError as error:
        name = "vllm_xargs" if request.vllm_xargs is not None else "extra_args"
        raise ApiError(str(error), param=name, code="invalid_value") from None
    return params


def default_max_tokens(front: Front, most: int) -> int:
    """Return the default of `max_tokens`: `most`, or the model's own default if that is smaller."""
    return min(most, int(front.default_sampling.get("max_new_tokens", most)))


def fit_max_tokens(
    front: Front, params: SamplingParams, num_prompt_tokens: int, *, asked: bool
) -> SamplingParams:
    """Limit `max_tokens` to the rest of the context after a prompt, as vLLM does. Raises ApiError
    if the client `asked` for more tokens than the whole context, or if `min_tokens` do not fit."""
    left = front.max_model_len - num_prompt_tokens
    if params.max_tokens <= left:
        return params
    if asked and params.max_tokens > front.max_model_len:
        message = (
            f"`max_tokens` is {params.max_tokens}, and the context has {front.max_model_len} "
            f"tokens, of which {left} are left after this prompt; ask for less"
        )
        raise ApiError(message, param="max_tokens", code="context_length_exceeded")
    if params.min_tokens > left:
        message = (
            f"`min_tokens` is {params.min_tokens}, and after {num_prompt_tokens} prompt tokens the "
            f"context of {front.max_model_len} tokens has {left} left; ask for less"
        )
        raise ApiError(message, param="min_tokens", code="context_length_exceeded")
    return with_changes(params, max_tokens=left)


def fit_logprobs(
    front: Front, params: SamplingParams, num_choices: int, *, asked: bool
) -> SamplingParams:
    """Limit `max_tokens` so that `num_choices` answers have no more log-probabilities than allowed.
    Raises ApiError if the client `asked` for more tokens, or if `min_tokens` exceed the limit."""
    if params.logprobs is None:
        return params
    most = front.settings.max_logprobs_per_request
    each = num_choices * (1 + params.logprobs)
    if each * params.max_tokens <= most:
        return params
    fit = most // each
    if asked or fit < max(1, params.min_tokens):
        message = (
            f"{num_choices} answers of {params.max_tokens} tokens could hold "
            f"{each * params.max_tokens} log-probabilities and at most {most} are given at once; "
            "ask for fewer answers, tokens or likely tokens"
        )
        raise ApiError(message, param="max_tokens", code="too_many_logprobs")
    return with_changes(params, max_tokens=fit)


def _check_counts(request: SamplingFields) -> None:
    for name, (most, what) in _MOST_ENTRIES.items():
        given = getattr(request, name)
        if isinstance(given, Sized) and not isinstance(given, str) and len(given) > most:
            message = f"`{name}` holds {len(given)} {what} and at most {most} are taken; send fewer"
            raise ApiError(message, param=name, code="invalid_value")


def _extra_args(request: SamplingFields) -> dict[str, Any] | None:
    ours, others = request.extra_args, request.vllm_xargs
    if ours is not None and others is not None:
        message = "`vllm_xargs` and `extra_args` are two names of one field; send one of them"
        raise ApiError(message, param="extra_args", code="invalid_value")
    return others if ours is None else ours


def _texts(given: str | list[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def _logit_bias(front: Front, bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Return pairs of token id and bias from `bias`, whose keys are token ids as strings. Raises
    ApiError for a token id that is not in the vocabulary."""
    vocab_size = front.client.ready.vocab_size
    pairs = {}
    for key, value in bias.items():
        plain = key.isascii() and key.isdigit() and len(key) <= len(str(vocab_size))
        if not plain or int(key) >= vocab_size:
            message = (
                f"`logit_bias` has the key {key[:32]!r}, and its keys are the model's token ids, "
                f"from 0 to {vocab_size - 1}"
            )
            raise ApiError(message, param="logit_bias", code="token_id_out_of_range")
        pairs[int(key)] = value
    return tuple(pairs.items())


def _invalid(error: ValueError) -> ApiError:
    return ApiError(str(error), param=str(error).partition(" ")[0], code="invalid_value")
