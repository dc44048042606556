# SPDX-License-Identifier: Apache-2.0
"""`PromptRunner`: runs the prompts of a Python API call as one request for each choice.

The choices of a prompt start together, so that the prompt is computed once. A failed request does
not end other requests. Use a `PromptRunner` in one event loop only."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from ..client.base import EngineClient, EngineDead
from ..request.beam_params import BeamSearchParams
from ..request.core_messages import AddRequest, share_prompt
from ..request.request import unpack_token_ids
from ..request.sampling_params import child_params
from ..text.output_processor import generate_text
from ..text.reasoning import ReasoningMarks, Thoughts
from ..text.tokenizer import Tokenizer
from .outputs import CompletionOutput, ProgressLine, RequestOutput

logger = logging.getLogger(__name__)


class CheckedPrompt(NamedTuple):
    request: AddRequest  # the request for all choices of the prompt
    text: str | None  # None for a prompt of token ids or embeddings
    # Whether the answer begins inside a thought; None: thoughts stay in the answer's text.
    is_inside: bool | None = None
    beams: BeamSearchParams | None = None  # a beam search, whose answers become the choices


class Run(NamedTuple):
    """A choice of an answer, and the request that generates it."""

    request: AddRequest
    answer: RequestOutput
    child: int  # the index of the choice in `answer.outputs`
    thoughts: Thoughts | None
    may_begin: asyncio.Event  # the start signal, the same for all choices that start together


class PromptRunner:
    """Runs prompts until all have answers, at most `max_at_once` choices at a time."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        marks: ReasoningMarks | None,
        *,
        max_at_once: int,
    ) -> None:
        self._client, self._tokenizer, self._marks = client, tokenizer, marks
        self._max_at_once = max_at_once

    async def run(self, prompts: Sequence[CheckedPrompt], *, use_tqdm: bool) -> list[RequestOutput]:
        """Return the prompts' answers in order. A failed choice has `error`. Raises EngineDead."""
        answers = [self._new_answer(prompt) for prompt in prompts]
        runs = [
            run
            for prompt, answer in zip(prompts, answers, strict=True)
            for run in self._runs_of(prompt, answer)
        ]
        line = ProgressLine.create_for_terminal(len(answers), len(runs)) if use_tqdm else None
        places = asyncio.Semaphore(self._max_at_once)  # the engine core's queue has a limit
        tasks = [asyncio.ensure_future(self._run_one(run, places, line)) for run in runs]
        tasks.append(asyncio.ensure_future(_begin_in_turn(runs, places)))
        showing = [] if line is None else [asyncio.ensure_future(line.keep_redrawing())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in (*tasks, *showing):
                task.cancel()
            await asyncio.gather(*tasks, *showing, return_exceptions=True)
        return answers

    def name_logprobs(self, answers: Sequence[RequestOutput]) -> None:
        """Set `logprobs` of every choice, which may take too long for an event loop."""
        from ..api.token_texts import TokenTexts

        texts = TokenTexts(self._tokenizer)

        def text_of(token_id: int) -> str | None:
            return None if self._tokenizer is None else texts.get_token_text(token_id).text

        for answer in answers:
            for choice in answer.outputs:
                choice.name_logprobs(text_of)

    def _new_answer(self, prompt: CheckedPrompt) -> RequestOutput:
        request, tiers = prompt.request, self._client.ready.tiers
        choices = [
            CompletionOutput(index, cached_tokens_by_tier=dict.fromkeys(tiers, 0))
            for index in range(request.sampling_params.n)
        ]
        ids = unpack_token_ids(request.prompt_token_ids)
        return RequestOutput(request.request_id, prompt.text, ids, choices)

    def _runs_of(self, prompt: CheckedPrompt, answer: RequestOutput) -> Iterator[Run]:
        request, params = prompt.request, prompt.request.sampling_params
        requests = [request]
        if params.n > 1:
            requests = [
                msgspec.structs.replace(
                    request,
                    request_id=f"{request.request_id}-{child}",
                    sampling_params=child_params(params, child, with_prompt=child == 0),
                )
                for child in range(params.n)
            ]
        for first in range(0, len(requests), self._max_at_once):
            together, may_begin = requests[first : first + self._max_at_once], asyncio.Event()
            share_prompt(together, prompt.beams)
            for child, own in enumerate(together, start=first):
                thoughts = None
                if self._marks is not None and prompt.is_inside is not None:
                    thoughts = Thoughts(self._marks, is_inside=prompt.is_inside)
                yield Run(own, answer, child, thoughts, may_begin)

    async def _run_one(
        self, run: Run, places: asyncio.Semaphore, line: ProgressLine | None
    ) -> None:
        request, answer, child, thoughts, may_begin = run
        await may_begin.wait()
        try:
            parts = generate_text(self._client, request, self._tokenizer, thoughts)
            async with aclosing(parts):
                async for part in parts:
                    answer.add(child, part)
                    if line is not None:
                        line.count_new_tokens(len(part.token_ids))
        except EngineDead:
            raise
        except Exception as error:  # for example, a panic in the tokenizer's Rust code
            logger.exception("request %s failed", request.request_id)
            answer.outputs[child].fail(str(error) or type(error).__name__)
        finally:
            places.release()
        if line is not None:
            line.count_answer()


async def _begin_in_turn(runs: Sequence[Run], places: asyncio.Semaphore) -> None:
    """Start runs in order, each when a place is free. Runs with the same `may_begin` event start
    together, once each of these runs has a place."""
    for _, together in itertools.groupby(runs, key=lambda run: id(run.may_begin)):
        group = list(together)
        for _ in group:
            await places.acquire()
        group[0].may_begin.set()
