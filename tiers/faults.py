# SPDX-License-Identifier: Apache-2.0
"""Faults of stores, counted by reason: what becomes of an error that ends as a miss.

Knows nothing of what a caller did with the answer. Used by one thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Answer, StoreTier, TierStats


class Faults:
    """How often each store failed, and why."""

    def __init__(self) -> None:
        self._times: dict[str, dict[str, int]] = {}

    def count(self, store: StoreTier, reason: str | Exception, times: int = 1) -> None:
        """Note a fault; an exception counts under the name of its class."""
        name = type(reason).__name__ if isinstance(reason, Exception) else reason
        reasons = self._times.setdefault(store.name, {})
        reasons[name] = reasons.get(name, 0) + times

    def add_to(self, stats: dict[str, TierStats]) -> None:
        """Add the counts to the `errors` of each store's statistics."""
        for store_name, reasons in self._times.items():
            errors = stats[store_name].errors
            for reason, times in reasons.items():
                errors[reason] = errors.get(reason, 0) + times

    def lookup(self, store: StoreTier, keys: Sequence[bytes]) -> list[Answer]:
        """The store's answers; all misses, and a fault, where it fails."""
        try:
            answers = store.lookup(keys)
            if len(answers) != len(keys):
                raise ValueError(f"{len(answers)} answers to {len(keys)} keys")
        except Exception as error:  # noqa: BLE001 - any fault of a store is a counted miss
            self.count(store, error)
            return [Answer.MISS] * len(keys)
        return answers
