# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions: answers prompts with text and token ids.

All prompts of a request are checked before the engine gets any prompt."""

from __future__ import annotations

import base64
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from ...request.prompt_embeds import read_embeds
from ...request.request import BYTES_PER_TOKEN, unpack_token_ids
from ...request.sampling_params import check_params_for_embeds
from ...text.output_processor import TextOutput
from ..api_errors import ApiError
from ..front import Front, as_list
from .follow import follow
from .request.checks import read_completion
from .request.protocol import CompletionRequest
from .request.sampling import (
    default_max_tokens,
    fit_logprobs,
    fit_max_tokens,
    sampling_params,
)
from .response.answer import Answer, Part, UsageField, kv_params_of
from .response.array_form import encode_array
from .response.generation import Generation, Task, job_of, make_generations, tenant_of
from .response.logprobs_form import CompletionForm, prompt_logprobs
from .response.replies import Completion, CompletionChoice, CompletionLogprobs, PromptTokens, Usage

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(slots=True)
class CompletionAnswer(Answer):
    """The answer to a completion request; a whole answer and a chunk have the same form. `echoes`
    has the text of each prompt, or is empty without `echo`."""

    request: CompletionRequest
    echoes: list[str]
    _forms: dict[int, CompletionForm] = field(default_factory=dict)  # by the index of a choice

    def whole(self, parts: list[Part], usage: Usage) -> Completion:
        return self.chunk(parts, usage)

    def chunk(self, parts: list[Part], usage: UsageField) -> Completion:
        choices = [self._choice(part) for part in parts]
        name, handed = str(self.request.model), kv_params_of(parts)
        return Completion(
            self.answer_id, "text_completion", self.created, name, choices, usage, handed
        )

    def select(self, wholes: Mapping[int, TextOutput]) -> list[Generation]:
        """Return the `num_choices` best answers to each prompt, by their mean log-probability."""
        num_generated, num_choices = self.request.num_generated, self.request.num_choices
        if num_generated == num_choices:
            return self.generations
        selected: list[Generation] = []
        for first in range(0, len(self.generations), num_generated):
            of_prompt = self.generations[first : first + num_generated]
            best = sorted(of_prompt, key=lambda each: -_mean_logprob(wholes[each.index]))
            selected += best[:num_choices]
        return selected

    def _choice(self, part: Part) -> CompletionChoice:
        echoed = part.is_first and bool(self.echoes)
        text = part.text
        if echoed:
            text = self.echoes[part.index // self.request.num_choices] + text
        return CompletionChoice(
            part.index,
            text,
            self._logprobs(part, echoed),
            part.finish_reason,
            part.stop_reason,
            part.prompt_token_ids,
            part.token_ids,
            self._prompt_logprobs(part),
            encode_array(part.routed_experts),
        )

    def _logprobs(self, part: Part, echoed: bool) -> CompletionLogprobs | None:
        count = self.request.logprobs
        if count is None or part.logprobs is None:
            return None
        form = self._forms.get(part.index)
        if form is None:
            form = self._forms[part.index] = CompletionForm(
                self.front.texts,
                count,
                as_ids=bool(self.request.return_tokens_as_token_ids),
                skip_special_tokens=self.request.skip_special_tokens,
            )
        token_ids, positions = part.new_token_ids, part.logprobs
        if echoed and part.prompt_logprobs is not None:
            return form.format_tokens(
                [*part.generation.prompt_token_ids, *token_ids],
                [*part.prompt_logprobs, *positions],
            )
        return form.format_tokens(token_ids, positions)

    def _prompt_logprobs(self, part: Part) -> PromptTokens:
        count = self.request.prompt_logprobs
        if count is None or part.prompt_logprobs is None:
            return UNSET
        as_ids = bool(self.request.return_tokens_as_token_ids)
        return prompt_logprobs(part.prompt_logprobs, count, self.front.texts, as_ids=as_ids)


async def create_completion(front: Front, http: Request, *, follows: bool = False) -> ASGIApp:
    """Answer a request. With `follows`, only load the prompts' KV blocks (see `follow.py`)."""
    arrival_seconds = time.monotonic()
    request = await read_completion(front, http)
    embeds: list[bytes] = []
    if request.prompt_embeds is not None:
        embeds, prompts = await _resolve_embeds(front, request)
    elif request.prompt is not None:
        prompts = await front.resolve_prompts(
            request.prompt,
            add_special_tokens=request.add_special_tokens is not False,
            truncate_to=request.truncate_prompt_tokens,
            max_tokens=request.max_tokens,
        )
    else:
        message = "there is neither `prompt` nor `prompt_embeds`; one of them is needed"
        raise ApiError(message, param="prompt", code="missing_field")
    own_id = uuid.uuid4().hex
    generations = make_generations(
        front,
        request,
        tasks_of(front, request, prompts, embeds),
        f"cmpl-{own_id}",
        arrival_seconds,
        tenant=tenant_of(front, http),
        job=job_of(http, request),
        keeps_tokens=request.max_tokens != 0,
        num_generated=request.num_generated,
    )
    if follows:
        return await follow(front, generations)
    answer_id = f"cmpl-{request.request_id or own_id}"
    echoes = _echoes(front, request, prompts) if request.echo else []
    return await CompletionAnswer(front, answer_id, request, generations, echoes).respond(http)


