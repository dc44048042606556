# SPDX-License-Identifier: Apache-2.0
"""The results of the Python API: an answer to each prompt, with one choice or several.

Fields that vLLM also has, have vLLM's names. `ProgressLine` shows progress on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TextIO

import numpy.typing as npt

from ..request.logprobs import PositionLogprobs, PromptLogprobs
from ..request.pooling import finish_vector
from ..text.output_processor import TextOutput

# The interval in which the progress line is rewritten. A call that is shorter writes no line.
PROGRESS_SECONDS = 1.0


class Logprob(NamedTuple):
    """The natural log-probability of a token at a position. The likeliest token has `rank` 1."""

    logprob: float
    rank: int
    decoded_token: str | None  # None for a model without a tokenizer


@dataclass(slots=True)
class CompletionOutput:
    """A choice of an answer. `logprobs` (None if not requested) has, for each token, a map from
    likely token ids to `Logprob`, the token itself first; `position_logprobs` has the same data.
    `timings` maps names of phases to seconds. `cached_tokens_by_tier` includes the KV pool."""

    index: int  # the choice's number among the choices of the prompt
    text: str = ""  # in chats, the text without thoughts
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error" | ...
    stop_reason: int | str | None = None  # the stop string or stop token id that ended the choice
    logprobs: list[dict[int, Logprob]] | None = None
    reasoning: str = ""  # the thoughts of a chat's answer
    num_reasoning_tokens: int = 0
    error: str | None = None
    num_cached_tokens: int = 0
    cached_tokens_by_tier: dict[str, int] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    position_logprobs: list[PositionLogprobs] = field(default_factory=list)
    # The experts of each token, if requested: uint8 or uint16 `[tokens, layers with experts,
    # experts per token]`, from the first requested token (default: the first) to the last but one.
    routed_experts: npt.NDArray[Any] | None = field(default=None, repr=False)

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of the whole choice; None without `logprobs`."""
        if self.logprobs is None:
            return None
        return sum(entry.logprobs[0] for entry in self.position_logprobs)

    def finished(self) -> bool:
        """Return whether the choice has ended, perhaps with an error; a method as in vLLM."""
        return self.finish_reason is not None

    def add(self, part: TextOutput) -> None:
        self.text += part.text
        self.token_ids.extend(part.token_ids)
        self.finish_reason, self.stop_reason = part.finish_reason, part.stop_reason
        self.reasoning += part.reasoning
        self.num_reasoning_tokens += part.num_reasoning_tokens
        self.error = part.error
        if part.num_cached_tokens is not None:
            self.num_cached_tokens = part.num_cached_tokens
        self.cached_tokens_by_tier.update(part.cached_tokens_by_tier or {})
        self.timings.update(part.timings or {})
        self.position_logprobs.extend(part.logprobs or ())
        if part.routed_experts is not None:
            self.routed_experts = part.routed_experts

    def fail(self, error: str) -> None:
        """End the choice with the finish reason "error" and the text `error`."""
        self.finish_reason, self.stop_reason, self.error = "error", None, error

    def name_logprobs(self, text_of: Callable[[int], str | None]) -> None:
        self.logprobs = [_by_token(entry, text_of) for entry in self.position_logprobs]


def _by_token(entry: PositionLogprobs, text_of: Callable[[int], str | None]) -> dict[int, Logprob]:
    first, *likeliest = entry.token_ids
    found = {first: Logprob(entry.logprobs[0], entry.rank, text_of(first))}
    for rank, token in enumerate(likeliest, 1):
        if token not in found:
            found[token] = Logprob(entry.logprobs[rank], rank, text_of(token))
    return found


