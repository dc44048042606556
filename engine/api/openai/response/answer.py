# SPDX-License-Identifier: Apache-2.0
"""The answer to a completion or chat request, in one piece or as a stream. Each route has a
subclass of `Answer` that makes the route's JSON."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy.typing as npt
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive

from ....request.logprobs import PositionLogprobs, PromptLogprobs
from ....text.output_processor import TextOutput
from ....text.tool_calls.base import CallPiece, merged
from ...front import Front
from ..request.protocol import SamplingFields, StreamOptions
from .generation import Generation
from .kv_transfer_params import params_for_decode
from .replies import (
    CompletionTokensDetails,
    KvParams,
    PromptTokensDetails,
    TokenIds,
    Usage,
    now,
)
from .streaming import EventStream, Write, until_disconnect

# Positions with log-probabilities above which an answer is encoded in a thread, not in the event
# loop, where encoding delays all other requests: 20 likely tokens at a position take about 30 us.
MAX_INLINE_POSITIONS = 512

_encoder = msgspec.json.Encoder()
_NO_OPTIONS = StreamOptions()

UsageField = Usage | UnsetType | None  # UNSET: the stream has no usage, which was not requested


@dataclass(slots=True)
class Part:
    """A whole choice of an answer, or the piece that one output of the engine adds to a choice."""

    generation: Generation
    text: str = ""
    reasoning: str | UnsetType = UNSET  # UNSET: the part has no thought
    tool_calls: list[CallPiece] = field(default_factory=list)
    is_first: bool = True
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: TokenIds = UNSET
    token_ids: TokenIds = UNSET
    # The ids of the tokens in this part, even if the answer to the client has no token ids.
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    routed_experts: npt.NDArray[Any] | None = None  # set in a choice's last part
    kv_transfer_params: KvParams = UNSET  # set in a choice's last part

    @property
    def index(self) -> int:
        return self.generation.index

    @property
    def warning(self) -> str | UnsetType:
        """The warning about the end of a choice that was cut; UNSET without a warning."""
        is_cut = self.finish_reason == "length"
        return (self.generation.begun_too_late if is_cut else "") or UNSET


@dataclass(slots=True)
class Answer(ABC):
    """The answer to the prompts of one request."""

    front: Front
    answer_id: str
    request: SamplingFields
    generations: list[Generation]
    created: int = field(default_factory=now, kw_only=True)

    @abstractmethod
    def whole(self, parts: list[Part], usage: Usage) -> msgspec.Struct:
        """Return the answer in one piece."""

    @abstractmethod
    def chunk(self, parts: list[Part], usage: UsageField) -> msgspec.Struct:
        """Return an event of the stream with one part, or a last event with `usage` and no part."""

    def select(self, wholes: Mapping[int, TextOutput]) -> list[Generation]:
        """Return the generations whose answers the client gets, prompt by prompt. `wholes` has all
        generated answers by the index of their generation."""
        return self.generations

    async def respond(self, http: Request) -> ASGIApp:
        """Return the HTTP answer. The caller must have read the body of `http`."""
        seconds = self.front.settings.request_timeout_seconds
        if self.request.stream:
            return EventStream(self._stream, seconds, self.front.in_flight.ended)
        async with asyncio.timeout(seconds):
            ended = self.front.in_flight.ended
            body = await until_disconnect(http.receive, self._collect_all(), ended)
        return Response(body, media_type="application/json")

    async def send_messages(self, receive: Receive, write: Write) -> None:
        """Answer over a websocket: with one message for a whole answer, or one message for each
        chunk of a stream. `receive` returns http.disconnect when the client disconnects."""
        work = self._stream(write) if self.request.stream else self._write_whole(write)
        async with asyncio.timeout(self.front.settings.request_timeout_seconds):
            await until_disconnect(receive, work, self.front.in_flight.ended)

    async def _write_whole(self, write: Write) -> None:
        await write(await self._collect_all())

    async def _collect_all(self) -> bytes:
        wholes: dict[int, TextOutput] = {}
        tally = Tally.from_generations(self.front, self.generations)

        async def collect(generation: Generation) -> None:
            wholes[generation.index] = await self._merge_outputs(generation, tally)

        await run_all(self.generations, collect)
        parts = []
        for index, generation in enumerate(self.select(wholes)):
            output = wholes[generation.index]
            # The engine reports prompt log-probabilities once, with the first answer of a prompt.
            output.prompt_logprobs = wholes[generation.index - generation.child].prompt_logprobs
            generation.index = index
            parts.append(self._part(generation, output, is_first=True))
        return await _encoded(parts, lambda: self.whole(parts, tally.usage()))

    async def _merge_outputs(self, generation: Generation, tally: Tally) -> TextOutput:
        whole = TextOutput()
        texts: list[str] = []
        thoughts: list[str] = []
        logprobs: list[PositionLogprobs] = []
        async with aclosing(generation.run(self.front)) as outputs:
            async for output in outputs:
                tally.add(generation, output)
                texts.append(output.text)
                thoughts.append(output.reasoning)
                whole.tool_calls.extend(output.tool_calls)
                whole.token_ids.extend(output.token_ids)
                whole.finish_reason, whole.stop_reason = output.finish_reason, output.stop_reason
                whole.ticket = output.ticket
                logprobs.extend(output.logprobs or ())
                if output.prompt_logprobs is not None:
                    whole.prompt_logprobs = output.prompt_logprobs
                if output.routed_experts is not None:
                    whole.routed_experts = output.routed_experts
        whole.text, whole.logprobs = "".join(texts), logprobs
        whole.reasoning = "".join(thoughts)
        return whole

    async def _stream(self, write: Write) -> None:
        options = self.request.stream_options or _NO_OPTIONS
        tally = Tally.from_generations(self.front, self.generations)

        def usage() -> UsageField:
            if options.continuous_usage_stats:
                return tally.usage()
            return None if options.include_usage else UNSET

        async def forward(generation: Generation) -> None:
            await self._forward(generation, write, tally, usage)

        await run_all(self.generations, forward)
        if options.include_usage:
            await write(await self._encoded_chunk([], tally.usage()))

    async def _forward(
        self, generation: Generation, write: Write, tally: Tally, usage: Callable[[], UsageField]
    ) -> None:
        is_first = True
        async with aclosing(generation.run(self.front)) as outputs:
            async for output in outputs:
                tally.add(generation, output)
                part = self._part(generation, output, is_first)
                # The first output is sent even without a whole character of text, because the first
                # event shows the client that the prompt has been computed.
                if is_first or _says_something(part):
                    await write(await self._encoded_chunk([part], usage()))
                is_first = False

    async def _encoded_chunk(self, parts: list[Part], usage: UsageField) -> bytes:
        return await _encoded(parts, lambda: self.chunk(parts, usage))

    def _part(self, generation: Generation, output: TextOutput, is_first: bool) -> Part:
        part = Part(
            generation,
            output.text,
            output.reasoning or UNSET,
            merged(output.tool_calls),
            is_first,
            output.finish_reason,
            output.stop_reason,
            new_token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
        )
        if output.ticket is not None and generation.hands_over_alone:
            part.kv_transfer_params = params_for_decode(self.answer_id, output.ticket)
        if output.routed_experts is not None:
            part.routed_experts = output.routed_experts
        if self.request.return_token_ids:
            part.token_ids = output.token_ids
            if is_first:
                part.prompt_token_ids = generation.prompt_token_ids
        return part


@dataclass(slots=True)
class Tally:
    """The token counts of a whole answer. A prompt with several answers counts once; its cached
    tokens are counted with the prompt's first answer."""

    prompt_tokens: int
    by_tier: dict[str, int]
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None  # None: thoughts stay in the text, so are not counted

    @classmethod
    def from_generations(cls, front: Front, generations: Sequence[Generation]) -> Tally:
        prompt_tokens = sum(each.num_prompt_tokens for each in generations if each.child == 0)
        tally = cls(prompt_tokens, dict.fromkeys(front.client.ready.tiers, 0))
        if any(each.thoughts is not None for each in generations):
            tally.reasoning_tokens = 0
        return tally

    def add(self, generation: Generation, output: TextOutput) -> None:
        self.completion_tokens += len(output.token_ids)
        if self.reasoning_tokens is not None:
            self.reasoning_tokens += output.num_reasoning_tokens
        if output.num_cached_tokens is not None and generation.child == 0:
            self.cached_tokens += output.num_cached_tokens
            for tier, tokens in (output.cached_tokens_by_tier or {}).items():
                self.by_tier[tier] = self.by_tier.get(tier, 0) + tokens

    def usage(self) -> Usage:
        details = PromptTokensDetails(self.cached_tokens, self.by_tier)
        total = self.prompt_tokens + self.completion_tokens
        usage = Usage(self.prompt_tokens, self.completion_tokens, total, details)
        if self.reasoning_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(self.reasoning_tokens)
        return usage


async def run_all(
    generations: Sequence[Generation], run_one: Callable[[Generation], Awaitable[None]]
) -> None:
    """Run `run_one` for all choices at the same time. The first failure cancels the other runs."""
    if len(generations) == 1:
        await run_one(generations[0])
        return
    tasks = [asyncio.ensure_future(run_one(generation)) for generation in generations]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def kv_params_of(parts: list[Part]) -> KvParams:
    """Return the `kv_transfer_params` of an answer or chunk with one part, else UNSET."""
    return parts[0].kv_transfer_params if len(parts) == 1 else UNSET


def _says_something(part: Part) -> bool:
    return bool(
        part.text
        or part.reasoning
        or part.tool_calls
        or part.token_ids
        or part.logprobs
        or part.finish_reason is not None
    )


async def _encoded(parts: list[Part], make: Callable[[], msgspec.Struct]) -> bytes:
    positions = sum(
        len(part.logprobs or ())
        + len(part.prompt_logprobs or ())
        + (0 if part.routed_experts is None else len(part.routed_experts))
        for part in parts
    )
    if positions > MAX_INLINE_POSITIONS:
        return await asyncio.to_thread(lambda: _encoder.encode(make()))
    return _encoder.encode(make())
