# SPDX-License-Identifier: Apache-2.0
"""The answer to one generating request, whole or as a stream, whatever form its JSON takes.

A subclass per route gives the form. Knows nothing of how requests are read.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ..text.output_processor import TextOutput
from .front import Front
from .generation import Generation, Tally, run_all
from .protocol import SamplingFields, Usage, now
from .streaming import EventStream, Write, until_disconnect

TokenIds = list[int] | UnsetType  # UNSET where the client did not ask for them

_encoder = msgspec.json.Encoder()


@dataclass(slots=True)
class Part:
    """A whole choice, or what one output added to it."""

    index: int
    text: str = ""
    is_first: bool = True
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: TokenIds = UNSET
    token_ids: TokenIds = UNSET


@dataclass(slots=True)
class Answer(ABC):
    """One request's prompts on their way to an answer."""

    front: Front
    answer_id: str
    request: SamplingFields
    generations: list[Generation]
    created: int = field(default_factory=now)

    @abstractmethod
    def whole(self, parts: list[Part], usage: Usage) -> msgspec.Struct:
        """The answer in one piece."""

    @abstractmethod
    def chunk(self, parts: list[Part], usage: Usage | UnsetType | None) -> msgspec.Struct:
        """One event of the stream: of one part, or without any for the usage at the end."""

    async def respond(self, http: Request) -> ASGIApp:
        """The HTTP answer. The body of `http` has been read."""
        seconds = self.front.settings.request_timeout_seconds
        if self.request.stream:
            return EventStream(self._stream, seconds)
        async with asyncio.timeout(seconds):
            body = await until_disconnect(http.receive, self._collect_all())
        return Response(body, media_type="application/json")

    async def _collect_all(self) -> bytes:
        parts = [Part(generation.index) for generation in self.generations]
        tally = Tally.of(self.generations)

        async def collect(generation: Generation) -> None:
            await self._collect(generation, parts[generation.index], tally)

        await run_all(self.generations, collect)
        return _encoder.encode(self.whole(parts, tally.usage()))

    async def _collect(self, generation: Generation, part: Part, tally: Tally) -> None:
        texts: list[str] = []
        token_ids: list[int] = []
        async with aclosing(generation.run(self.front)) as outputs:
            async for output in outputs:
                tally.add(output)
                texts.append(output.text)
                token_ids.extend(output.token_ids)
                part.finish_reason, part.stop_reason = output.finish_reason, output.stop_reason
        part.text = "".join(texts)
        if self.request.return_token_ids:
            part.prompt_token_ids, part.token_ids = generation.prompt_token_ids, token_ids

    async def _stream(self, write: Write) -> None:
        options = self.request.stream_options
        with_usage = options is not None and options.include_usage
        tally = Tally.of(self.generations)

        async def forward(generation: Generation) -> None:
            await self._forward(generation, write, tally, None if with_usage else UNSET)

        await run_all(self.generations, forward)
        if with_usage:
            await write(_event(self.chunk([], tally.usage())))

    async def _forward(
        self, generation: Generation, write: Write, tally: Tally, usage: UnsetType | None
    ) -> None:
        is_first = True
        async with aclosing(generation.run(self.front)) as outputs:
            async for output in outputs:
                tally.add(output)
                part = self._part(generation, output, is_first)
                # The first output always goes out, even while its text is half a character: it
                # tells the client that the prompt has been read.
                if is_first or part.text or part.token_ids or part.finish_reason is not None:
                    await write(_event(self.chunk([part], usage)))
                is_first = False

    def _part(self, generation: Generation, output: TextOutput, is_first: bool) -> Part:
        part = Part(
            generation.index, output.text, is_first, output.finish_reason, output.stop_reason
        )
        if self.request.return_token_ids:
            part.token_ids = output.token_ids
            if is_first:
                part.prompt_token_ids = generation.prompt_token_ids
        return part


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + _encoder.encode(chunk) + b"\n\n"