@dataclass(slots=True)
class BeamSearchSequence:
    """An answer of a beam search. `tokens` and `text` begin with the prompt, as in vLLM."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]  # an entry for each token after the prompt
    text: str | None  # None for a model without a tokenizer
    cum_logprob: float  # log-probability of the tokens after the prompt
    score: float  # the number by which the answers are sorted
    finish_reason: str | None
    error: str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The answers of a beam search, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt. Properties such as `text` return the value of the first choice in
    `outputs`; `error` is the error of the first choice that failed."""

    request_id: str
    prompt: str | None  # None for a prompt given as token ids or numbers
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # the `n` choices of the answer
    prompt_logprobs: PromptLogprobs | None = None
    embedding: bytes | None = field(default=None, repr=False)  # the bytes that the engine sent

    def add(self, index: int, part: TextOutput) -> None:
        self.outputs[index].add(part)
        if part.prompt_logprobs is not None:
            self.prompt_logprobs = part.prompt_logprobs
        if part.embedding is not None:
            self.embedding = part.embedding

    @property
    def finished(self) -> bool:
        """Whether every choice has ended, perhaps with an error."""
        return all(choice.finished() for choice in self.outputs)

    @property
    def error(self) -> str | None:
        """The error of the first choice that failed; None if no choice failed."""
        return next((each.error for each in self.outputs if each.error is not None), None)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason

    @property
    def num_cached_tokens(self) -> int:
        return self.outputs[0].num_cached_tokens

    @property
    def cached_tokens_by_tier(self) -> dict[str, int]:
        return self.outputs[0].cached_tokens_by_tier

    @property
    def timings(self) -> dict[str, float]:
        return self.outputs[0].timings

    @property
    def logprobs(self) -> list[PositionLogprobs]:
        """The first choice's `position_logprobs`; empty if log-probabilities were not requested."""
        return self.outputs[0].position_logprobs


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of one prompt. The vector is empty if the request failed."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The result of `LLM.embed` for one prompt."""

    request_id: str
    prompt: str | None  # None for a prompt given as token ids or numbers
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    cached_tokens_by_tier: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    @classmethod
    def from_request_output(
        cls, answer: RequestOutput, *, normalize: bool, dimensions: int | None
    ) -> EmbeddingRequestOutput:
        vector: list[float] = []
        error = answer.error
        if error is None:
            try:
                made = finish_vector(answer.embedding, normalize=normalize, dimensions=dimensions)
                vector = made.tolist()
            except ValueError as failed:
                error = str(failed)
        return cls(
            answer.request_id,
            answer.prompt,
            answer.prompt_token_ids,
            EmbeddingOutput(vector),
            answer.num_cached_tokens,
            answer.cached_tokens_by_tier,
            error,
        )


class ProgressLine:
    """A progress line such as `3 of 12 answers, 250 tokens/s`, rewritten by `keep_redrawing`."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total, self._stream = total, stream
        self._began = time.monotonic()
        self._num_answers = self._num_tokens = self._length = 0

    @classmethod
    def create_for_terminal(cls, num_prompts: int, total: int) -> ProgressLine | None:
        """Return a line for several prompts; None for one prompt or without a terminal."""
        stream = sys.stderr
        if num_prompts < 2 or stream is None or stream.closed or not stream.isatty():
            return None
        return cls(total, stream)

    def count_new_tokens(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def count_answer(self) -> None:
        self._num_answers += 1

    async def keep_redrawing(self) -> None:
        """Rewrite the line at intervals until this task is cancelled, then end the line."""
        # An error of writing is ignored: the answers must not be lost if the terminal is closed.
        with contextlib.suppress(OSError, ValueError):
            try:
                while True:
                    await asyncio.sleep(PROGRESS_SECONDS)
                    self._print_line()
            finally:
                if self._length:
                    self._print_line("\n")

    def _print_line(self, end: str = "") -> None:
        rate = self._num_tokens / max(time.monotonic() - self._began, 1e-9)
        line = f"{self._num_answers} of {self._total} answers, {rate:.0f} tokens/s"
        self._stream.write(f"\r{line:<{self._length}}{end}")
        self._stream.flush()
        self._length = len(line)
