# SPDX-License-Identifier: Apache-2.0
"""Turns a request's output tokens into text, looks for stop strings, and sets the finish reason.

The API server and the Python API share this module. The engine core handles only token ids, so this
module looks for stop strings, and the client then aborts the request in the core."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..client.base import EngineClient
from ..request.core_messages import AddRequest, TokenOutput
from ..request.handover_ticket import Ticket
from ..request.logprobs import PositionLogprobs, PromptLogprobs
from ..request.request import BYTES_PER_TOKEN, unpack_token_ids
from ..request.routed_rows import RoutedRows
from ..request.sampling_params import SamplingParams
from .detokenizer import Decoder, IncrementalDetokenizer
from .expert_rows import join_routed_rows
from .reasoning import Thoughts
from .tool_calls.base import CallPiece

# More prompt tokens than the text of the first output token can depend on.
_CONTEXT_TOKENS = 16

_GOES_ON = TokenOutput(request_id="", new_token_ids=[])


class StopStrings:
    """A search for the stop strings of one request in text that arrives in pieces. The results of
    `filter_text` and `flush_held`, joined, are the text up to the first stop string.

    `filter_text` holds back only text that may begin a stop string. So a match never begins in text
    that was returned already."""

    __slots__ = ("_begun", "_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        # For each stop string, how much of its beginning is at the end of the held text. A stop
        # string cannot begin earlier, so text that another one holds back is not searched again.
        self._begun = [0] * len(self._stops)
        self.matched: str | None = None

    def filter_text(self, text: str) -> str:
        """Add text, and return all text that is certain to be before a stop string. A match sets
        `matched` and ends the text."""
        if self.matched is not None:
            return ""
        num_held = len(self._held)
        text = self._held + text
        found = self._first_match(text, num_held)
        if found is not None:
            start, stop = found
            self.matched, self._held = stop, ""
            return text[: start + len(stop)] if self._include else text[:start]
        num_new = len(text) - num_held
        self._begun = [
            _overlap(text, stop, begun + num_new)
            for stop, begun in zip(self._stops, self._begun, strict=True)
        ]
        keep = max(self._begun, default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush_held(self) -> str:
        """Return the held text, which did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, num_held: int) -> tuple[int, str] | None:
        """Return the match that begins first; of matches that begin at one place, return that of
        the first stop string in the list."""
        best: tuple[int, str] | None = None
        for stop, begun in zip(self._stops, self._begun, strict=True):
            start = text.find(stop, num_held - begun)
            if start >= 0 and (best is None or start < best[0]):
                best = (start, stop)
        return best


