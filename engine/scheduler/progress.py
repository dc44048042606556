# SPDX-License-Identifier: Apache-2.0
"""The scheduler's notes on one request: what ends it, and the moments its latency is made of.

Knows nothing of queues or blocks. Moments are seconds on the monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..request import Request


@dataclass(slots=True)
class Progress:
    """From arrival to end; None where a moment has not come."""

    end_ids: frozenset[int]
    scheduled: float | None = None
    first_token: float | None = None
    load_seconds: float = 0.0

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
