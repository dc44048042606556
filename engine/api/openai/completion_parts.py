# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions/parts: a prompt that arrives in parts, one line of JSON each.

    {"model": "m", "max_tokens": 64, "prompt": "What is said in"}     fields of /v1/completions
    {"prompt": " the following text?\\n"}                             any number of further parts

The engine computes each part while the next part arrives. The prompt ends at the end of the body,
or at a line that has `"is_last": true`, after which no line is read. The answer has the form of
/v1/completions. `parts_socket.py` reads the same parts as messages of a websocket."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.types import ASGIApp

from ...client.base import PromptEnded, PromptUnknown
from ...request.core_messages import NO_EXTRAS, ExtendPrompt
from ...request.request import pack_token_ids
from ...text.prompt_parts import PromptParts
from ..api_errors import ApiError, ClientGone
from ..front import Front
from .completions import CompletionAnswer, tasks_of
from .request.body import JSON_LINES, check_kind, decode_body
from .request.checks import check_completion
from .request.protocol import CompletionRequest
from .response.generation import Generation, job_of, make_generations, tenant_of
from .response.kv_transfer_params import FIELD as KV_PARAMS
from .response.kv_transfer_params import read_params
from .response.streaming import before

# Fields that need whole prompts, each with the accepted values, which have no effect. Every value
# of `prompt_embeds` and `truncate_prompt_tokens` has an effect, so none is accepted.
_WHOLE_ONLY: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "prompt_logprobs": (),
    "routed_experts_prompt_start": (),
    "prompt_embeds": (),
    "echo": (False,),
    "truncate_prompt_tokens": (),
    "best_of": (1,),
    "use_beam_search": (False,),
}


class FirstPart(CompletionRequest, kw_only=True, forbid_unknown_fields=True):
    """The first part of a prompt, with all parameters of the answer."""

    is_last: bool = False  # True: the first part is the whole prompt


class FurtherPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[int] | UnsetType = UNSET
    is_last: bool = False


_first_decoder = msgspec.json.Decoder(FirstPart)
_part_decoder = msgspec.json.Decoder(FurtherPart)


@dataclass(slots=True)
class PartReader:
    """Reads one prompt's parts, sends them to the engine, and makes the prompt's `Generation`."""

    front: Front
    http: HTTPConnection
    request: CompletionRequest
    parts: PromptParts
    own_id: str
    arrival_seconds: float
    opened: str = ""  # the id of the engine's request; "" until the prompt has tokens

    async def add_part(self, part: str | list[int], place: int) -> None:
        """Send part number `place` to the engine. Raises ApiError for an invalid part, and
        PromptEnded if the engine has ended the request."""
        if not part:
            return
        front, parts = self.front, self.parts
        if isinstance(part, list):
            front.check_vocabulary(part, _name_of(place))
            size = len(part)
        else:
            front.need_tokenizer("prompt", "send parts as lists of token ids")
            size = parts.num_characters + len(part)
            if size > (most := front.settings.max_text_characters):
                raise _text_too_long(size, most, place)
        try:
            tokens = await front.off_loop(lambda: parts.add_part(part), size)
        except ValueError as error:
            raise front.refused_text(error, _name_of(place)) from None
        packed = pack_token_ids(tokens) if tokens else b""
        if self.opened:  # a part without tokens is sent too, because each part restarts a time-out
            await front.client.extend_prompt(ExtendPrompt(self.opened, packed))
        if self.opened or not tokens:
            return
        [generation] = self.generations(packed)
        message = generation.request
        extras = msgspec.structs.replace(message.extras or NO_EXTRAS, more_follows=True)
        await front.client.open_prompt(msgspec.structs.replace(message, extras=extras))
        self.opened = message.request_id

    async def end_prompt(self) -> list[Generation]:
        """End the prompt, and return its only `Generation`. Raises like `add_part`."""
        parts = self.parts
        try:
            num_kept, tokens = await self.front.off_loop(parts.end_prompt, parts.num_characters)
        except ValueError as error:
            raise self.front.refused_text(error, "prompt") from None
        token_ids = parts.token_ids
        if not token_ids:
            message = "the prompt is empty; send at least one token"
            raise ApiError(message, param=_name_of(0), code="empty_prompt")
        self.front.check_vocabulary(token_ids, "prompt", is_text=True)
        if self.opened:
            packed = pack_token_ids(tokens) if tokens else b""
            await self.front.client.extend_prompt(
                ExtendPrompt(self.opened, packed, is_last=True, num_kept=num_kept)
            )
        return self.generations(pack_token_ids(token_ids))

    def generations(self, prompt: bytes) -> list[Generation]:
        """Return a list with the `Generation` for this prompt, with the same id in every call."""
        return make_generations(
            self.front,
            self.request,
            tasks_of(self.front, self.request, [prompt], []),
            f"cmpl-{self.own_id}",
            self.arrival_seconds,
            tenant=tenant_of(self.front, self.http),
            job=job_of(self.http, self.request),
        )

    async def drop_prompt(self) -> None:
        """Abort the engine's request if the engine has one for this prompt."""
        if self.opened:
            await self.front.client.drop_prompt(self.opened)


