# SPDX-License-Identifier: Apache-2.0
"""One prompt on its way through the engine, measured, and the usage of all prompts of a request.

Knows nothing of the form in which answers are sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from ..text.output_processor import TextOutput, generate_text
from ..token_ids import BYTES_PER_TOKEN, unpack_token_ids
from ..wire import OVERLOADED, AddRequest
from .errors import ENGINE, ApiError
from .front import Front
from .protocol import PromptTokensDetails, Usage

TIERS = ("pool", "cpu", "ssd")


@dataclass(slots=True)
class Generation:
    """One choice of an answer."""

    index: int
    request: AddRequest
    arrival_seconds: float = field(default_factory=time.monotonic)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids) // BYTES_PER_TOKEN

    @property
    def prompt_token_ids(self) -> list[int]:
        return unpack_token_ids(self.request.prompt_token_ids)

    async def run(self, front: Front) -> AsyncGenerator[TextOutput, None]:
        """Outputs as they are made. Raises ApiError where the engine fails this request, and
        EngineDead; closing it early aborts the request."""
        watch = front.metrics.watch(self.arrival_seconds, self.num_prompt_tokens)
        try:
            async with aclosing(
                generate_text(front.client, self.request, front.tokenizer)
            ) as stream:
                async for output in stream:
                    watch.observe(output)
                    if output.finish_reason == "error":
                        raise _engine_error(output)
                    yield output
        finally:
            watch.close()


@dataclass(slots=True)
class Tally:
    """Counts the tokens of a whole answer."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    by_tier: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))

    @classmethod
    def of(cls, generations: Sequence[Generation]) -> Tally:
        return cls(sum(generation.num_prompt_tokens for generation in generations))

    def add(self, output: TextOutput) -> None:
        self.completion_tokens += len(output.token_ids)
        if output.num_cached_tokens is not None:
            self.cached_tokens += output.num_cached_tokens
            for tier, tokens in (output.cached_tokens_by_tier or {}).items():
                self.by_tier[tier] = self.by_tier.get(tier, 0) + tokens

    def usage(self) -> Usage:
        details = PromptTokensDetails(self.cached_tokens, self.by_tier)
        total = self.prompt_tokens + self.completion_tokens
        return Usage(self.prompt_tokens, self.completion_tokens, total, details)


async def run_all(
    generations: Sequence[Generation], run_one: Callable[[Generation], Awaitable[None]]
) -> None:
    """Run every choice at the same time. The first that fails ends the others."""
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


def _engine_error(output: TextOutput) -> ApiError:
    message = output.error or "the engine failed on this request"
    if output.error_code == OVERLOADED:
        return ApiError(message, status=503, kind=ENGINE, code=OVERLOADED, retry_seconds=1)
    return ApiError(message, status=500, kind=ENGINE, code="request_failed")
