# SPDX-License-Identifier: Apache-2.0
"""Estimates the seconds of prefill that the cache has saved, for comparison with the cost of loads.

    saved += tokens that were not computed  x  seconds per prompt token at their positions now

The seconds per token are measured in steps that computed at least `MIN_PROMPT_TOKENS` of prompts,
and depend on the position of the token in its prompt. A step with prompts may also decode one token
for each of some other requests. The seconds for these decode rows, known from steps without prompts
(by powers of two of the number of rows), are subtracted. Before such a step without prompts was
measured, a mixed step is not used. Tokens saved before the first measurement do not count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...connector.costs.rates import MEMORY_STEPS, PrefillRate
from ..scheduler.output import SchedulerOutput

MIN_PROMPT_TOKENS = 32

# Prefixes of the scheduler's counts: reused tokens, and the sums of their positions.
REUSED, POSITIONS = "reused_tokens_", "reused_positions_"


class PromptCost(NamedTuple):
    """The cost of the prompts in one step: the arguments of `PrefillRate.record_prefill`."""

    num_tokens: int
    num_context_tokens: int
    seconds: float


class PrefillSavings:
    """The seconds of prefill saved. `measure` must be called for every step. `rate` stores the
    measured cost of computing; other parts may read it."""

    def __init__(self, rate: PrefillRate | None = None) -> None:
        self._rate = PrefillRate() if rate is None else rate
        self._row_seconds: dict[int, float] = {}  # of a step without prompts, by log2 of its rows
        self._recorded: dict[str, float] = {}  # last value of each of the scheduler's counts
        self.saved_seconds: dict[str, float] = {}  # saved seconds by source (`pool` or a tier)

    @property
    def seconds_per_token(self) -> float | None:
        """The seconds for an average prompt token; None before the first measurement."""
        return self._rate.seconds_per_token

    def measure(self, step: SchedulerOutput, seconds: float) -> PromptCost | None:
        """Measure a step that took `seconds`. Return the cost of its prompts, or None if it is
        unknown."""
        num_rows = len(step.num_scheduled_tokens)
        num_tokens = step.total_num_scheduled_tokens
        if step.draft_token_ids:
            return None  # draft tokens are not prompt tokens, and take longer than a decode
        if num_tokens == num_rows:
            if num_rows:
                self._measure_rows(num_rows, seconds)
            return None
        num_rows = list(step.num_scheduled_tokens.values()).count(1)
        num_tokens -= num_rows
        if num_tokens < MIN_PROMPT_TOKENS:
            return None
        if num_rows:
            alone = self._row_seconds.get(num_rows.bit_length())
            if alone is None:
                return None
            seconds = max(0.0, seconds - alone)
        cost = PromptCost(num_tokens, _context_of(step), seconds)
        self.record_cost(cost)
        return cost

    def record_cost(self, cost: PromptCost) -> None:
        """Record the cost of prompts computed outside of steps, which `measure` does not record."""
        self._rate.record_prefill(*cost)

    def add_counts(self, counts: Mapping[str, float]) -> None:
        """Add the savings since the last call, from the increase of the scheduler's counters."""
        for name in counts:
            if name.startswith(REUSED):
                source = name.removeprefix(REUSED)
                gained = self._gained(counts, name)
                positions = self._gained(counts, POSITIONS + source)
                price = self._rate.price_at(positions / gained) if gained else None
                if price is not None:
                    known = self.saved_seconds.get(source, 0.0)
                    self.saved_seconds[source] = known + gained * price

    def _gained(self, counts: Mapping[str, float], name: str) -> float:
        count = counts.get(name, 0.0)
        gained = count - self._recorded.get(name, 0.0)
        self._recorded[name] = count
        return gained

    def _measure_rows(self, num_rows: int, seconds: float) -> None:
        size = num_rows.bit_length()
        known = self._row_seconds.get(size, seconds)
        self._row_seconds[size] = known + (seconds - known) / MEMORY_STEPS


def _context_of(step: SchedulerOutput) -> int:
    """Return the number of tokens before each prompt token, summed over the step's prompt
    tokens."""
    cached = step.cached_requests
    starts = dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
    starts.update((new.request_id, new.num_computed_tokens) for new in step.new_requests)
    return sum(
        count * starts[request_id] + count * (count - 1) // 2
        for request_id, count in step.num_scheduled_tokens.items()
        if count > 1
    )
