# SPDX-License-Identifier: Apache-2.0
"""BeamSearch: selects the beams of one prompt in each round, without running the model.

In each round every beam is extended by its likeliest next tokens, and the best of all continuations
become the beams of the next round. A continuation ends with an end token, or at `max_tokens`. An
ended continuation becomes an answer if it is among the best `beam_width` of its round. The search
keeps the best answers.

    round    beams            continuations          beams of the next round    answers
    1        ""               a -0.2  b -1.9  …       a, b
    2        a, b             ac -0.5  a. -0.9  bd -2.0  …    ac, bd             a."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence, Set
from typing import NamedTuple

from ...request.beam_params import BeamSearchParams
from ...request.logprobs import PositionLogprobs


class Beam(NamedTuple):
    """The tokens of a beam as a linked list: a Beam is one token and a link to the previous one."""

    before: Beam | None  # None for the first token
    place: int  # index of `before` in its round
    token_id: int
    rank: int  # rank of the token among the next tokens of `before`; 1 is the likeliest
    logprob: float  # of the token
    total: float  # sum of the log-probabilities of all its tokens

    def positions(self) -> list[PositionLogprobs]:
        """Return the beam's tokens in order, each with its log-probability."""
        found, beam = [], self
        while True:
            found.append(PositionLogprobs([beam.token_id], [beam.logprob], beam.rank))
            if beam.before is None:
                return found[::-1]
            beam = beam.before


class Answer(NamedTuple):
    """A beam that has ended, with its score."""

    score: float
    beam: Beam


class BeamSearch:
    """The search of one prompt; `advance` is called with the likeliest next tokens of each
    round."""

    def __init__(
        self, params: BeamSearchParams, max_tokens: int, end_ids: Set[int], vocab_size: int
    ) -> None:
        """Tokens in `end_ids` end an answer unless `params` ignores them; an answer has at most
        `max_tokens` tokens. Raises ValueError if the search needs more continuations than the
        vocabulary has tokens."""
        self._params, self._max_tokens = params, max_tokens
        self._end_ids = frozenset() if params.ignore_eos else frozenset(end_ids)
        self.num_wanted = max(2, 1 + len(self._end_ids)) * params.beam_width
        if self.num_wanted > vocab_size:
            raise ValueError(
                f"beam_width is {params.beam_width}, for which {self.num_wanted} continuations of "
                f"a prompt are compared, and the vocabulary has {vocab_size} tokens; take fewer"
            )
        # The beams of the present round; None stands for the prompt, before the first round.
        self._beams: list[Beam | None] = [None]
        self.answers: list[Answer] = []  # at most `beam_width`, the best first
        self._num_tokens = 0
        self._can_improve = True
        self.is_done = False

    def advance(self, likeliest: Sequence[Sequence[tuple[int, float]]]) -> list[Beam]:
        """Return the beams of the next round. `likeliest` has, for each present beam, its
        `num_wanted` likeliest next tokens with log-probabilities, the likeliest first."""
        width = self._params.beam_width
        every = (
            Beam(beam, place, token_id, rank, logprob, logprob + (beam.total if beam else 0.0))
            for place, (beam, tokens) in enumerate(zip(self._beams, likeliest, strict=True))
            for rank, (token_id, logprob) in enumerate(tokens, start=1)
        )
        best = heapq.nlargest(self.num_wanted, every, key=lambda beam: beam.total)
        self._num_tokens += 1
        ends = self._num_tokens >= self._max_tokens
        self._add_answers([beam for beam in best[:width] if ends or self._has_ended(beam)])
        following = [beam for beam in best if not self._has_ended(beam)][:width]
        self._beams = [*following]
        self._can_improve = self._can_improve and self._improvement_is_possible(following)
        self.is_done = ends or self._has_enough_answers() or not self._can_improve
        return following

    def finish_reason_of(self, beam: Beam) -> str:
        """Return the finish reason of an answer: `stop` after an end token, else `length`."""
        return "stop" if self._has_ended(beam) else "length"

    def _has_ended(self, beam: Beam) -> bool:
        return beam.token_id in self._end_ids

    def _has_enough_answers(self) -> bool:
        """Whether early stopping is on and the search has `beam_width` answers."""
        return self._params.early_stopping is True and len(self.answers) == self._params.beam_width

    def _add_answers(self, ended: Sequence[Beam]) -> None:
        if self._can_improve and not self._has_enough_answers():
            num_tokens = self._num_tokens
            self.answers += [Answer(self._params.score(b.total, num_tokens), b) for b in ended]
            # The sort is stable: among equal scores the earlier answer stays ahead.
            self.answers.sort(key=lambda answer: -answer.score)
            del self.answers[self._params.beam_width :]

    def _improvement_is_possible(self, beams: Sequence[Beam]) -> bool:
        """Whether a beam may still get a better score than the worst answer."""
        if len(self.answers) < self._params.beam_width:
            return True
        num_tokens = self._num_tokens
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            num_tokens = self._max_tokens
        best = max((beam.total for beam in beams), default=-math.inf)
        return self._params.score(best, num_tokens) > self.answers[-1].score
