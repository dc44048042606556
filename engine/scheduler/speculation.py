# SPDX-License-Identifier: Apache-2.0
"""Speculation: how many draft tokens each request gets, by what drafts have been worth so far.

A step that checks drafts takes longer than one without, and gives a request one token more for each
draft that is accepted. Both are measured while the engine runs:

- *By request*: one whose drafts are accepted too seldom to pay for checking them gets none for a
  while, twice as long each time. All accepted: it gets twice as many in the next step. Where
  drafts of no request pay, one that comes begins with such a while, but for some that try.
- *By batch size*: where steps with drafts give fewer tokens a second than steps without, no
  request gets any for a while, twice as long each time. Batch sizes are told apart by powers of
  two.

Tokens do not depend on any of it, only the time they take.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..request.request import DraftRecord, Request
from .output import ModelRunnerOutput, SchedulerOutput

_FIRST_DRAFTS = 4  # of a request of which nothing is known
_LEAST_DRAFTS = 2
_NEWEST = 0.2  # weight of the newest step in an average
_STEPS_JUDGED = 4  # with drafts, before a request is judged
_FIRST_PAUSE_TOKENS = 16
_MOST_PAUSES = 6  # that double
_VAIN_JUDGEMENTS = 2  # one after the other, from which on requests begin with a pause
_REQUESTS_BETWEEN_TRIES = 8
_UNKNOWN_BREAK_EVEN = 0.1
_LEAST_BREAK_EVEN, _MOST_BREAK_EVEN = 0.02, 0.8
_PLAIN_STEPS = 4  # without drafts, that a batch size is measured with first
_PLAIN_TRIES = 16  # steps in which that must have been possible, or it goes on without
_DRAFT_STEPS = 16  # with drafts, before a batch size is judged
_LEAST_GAIN = 0.97
_FIRST_OFF_STEPS = 64
_MOST_OFF_STEPS = 4096
_STEPS_BETWEEN_PLAIN = 512


@dataclass(slots=True)
class _Average:
    """The average of the newest values."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(_NEWEST, 1.0 / self.count) * (value - self.value)


@dataclass(slots=True)
class _Pace:
    """Steps of one batch size that only decode: seconds, and tokens for each request."""

    plain_seconds: _Average = field(default_factory=_Average)
    seconds: _Average = field(default_factory=_Average)  # while drafts are asked for
    tokens: _Average = field(default_factory=_Average)  # that a request gets meanwhile
    draft_seconds: _Average = field(default_factory=_Average)  # of steps with drafts
    drafts: _Average = field(default_factory=_Average)  # in those
    plain_left: int = _PLAIN_TRIES  # steps that are made without drafts before others
    off_steps: int = _FIRST_OFF_STEPS
    num_on: int = 0

    @property
    def gain(self) -> float:
        """Tokens a second while drafts are asked for, against those without; 1.0: unknown."""
        if not (self.plain_seconds.count and self.seconds.count and self.seconds.value):
            return 1.0
        return self.tokens.value * self.plain_seconds.value / self.seconds.value

    def break_even(self, num_requests: int) -> float:
        """The accepted share of drafts by which checking them pays."""
        plain = self.plain_seconds.value
        if not (plain and self.drafts.count and self.drafts.value):
            return _UNKNOWN_BREAK_EVEN
        of_draft = (self.draft_seconds.value - plain) / self.drafts.value
        share = of_draft * num_requests / plain
        return min(max(share, _LEAST_BREAK_EVEN), _MOST_BREAK_EVEN)


@dataclass(slots=True, eq=False)
class Speculation:
    """A request gets at most `most_drafts` in a step; without `is_adaptive` it gets as many in
    every step, whatever they are worth. `looks_ahead`: drafts are computed where their K and V
    will lie, so that they need blocks before they are proposed. One thread, that of the steps,
    calls it. Raises ValueError for less than one draft."""

    most_drafts: int
    is_adaptive: bool = True
    looks_ahead: bool = False
    num_drafts: int = 0  # steps of requests that had drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)  # by their place among those of a step
    num_pauses: int = 0
    num_switched_off: int = 0
    _paces: dict[int, _Pace] = field(default_factory=dict)
    _num_running: int = 1
    _num_begun: int = 0  # requests
    _num_vain: int = 0  # judgements since one said that drafts pay
    _is_on: bool = True

    def __post_init__(self) -> None:
        if self.most_drafts < 1:
            raise ValueError(f"speculation needs at least one draft a step, not {self.most_drafts}")
        self.accepted_at = [0] * self.most_drafts

    def begin_step(self, num_running: int) -> None:
        """A step of so many requests is about to be made."""
        self._num_running = num_running
        if not self.is_adaptive:
            return
        pace = self._pace
        self._is_on = pace.plain_left == 0
        if pace.plain_left:
            pace.plain_left -= 1

    def most_drafts_of(self, request: Request) -> int:
        """The number of drafts to propose behind the token that the request chooses next."""
        # The last token is chosen and never computed, so no draft stands in its place.
        useful = request.max_num_tokens - request.num_tokens - 2
        if useful <= 0 or not self._is_on:
            return 0
        if not self.is_adaptive:
            return min(self.most_drafts, useful)
        record = request.progress.drafting
        if record is None:
            most = min(_FIRST_DRAFTS, self.most_drafts)
            record = request.progress.drafting = DraftRecord(most)
            is_try = self._num_begun % _REQUESTS_BETWEEN_TRIES == 0
            self._num_begun += 1
            if self._num_vain >= _VAIN_JUDGEMENTS and not is_try:
                num_pauses = min(self._num_vain, _MOST_PAUSES)
                record.resume_at = request.num_tokens + (_FIRST_PAUSE_TOKENS << num_pauses)
        if request.num_tokens < record.resume_at:
            return 0
        return min(record.most, useful)

    def note_accepted(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """A step has checked `num_drafts` drafts of a request."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.accepted_at[place] += 1
        record = request.progress.drafting
        if record is None:
            return
        record.num_steps += 1
        weight = max(_NEWEST, 1.0 / record.num_steps)
        record.num_drafts += weight * (num_drafts - record.num_drafts)
        record.num_accepted += weight * (num_accepted - record.num_accepted)
        if num_accepted == num_drafts:
            if num_drafts >= record.most:
                record.most = min(2 * record.most, self.most_drafts)
        else:
            record.most = min(max(num_accepted + 1, _LEAST_DRAFTS), self.most_drafts)
        if record.num_steps >= _STEPS_JUDGED:
            self._judge(request, record)

    def _judge(self, request: Request, record: DraftRecord) -> None:
        """A request whose drafts do not pay pauses."""
        break_even = self._pace.break_even(self._num_running)
        if record.num_accepted >= break_even * record.num_drafts:
            record.num_pauses = self._num_vain = 0
            return
        self._num_vain += 1
        record.resume_at = request.num_tokens + (_FIRST_PAUSE_TOKENS << record.num_pauses)
        record.num_pauses = min(record.num_pauses + 1, _MOST_PAUSES)
        record.num_steps, record.most = _STEPS_JUDGED // 2, min(_FIRST_DRAFTS, self.most_drafts)
        self.num_pauses += 1

    def note_step(self, output: SchedulerOutput, result: ModelRunnerOutput, seconds: float) -> None:
        """The worker took `seconds` for a step. Only steps that did nothing but decode count."""
        if not self.is_adaptive:
            return
        num_requests = len(output.num_scheduled_tokens)
        num_drafts = sum(map(len, output.draft_token_ids.values()))
        if not num_requests or output.total_num_scheduled_tokens != num_requests + num_drafts:
            return
        pace = self._pace
        if not output.wanted_drafts and not num_drafts:
            pace.plain_seconds.add(seconds)
            if pace.plain_seconds.count == _PLAIN_STEPS:
                pace.plain_left = 0
            return
        pace.seconds.add(seconds)
        num_tokens = sum(map(len, result.sampled_token_ids.values()))
        pace.tokens.add(num_tokens / num_requests)
        if num_drafts:
            pace.draft_seconds.add(seconds)
            pace.drafts.add(num_drafts)
        pace.num_on += 1
        if pace.seconds.count >= _DRAFT_STEPS and pace.gain < _LEAST_GAIN:
            pace.plain_left, pace.off_steps = (
                pace.off_steps,
                min(2 * pace.off_steps, _MOST_OFF_STEPS),
            )
            pace.seconds, pace.tokens = _Average(), _Average()
            self.num_switched_off += 1
        elif pace.num_on % _STEPS_BETWEEN_PLAIN == 0:
            pace.plain_left = 1
            if pace.gain > 1.0:
                pace.off_steps = _FIRST_OFF_STEPS

    def stats(self) -> dict[str, Any]:
        """Counters since start, and the gain by batch size, as plain values."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "accepted_at": list(self.accepted_at),
            "pauses": self.num_pauses,
            "switched_off": self.num_switched_off,
            "gain": {str(1 << size): pace.gain for size, pace in self._paces.items()},
        }

    @property
    def _pace(self) -> _Pace:
        """The pace of as many requests as run now."""
        size = max(self._num_running - 1, 0).bit_length()
        pace = self._paces.get(size)
        if pace is None:
            pace = self._paces[size] = _Pace()
        return pace
