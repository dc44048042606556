# SPDX-License-Identifier: Apache-2.0
"""Speculation chooses the number of draft tokens of each request, from drafts' measured benefit.

A step that checks drafts takes longer than a step without drafts, and gives a request one more
token for each accepted draft. Two rules use measurements of the running engine:

- *By request*: if too few of a request's drafts are accepted to save time, the request gets no
  drafts during a pause, which doubles each time. If all drafts of a step are accepted, the next
  step gets twice as many. If drafts saved no time in the latest requests, seven in eight new
  requests begin with a pause.
- *By batch size*: if steps with drafts give fewer tokens per second than steps without drafts, no
  request gets drafts during a pause, which doubles each time. Batch sizes are grouped by powers of
  two.

Speculation changes only the timing of tokens, never the tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..request.request import DraftRecord, Request
from .output import ModelRunnerOutput, SchedulerOutput

_FIRST_DRAFTS = 4  # drafts of a new request
_LEAST_DRAFTS = 2
_NEWEST = 0.2  # weight of the newest step in an average
_STEPS_JUDGED = 4  # steps with drafts before a request is judged
_FIRST_PAUSE_TOKENS = 16
_MOST_PAUSES = 6  # how many times a pause is doubled at most
_VAIN_JUDGEMENTS = 2  # judgements in a row that paused a request, before new requests pause too
_REQUESTS_BETWEEN_TRIES = 8
_UNKNOWN_BREAK_EVEN = 0.1
_LEAST_BREAK_EVEN, _MOST_BREAK_EVEN = 0.02, 0.8
_PLAIN_STEPS = 4  # measured steps without drafts that a batch size needs before drafts
_PLAIN_TRIES = 16  # the most steps without drafts before a batch size tries drafts
_DRAFT_STEPS = 16  # steps with drafts before a batch size is judged
_LEAST_GAIN = 0.97
_FIRST_OFF_STEPS = 64
_MOST_OFF_STEPS = 4096
_STEPS_BETWEEN_PLAIN = 512


@dataclass(slots=True)
class _Average:
    """A moving average in which newer values weigh more."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(_NEWEST, 1.0 / self.count) * (value - self.value)


@dataclass(slots=True)
class _Pace:
    """The seconds and tokens of decode-only steps with similar batch sizes."""

    plain_seconds: _Average = field(default_factory=_Average)
    seconds: _Average = field(default_factory=_Average)  # while drafts are in use
    tokens: _Average = field(default_factory=_Average)  # per request, while drafts are in use
    draft_seconds: _Average = field(default_factory=_Average)  # of steps with drafts
    drafts: _Average = field(default_factory=_Average)  # drafts in steps with drafts
    plain_left: int = _PLAIN_TRIES  # steps still to be made without drafts
    off_steps: int = _FIRST_OFF_STEPS
    num_on: int = 0

    @property
    def gain(self) -> float:
        """Tokens per second with drafts, divided by the rate without drafts; 1.0 if unknown."""
        if not (self.plain_seconds.count and self.seconds.count and self.seconds.value):
            return 1.0
        return self.tokens.value * self.plain_seconds.value / self.seconds.value

    def break_even(self, num_requests: int) -> float:
        """Return the fraction of drafts that must be accepted for drafts to save time."""
        plain = self.plain_seconds.value
        if not (plain and self.drafts.count and self.drafts.value):
            return _UNKNOWN_BREAK_EVEN
        of_draft = (self.draft_seconds.value - plain) / self.drafts.value
        share = of_draft * num_requests / plain
        return min(max(share, _LEAST_BREAK_EVEN), _MOST_BREAK_EVEN)


@dataclass(slots=True, eq=False)
class Speculation:
    """Gives each request at most `most_drafts` drafts in a step; without `is_adaptive` always
    `most_drafts`. `looks_ahead`: the draft model writes K and V into pool slots, so a request needs
    these blocks before drafts are proposed. Called by the step thread only. Raises ValueError if
    `most_drafts` is below 1."""

    most_drafts: int
    is_adaptive: bool = True
    looks_ahead: bool = False
    num_drafts: int = 0  # number of (step, request) pairs with drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)  # by place in the step
    num_pauses: int = 0
    num_switched_off: int = 0
    _paces: dict[int, _Pace] = field(default_factory=dict)
    _num_running: int = 1
    _num_begun: int = 0  # requests that have begun
    _num_vain: int = 0  # judgements since the last good one that paused a request
    _is_on: bool = True

    def __post_init__(self) -> None:
        if self.most_drafts < 1:
            raise ValueError(f"speculation needs at least one draft a step, not {self.most_drafts}")
        self.accepted_at = [0] * self.most_drafts

    def begin_step(self, num_running: int) -> None:
        """Prepare for the scheduling of a step with `num_running` requests."""
        self._num_running = num_running
        if not self.is_adaptive:
            return
        pace = self._pace
        self._is_on = pace.plain_left == 0
        if pace.plain_left:
            pace.plain_left -= 1

    def most_drafts_of(self, request: Request) -> int:
        """Return how many drafts the worker may propose after the request's next token."""
        # The answer's last token is never computed, so a draft for its position is useless.
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
        """Record that a step accepted `num_accepted` of a request's `num_drafts` drafts."""
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
        """Pause the drafts of a request if too few are accepted."""
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
        """Record a step that took the worker `seconds`. Only decode-only steps count."""
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
        """Return counters since the start, and the gain by batch size, in a form for JSON."""
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
        """The measurements for the current number of running requests."""
        size = max(self._num_running - 1, 0).bit_length()
        pace = self._paces.get(size)
        if pace is None:
            pace = self._paces[size] = _Pace()
        return pace
