# SPDX-License-Identifier: Apache-2.0
"""The scheduler's notes on one request: what ends it, the moments its latency is made of, and what
it had computed or loaded before.

Moments are seconds on the monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..request import Request


@dataclass(slots=True)
class Progress:
    """From arrival to end; None where a moment has not come."""

    end_ids: frozenset[int]
    scheduled: float | None = None
    first_token: float | None = None
    load_seconds: float = 0.0
    # What its last load brought, by tier, until it runs.
    loaded_by_tier: dict[str, int] = field(default_factory=dict)
    # The leading tokens that were there, or that a tier had promised, and why they may be missing.
    lost_tokens: int = 0
    lost_cause: str = ""

    def lose(self, num_tokens: int, cause: str) -> None:
        """The first `num_tokens` tokens may have to be computed again."""
        if num_tokens >= self.lost_tokens:
            self.lost_tokens, self.lost_cause = num_tokens, cause

    def timings(self, request: Request, now: float) -> dict[str, float]:
        """What the last output reports, in seconds (and the number of preemptions).

        A request that ended before a moment spent all its time in the stage before it. Loads of a
        request that waits for them are part of `queue_seconds`.
        """
        arrival = request.arrival_seconds
        scheduled = now if self.scheduled is None else self.scheduled
        first_token = now if self.first_token is None else self.first_token
        return {
            "queue_seconds": scheduled - arrival,
            "prefill_seconds": first_token - scheduled,
            "decode_seconds": now - first_token,
            "load_seconds": self.load_seconds,
            "first_token_seconds": first_token - arrival,
            "total_seconds": now - arrival,
            "num_preemptions": float(request.num_preemptions),
        }