async def _resolve_embeds(
    front: Front, request: CompletionRequest
) -> tuple[list[bytes], list[bytes]]:
    """Return the request's embedding files, and a placeholder prompt for each file."""
    wanted = request.prompt_embeds
    given = [wanted] if isinstance(wanted, str) else wanted
    if not given:
        message = "`prompt_embeds` is an empty list; send a prompt"
        raise ApiError(message, param="prompt_embeds", code="no_prompt")
    most = front.settings.max_prompts_per_request
    if len(given) > most:
        message = f"`prompt_embeds` holds {len(given)} prompts and at most {most} are taken"
        raise ApiError(message, param="prompt_embeds", code="too_many_prompts")
    for name in ("prompt", "echo", "truncate_prompt_tokens"):
        asked = getattr(request, name)
        if asked is not None and asked is not False:
            message = f"`{name}` is about tokens, and `prompt_embeds` has none; drop one of them"
            raise ApiError(message, param=name, code="invalid_value")
    ready, longest = front.client.ready, front.max_prompt_tokens

    def read() -> list[tuple[bytes, int]]:
        files = [base64.b64decode(text, validate=True) for text in given]
        return [
            (data, len(read_embeds(data, ready.hidden_size, longest, ready.largest_embedding)))
            for data in files
        ]

    try:
        files = await front.off_loop(read, sum(map(len, given)))
    except ValueError as error:  # invalid base64 or invalid embeddings
        message = f"`prompt_embeds` cannot be used: {error}"
        raise ApiError(message, param="prompt_embeds", code="invalid_value") from None
    return [data for data, _ in files], [bytes(BYTES_PER_TOKEN * count) for _, count in files]


def tasks_of(
    front: Front, request: CompletionRequest, prompts: Sequence[bytes], embeds: Sequence[bytes]
) -> list[Task]:
    """Return a task for each prompt and its embeds. Raises ApiError for invalid parameters."""
    asked, max_tokens = request.max_tokens is not None, request.max_tokens
    if max_tokens is None:
        max_tokens = default_max_tokens(front, DEFAULT_COMPLETION_TOKENS)
    elif max_tokens == 0:
        max_tokens = 1  # the engine makes at least one token; this server drops the token
    logprobs = request.logprobs
    if logprobs is None and request.num_generated > request.num_choices:
        logprobs = 0  # the selection of the best answers needs each token's own log-probability
    params = sampling_params(
        front,
        request,
        max_tokens,
        logprobs=logprobs,
        prompt_logprobs=_num_prompt_logprobs(request),
    )
    num_generated = len(prompts) * request.num_generated
    params = fit_logprobs(front, params, num_generated, asked=asked)
    if embeds:
        try:
            check_params_for_embeds(params)
        except ValueError as error:
            raise ApiError(str(error), param="prompt_embeds", code="invalid_value") from None
    return [
        Task(
            prompt,
            fit_max_tokens(front, params, len(prompt) // BYTES_PER_TOKEN, asked=asked),
            data,
        )
        for prompt, data in zip_longest(prompts, embeds, fillvalue=b"")
    ]


def _num_prompt_logprobs(request: CompletionRequest) -> int | None:
    """Return the larger of `prompt_logprobs` and (with `echo`) `logprobs`, or None if not set."""
    counts = [request.prompt_logprobs, request.logprobs if request.echo else None]
    return max((count for count in counts if count is not None), default=None)


def _echoes(front: Front, request: CompletionRequest, prompts: Sequence[bytes]) -> list[str]:
    """Return each prompt's text: the client's text, else the decoded token ids, as after a cut."""
    tokenizer = front.need_tokenizer("echo", "leave out `echo`")
    assert request.prompt is not None
    return [
        given
        if isinstance(given, str) and request.truncate_prompt_tokens is None
        else tokenizer.decode(
            unpack_token_ids(prompt), skip_special_tokens=request.skip_special_tokens
        )
        for given, prompt in zip(as_list(request.prompt), prompts, strict=True)
    ]


def _mean_logprob(whole: TextOutput) -> float:
    """Return the mean log-probability of an answer's tokens; minus infinity without tokens."""
    logprobs = [position.logprobs[0] for position in whole.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf
