# SPDX-License-Identifier: Apache-2.0
"""The ledger: what the cache has saved, in seconds of prefill, so that it can be held against what
its loads have cost.

    saved += tokens that were not computed  x  seconds that computing a prompt token takes now

The price of a token is measured, from steps that computed at least `MIN_PROMPT_TOKENS` of prompts.
A step may also have advanced requests by one token each. What a step of as many such rows takes
alone is known from steps that did nothing else (by powers of two of their number) and is taken
off; where no such step was seen yet, the mixed step is not used. Prices are moving averages over
about `MEMORY_STEPS` steps, prompt steps weighted by their tokens. Until there is a price nothing is
credited, and what was found until then never will be.

The price is that of a token of an average late prompt. A token far into a long one costs more, so
what is saved on long prompts is understated where short ones are computed. Knows nothing of how
tokens are found or computed.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..scheduler.output import SchedulerOutput

MIN_PROMPT_TOKENS = 32
MEMORY_STEPS = 32
_KEPT = 1.0 - 1.0 / MEMORY_STEPS  # of what is known, when something is added

REUSED = "reused_tokens_"  # what the scheduler's counts of such tokens begin with


class Ledger:
    """Told of every step. All figures are in seconds."""

    def __init__(self) -> None:
        self._prompt_seconds = 0.0
        self._prompt_tokens = 0.0
        self._row_seconds: dict[int, float] = {}  # of a step without prompts, by log2 of its rows
        self._credited: dict[str, float] = {}  # tokens, by the scheduler's count
        self.saved_seconds: dict[str, float] = {}  # by source

    @property
    def seconds_per_token(self) -> float | None:
        """The price of computing one token of a prompt; None while none was measured."""
        return self._prompt_seconds / self._prompt_tokens if self._prompt_tokens else None

    def measure(self, step: SchedulerOutput, seconds: float) -> None:
        """A step took so long to compute."""
        num_rows = len(step.num_scheduled_tokens)
        num_tokens = step.total_num_scheduled_tokens
        if num_tokens == num_rows:
            if num_rows:
                self._measure_rows(num_rows, seconds)
            return
        num_rows = list(step.num_scheduled_tokens.values()).count(1)
        num_tokens -= num_rows
        if num_tokens < MIN_PROMPT_TOKENS:
            return
        if num_rows:
            alone = self._row_seconds.get(num_rows.bit_length())
            if alone is None:
                return
            seconds = max(0.0, seconds - alone)
        self._prompt_seconds = self._prompt_seconds * _KEPT + seconds
        self._prompt_tokens = self._prompt_tokens * _KEPT + num_tokens

    def credit(self, counts: Mapping[str, float]) -> None:
        """Enter what the scheduler has counted since the last call."""
        price = self.seconds_per_token
        for name, num_tokens in counts.items():
            if name.startswith(REUSED):
                gained = num_tokens - self._credited.get(name, 0)
                if gained:
                    self._credited[name] = num_tokens
                    if price is not None:
                        source = name.removeprefix(REUSED)
                        known = self.saved_seconds.get(source, 0.0)
                        self.saved_seconds[source] = known + gained * price

    def _measure_rows(self, num_rows: int, seconds: float) -> None:
        size = num_rows.bit_length()
        known = self._row_seconds.get(size, seconds)
        self._row_seconds[size] = known + (seconds - known) / MEMORY_STEPS