def _overlap(text: str, stop: str, most: int) -> int:
    """Return the length, at most `most`, of the longest suffix of `text` that is a proper prefix of
    `stop`."""
    for length in range(min(most, len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@dataclass(slots=True)
class TextOutput:
    """New output of one request: the fields of `TokenOutput`, and the text."""

    # Whole characters before any stop string, without reasoning that is split off.
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop string or stop token id that ended the request
    num_cached_tokens: int | None = None
    cached_tokens_by_tier: dict[str, int] | None = None
    error: str | None = None
    error_code: str | None = None
    timings: dict[str, float] | None = None
    logprobs: list[PositionLogprobs] | None = None  # one for each of `token_ids`
    prompt_logprobs: PromptLogprobs | None = None
    ticket: Ticket | None = None
    reasoning: str = ""  # the text of reasoning
    tool_calls: list[CallPiece] = field(default_factory=list)  # empty without a parser
    num_reasoning_tokens: int = 0  # counted with this output, perhaps of earlier tokens
    embedding: bytes | None = None  # the prompt's embedding, if requested
    # In the last output, if requested: experts, uint8 or uint16 `[tokens, layers with experts,
    # experts of a token]`, from the first token that the request names to the last but one.
    routed_experts: npt.NDArray[np.integer[Any]] | None = None


class OutputProcessor:
    """The maker of one request's text. Without a tokenizer there is no text, and stop strings raise
    ValueError. With `thoughts`, reasoning is split off."""

    def __init__(
        self,
        tokenizer: Decoder | None,
        params: SamplingParams,
        prompt_token_bytes: bytes = b"",
        thoughts: Thoughts | None = None,
    ) -> None:
        if tokenizer is None and params.stop:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids instead")
        # JSON has no stop strings: they must not end it before it is complete, and no text follows.
        stops = () if _is_json(params) else params.stop
        context = unpack_token_ids(prompt_token_bytes[-_CONTEXT_TOKENS * BYTES_PER_TOKEN :])
        self._params = params
        self._num_prompt_tokens = len(prompt_token_bytes) // BYTES_PER_TOKEN
        self._num_tokens = 0
        self._routed: list[RoutedRows] = []
        # The core's timings up to the first token, and the time at which that token arrived.
        self._first_timings: dict[str, float] | None = None
        self._first_at = 0.0
        self._looks_for_stops = bool(stops)
        self._stops = StopStrings(stops, include=params.include_stop_str_in_output)
        self._thoughts = None if tokenizer is None else thoughts
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer if thoughts is None else thoughts.decoder(tokenizer),
                context,
                skip_special_tokens=params.skip_special_tokens,
            )

    def process(self, output: TokenOutput) -> TextOutput:
        """Return the text of the core's next output. After an output with a finish reason no output
        may follow."""
        if output.timings is not None and output.finish_reason is None:
            self._first_timings, self._first_at = output.timings, time.monotonic()
        result = TextOutput(
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            num_cached_tokens=output.num_cached_tokens,
            cached_tokens_by_tier=output.cached_tokens_by_tier,
            error=output.error,
            error_code=output.error_code,
            timings=None if output.finish_reason is None else output.timings,
            prompt_logprobs=output.prompt_logprobs,
            ticket=output.ticket,
            embedding=output.embedding,
        )
        if self._looks_for_stops:
            self._take_until_stop(output, result)
        else:
            self._append_tokens(output.new_token_ids, output, result)
        if output.routed_experts is not None:
            self._routed += output.routed_experts
        if self._routed and result.finish_reason is not None:
            # The last token was sampled but not computed, so it has no experts.
            end = self._num_prompt_tokens + self._num_tokens - 1
            result.routed_experts = join_routed_rows(self._routed, end)
        if output.logprobs is not None:
            result.logprobs = output.logprobs[: len(result.token_ids)]
        if self._thoughts is not None:
            is_last = result.finish_reason is not None
            split = self._thoughts.split(result.text, is_last=is_last)
            result.reasoning, result.text = split
            result.num_reasoning_tokens = self._thoughts.count_reasoning_tokens(
                result.token_ids, is_last=is_last
            )
        return result

    def _append_tokens(self, token_ids: list[int], output: TokenOutput, result: TextOutput) -> None:
        """Append tokens and their text to `result`."""
        result.token_ids.extend(token_ids)
        self._num_tokens += len(token_ids)
        if self._detokenizer is None:
            return
        text = self._detokenizer.push_tokens(self._shown(token_ids, output))
        if output.finish_reason is not None:
            text += self._detokenizer.decode_rest()
        result.text += text

    def _take_until_stop(self, output: TokenOutput, result: TextOutput) -> None:
        """Append tokens one by one, so that no token after a stop string is appended."""
        last = len(output.new_token_ids) - 1
        for index, token in enumerate(output.new_token_ids):
            piece = TextOutput()
            # A finish reason of the core belongs to the last token.
            self._append_tokens([token], output if index == last else _GOES_ON, piece)
            result.token_ids.append(token)
            self._add_checked(piece.text, result)
            if self._stops.matched is not None:
                result.finish_reason, result.stop_reason = "stop", self._stops.matched
                if result.timings is None:  # a stop string ended the request, not the core
                    result.timings = self._timings_now()
                return
        if output.finish_reason is not None:
            if last < 0 and self._detokenizer is not None:
                self._add_checked(self._detokenizer.decode_rest(), result)
            result.text += self._stops.flush_held()

    def _timings_now(self) -> dict[str, float] | None:
        """Return the timings that the core would report if the request ended now."""
        if self._first_timings is None:
            return None
        decode = time.monotonic() - self._first_at
        total = self._first_timings["first_token_seconds"] + decode
        return {**self._first_timings, "decode_seconds": decode, "total_seconds": total}

    def _add_checked(self, text: str, result: TextOutput) -> None:
        """Append text, filtered for stop strings. No stop string is looked for in the text of the
        first `min_tokens` tokens."""
        if self._num_tokens < self._params.min_tokens:
            result.text += text
        else:
            result.text += self._stops.filter_text(text)

    def _shown(self, token_ids: list[int], output: TokenOutput) -> list[int]:
        """Return the tokens whose text is output: all but a token that ended the request."""
        has_end = output.finish_reason == "stop" and not output.ends_without_token
        if has_end and not self._params.include_stop_str_in_output:
            return token_ids[:-1]
        return token_ids


def _is_json(params: SamplingParams) -> bool:
    """Whether a grammar makes the whole answer JSON, as for required tool calls."""
    asked = params.structured_outputs
    return asked is not None and (asked.json is not None or bool(asked.json_object))


async def generate_text(
    client: EngineClient,
    request: AddRequest,
    tokenizer: Decoder | None,
    thoughts: Thoughts | None = None,
) -> AsyncGenerator[TextOutput, None]:
    """Run one request and yield its text as it grows; `thoughts` splits reasoning off. The last
    output has a finish reason. Outputs have the number of cached tokens of every tier, even if it
    is 0.

    A stop string, or closing the generator early, aborts the request in the core. Raises what
    `EngineClient.generate` raises."""
    params, prompt = request.sampling_params, request.prompt_token_ids
    processor = OutputProcessor(tokenizer, params, prompt, thoughts)
    stream = cast("AsyncGenerator[TokenOutput, None]", client.generate(request))
    async with aclosing(stream):
        async for output in stream:
            result = processor.process(output)
            if result.cached_tokens_by_tier is not None:
                tiers = dict.fromkeys(client.ready.tiers, 0)
                result.cached_tokens_by_tier = tiers | result.cached_tokens_by_tier
            yield result
            if result.finish_reason is not None:
                if output.finish_reason is None:
                    client.has_enough(request.request_id)
                return
