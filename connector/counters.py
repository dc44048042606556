# SPDX-License-Identifier: Apache-2.0
"""What the connector has moved and what went wrong, in plain numbers since start.

Knows nothing of where the numbers are shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .base import LoadReport


@dataclass(slots=True)
class OffloadCounters:
    """Counts since start."""

    loads: int = 0  # that brought at least one block
    stores: int = 0  # copy jobs
    stored_blocks: int = 0
    seconds_loaded: float = 0.0  # parked time of loads that brought something
    tokens_loaded: dict[str, int] = field(default_factory=dict)  # by tier
    failures: dict[str, int] = field(default_factory=dict)  # by reason

    def count_failure(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def count_load(self, report: LoadReport) -> None:
        if not report.num_loaded_tokens:
            return
        self.loads += 1
        self.seconds_loaded += report.seconds
        for tier, tokens in report.tokens_by_tier.items():
            self.tokens_loaded[tier] = self.tokens_loaded.get(tier, 0) + tokens
