# SPDX-License-Identifier: Apache-2.0
"""Faults of stores: counted by reason, and what follows from them for asking a store again.

Every fault becomes a miss somewhere; here it is counted, and the store's breaker is told. A store
that is busy or that refuses a block is not broken. Knows nothing of what a caller did with the
answer. Used by one thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Answer, StoreTier, TierStats
from .breaker import Breaker
from .errors import TierBusy

LATE = "late"
REFUSED = "refused"  # blocks that a store would not keep


class Faults:
    """How often each store failed and why, and whether to ask it now."""

    def __init__(self, stores: Sequence[StoreTier] = ()) -> None:
        self._times: dict[str, dict[str, int]] = {}
        self.breakers = {store.name: Breaker() for store in stores}

    def count(self, store: StoreTier, reason: str | Exception, times: int = 1) -> None:
        """Note a fault; an exception counts under the name of its class."""
        name = type(reason).__name__ if isinstance(reason, Exception) else reason
        reasons = self._times.setdefault(store.name, {})
        reasons[name] = reasons.get(name, 0) + times
        if reason == LATE:
            self.breakers[store.name].was_late()
        elif reason != REFUSED and not isinstance(reason, TierBusy):
            self.breakers[store.name].failed()

    def allows(self, store: StoreTier) -> bool:
        """Whether to ask the store."""
        return self.breakers[store.name].allows

    def began(self, store: StoreTier) -> None:
        """The store was asked to load or store something."""
        self.breakers[store.name].began()

    def succeeded(self, store: StoreTier) -> None:
        """The store did what it was asked."""
        self.breakers[store.name].succeeded()

    def add_to(self, stats: dict[str, TierStats]) -> None:
        """Add the counts to the `errors` of each store's statistics."""
        for store_name, reasons in self._times.items():
            errors = stats[store_name].errors
            for reason, times in reasons.items():
                errors[reason] = errors.get(reason, 0) + times

    def lookup(self, store: StoreTier, keys: Sequence[bytes]) -> list[Answer]:
        """The store's answers; all misses where it fails, which is a fault, or is not asked."""
        if not self.allows(store):
            return [Answer.MISS] * len(keys)
        try:
            answers = store.lookup(keys)
            if len(answers) != len(keys):
                raise ValueError(f"{len(answers)} answers to {len(keys)} keys")
        except Exception as error:  # noqa: BLE001 - any fault of a store is a counted miss
            self.count(store, error)
            return [Answer.MISS] * len(keys)
        return answers
