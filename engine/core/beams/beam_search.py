# SPDX-License-Identifier: Apache-2.0
"""BeamSearch: the beams of one prompt, from round to round. Nothing here computes a model.

In each round every beam brings its likeliest next tokens, and of all these continuations the best
go on. One that ends (with a token that ends answers, or at the most tokens) is an answer if it is
among the best `beam_width`, whether or not it goes on otherwise; the best answers are kept.

    round    beams            continuations          beams of the next round    answers
    1        ""               a -0.2  b -1.9  …       a, b
    2        a, b             ac -0.5  a. -0.9  bd -2.0  …    ac, bd             a.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence, Set
from typing import NamedTuple

from ...request.beam_params import BeamSearchParams
from ...request.logprobs import PositionLogprobs


class Continuation(NamedTuple):
    """A token behind a beam."""

    beam: int  # its place in the round
    token_id: int
    rank: int  # of the token behind that beam; 1 is the likeliest
    logprob: float
    total: float  # the log-probability of all tokens up to it


class Beam(NamedTuple):
    """Tokens behind the prompt."""

    token_ids: tuple[int, ...]
    positions: tuple[PositionLogprobs, ...]  # one for each token
    total: float  # the sum of their log-probabilities

    def extended(self, by: Continuation) -> Beam:
        position = PositionLogprobs([by.token_id], [by.logprob], by.rank)
        return Beam((*self.token_ids, by.token_id), (*self.positions, position), by.total)


class Answer(NamedTuple):
    """A beam that has ended."""

    score: float
    beam: Beam


class BeamSearch:
    """Give it each round's likeliest tokens; the beams that go on are the next round's."""

    def __init__(
        self, params: BeamSearchParams, max_tokens: int, end_ids: Set[int], vocab_size: int
    ) -> None:
        """`end_ids` end an answer, unless `params` ignore them; no answer is longer than
        `max_tokens`. Raises ValueError for more beams than a vocabulary has continuations."""
        self._params, self._max_tokens = params, max_tokens
        self._end_ids = frozenset() if params.ignore_eos else frozenset(end_ids)
        self.num_wanted = max(2, 1 + len(self._end_ids)) * params.beam_width
        if self.num_wanted > vocab_size:
            raise ValueError(
                f"beam_width is {params.beam_width}, for which {self.num_wanted} continuations of "
                f"a prompt are compared, and the vocabulary has {vocab_size} tokens; take fewer"
            )
        self.beams = [Beam((), (), 0.0)]
        self.answers: list[Answer] = []  # as many as there are beams at most, the best first
        self._num_tokens = 0
        self._can_improve = True
        self.is_done = False

    def advance(self, likeliest: Sequence[Sequence[tuple[int, float]]]) -> list[Continuation]:
        """The continuations that are the next beams. `likeliest` has, for each beam, the
        `num_wanted` likeliest next tokens with their log-probabilities, the likeliest first."""
        width = self._params.beam_width
        every = (
            Continuation(index, token_id, rank, logprob, beam.total + logprob)
            for index, (beam, tokens) in enumerate(zip(self.beams, likeliest, strict=True))
            for rank, (token_id, logprob) in enumerate(tokens, start=1)
        )
        best = heapq.nlargest(self.num_wanted, every, key=lambda each: each.total)
        self._num_tokens += 1
        ends = self._num_tokens >= self._max_tokens
        ended = [each for each in best[:width] if ends or each.token_id in self._end_ids]
        self._add_answers(ended)
        following = [each for each in best if each.token_id not in self._end_ids][:width]
        self.beams = [self.beams[each.beam].extended(each) for each in following]
        self._can_improve = self._can_improve and self._improvement_is_possible()
        is_full = len(self.answers) == width
        stops_early = self._params.early_stopping is True and is_full
        self.is_done = ends or stops_early or not self._can_improve
        return following

    def finish_reason_of(self, beam: Beam) -> str:
        """The finish reason of an answer: `stop` after a token that ends answers, else `length`."""
        return "stop" if beam.token_ids[-1] in self._end_ids else "length"

    def _add_answers(self, ended: Sequence[Continuation]) -> None:
        width = self._params.beam_width
        is_full = len(self.answers) == width
        if not self._can_improve or (self._params.early_stopping is True and is_full):
            return
        for each in ended:
            beam = self.beams[each.beam].extended(each)
            self.answers.append(Answer(self._score(each.total, self._num_tokens), beam))
        self.answers.sort(key=lambda answer: -answer.score)  # stable: of equals the first stays
        del self.answers[width:]

    def _improvement_is_possible(self) -> bool:
        """Whether a beam may still become better than the worst answer."""
        if len(self.answers) < self._params.beam_width:
            return True
        num_tokens = self._num_tokens
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            num_tokens = self._max_tokens
        best = max((beam.total for beam in self.beams), default=-math.inf)
        return self._score(best, num_tokens) > self.answers[-1].score

    def _score(self, total: float, num_tokens: int) -> float:
        return total / math.pow(num_tokens, self._params.length_penalty)