async def create_completion_of_parts(front: Front, http: Request) -> ASGIApp:
    check_kind(http, JSON_LINES)
    answer = await read_parts(front, http, _read_lines(front, http))
    return await answer.respond(http)


async def read_parts(
    front: Front, http: HTTPConnection, messages: AsyncIterator[bytes]
) -> CompletionAnswer:
    """Send each part to the engine as `messages` yields it, until the last message or a part with
    `is_last`. Return the answer, which has not started yet. Raises ApiError for an invalid part,
    and the errors of `messages`. After an error the engine's request is aborted."""
    first = await anext(messages, b"")
    request = decode_body(first, _first_decoder)
    check_completion(front, request)
    _refuse_whole_only(request)
    if request.stream_options is not None:
        front.dropped.report_unknown(first)
    own_id = uuid.uuid4().hex
    parts = PromptParts(
        front.tokenizer,
        front.max_prompt_tokens,
        add_special_tokens=request.add_special_tokens is not False,
    )
    reader = PartReader(front, http, request, parts, own_id, time.monotonic())
    try:
        if request.prompt:
            await reader.add_part(_one_prompt(request.prompt), 0)
        place, is_last = 0, request.is_last
        while not is_last:
            message = await anext(messages, None)
            if message is None:
                break
            place += 1
            part = decode_body(message, _part_decoder)
            await reader.add_part(_text_of(part), place)
            is_last = part.is_last
            await asyncio.sleep(0)  # other tasks run between parts that arrived together
        reader.arrival_seconds = time.monotonic()
        generations = await reader.end_prompt()
    except PromptEnded:  # the engine ended the request early; its output becomes the answer
        generations = reader.generations(pack_token_ids(parts.told))
    except PromptUnknown as error:
        raise ApiError(str(error), status=408, code="body_timeout") from None
    except BaseException:
        await reader.drop_prompt()
        raise
    return CompletionAnswer(front, f"cmpl-{request.request_id or own_id}", request, generations, [])


def part_overdue(seconds: float) -> ApiError:
    message = (
        f"no part of the prompt came for {seconds:g} s, and none said `is_last`; send the whole "
        "prompt to /v1/completions"
    )
    return ApiError(message, status=408, code="body_timeout")


def part_too_large(front: Front, what: str) -> ApiError:
    message = f"{what} is over the limit of {front.settings.max_body_bytes} bytes; send less"
    return ApiError(message, status=413, code="body_too_large")


async def _read_lines(front: Front, http: Request) -> AsyncIterator[bytes]:
    """Yield the non-empty lines of the body. Raises ApiError if a line is too long, if a line is
    late or if the server ends, and ClientGone if the client disconnects."""
    settings, ended = front.settings, front.in_flight.ended
    pieces: list[bytes] = []  # the received bytes of the incomplete line
    num_bytes = 0
    stream, clock = http.stream(), asyncio.get_running_loop().time
    seconds = settings.body_timeout_seconds  # the time limit of the first part
    deadline = clock() + seconds
    while True:
        try:
            chunk = await before(anext(stream, None), deadline, ended)
        except TimeoutError:
            raise part_overdue(seconds) from None
        except ClientDisconnect:
            raise ClientGone from None
        if chunk is None:
            break
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line = b"".join([*pieces, end])
            pieces, num_bytes = [], 0
            if line.strip():
                yield line
                seconds = settings.part_timeout_seconds
                deadline = clock() + seconds
        if rest:
            pieces.append(rest)
            num_bytes += len(rest)
        if num_bytes > settings.max_body_bytes:
            raise part_too_large(front, "a line")
    if left := b"".join(pieces).strip():
        yield left


def _text_of(part: FurtherPart) -> str | list[int]:
    if isinstance(part.prompt, UnsetType):
        if not part.is_last:
            message = "there is neither `prompt` nor `is_last`; send the next part, or `is_last`"
            raise ApiError(message, param="prompt", code="missing_field")
        return ""
    return part.prompt


def _one_prompt(prompt: object) -> str | list[int]:
    is_ids = isinstance(prompt, list) and all(type(each) is int for each in prompt)
    if isinstance(prompt, str) or is_ids:
        return prompt  # type: ignore[return-value]
    message = "`prompt` is one text or one list of token ids where it comes in parts"
    raise ApiError(message, param="prompt", code="invalid_value")


def _refuse_whole_only(request: CompletionRequest) -> None:
    for name, neutral in _WHOLE_ONLY.items():
        if getattr(request, name) not in (None, *neutral):
            raise _of_whole_prompts(name)
    handed = read_params(request.kv_transfer_params, is_alone=True) or NO_EXTRAS
    if handed.hand_over or handed.ticket is not None:
        raise _of_whole_prompts(KV_PARAMS)


def _of_whole_prompts(name: str) -> ApiError:
    message = f"`{name}` goes with whole prompts; send the prompt to /v1/completions"
    return ApiError(message, param=name, code="invalid_value")


def _text_too_long(size: int, most: int, place: int) -> ApiError:
    message = (
        f"the text has {size} characters and at most {most} are cut into tokens for one request; "
        "send less, or token ids"
    )
    return ApiError(message, param=_name_of(place), code="text_too_long")


def _name_of(place: int) -> str:
    return f"prompt[{place}]"
