# SPDX-License-Identifier: Apache-2.0
"""What computing a prompt costs in vLLM, as far as a tier can see it.

A tier is told which requests a step has scheduled first, and later gets the chunks that were
computed for them. The time between the two is that of the step, and of what brought the chunks into
memory: a little more than computing took, so that loading is chosen a little too often rather than
too seldom.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..rates import PrefillRate

MAX_STEPS = 64  # whose chunks have not come yet


@dataclass(slots=True, eq=False)
class _Step:
    began: float
    requests: set[str]
    num_tokens: int = 0
    num_context_tokens: int = 0
    ended: float = 0.0


class PrefillMeter:
    """Tells `rate` of steps."""

    def __init__(self, rate: PrefillRate, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._steps: list[_Step] = []

    def scheduled(self, request_ids: Collection[str]) -> None:
        """A step has been scheduled, and these requests are in one for the first time. Call it once
        for each step."""
        self._note()
        if request_ids:
            self._steps.append(_Step(self._clock(), set(request_ids)))
            del self._steps[:-MAX_STEPS]

    def stored(self, request_id: str, ends: Sequence[int], chunk_tokens: int) -> None:
        """Chunks of a request have been computed, each up to the token in `ends`."""
        for step in self._steps:
            if request_id in step.requests and ends:
                step.requests.remove(request_id)
                step.ended = self._clock()
                first, last = max(0, min(ends) - chunk_tokens), max(ends)
                step.num_tokens += last - first
                step.num_context_tokens += (first + last - 1) * (last - first) // 2
                return

    def _note(self) -> None:
        told = [step for step in self._steps if step.num_tokens]
        for step in told:
            seconds = step.ended - step.began
            self._rate.note(step.num_tokens, step.num_context_tokens, seconds)
            self._steps.remove(step)
