# SPDX-License-Identifier: Apache-2.0
"""Faults of stores: counted by reason, and what follows from them for asking a store again.

Every fault becomes a miss somewhere; here it is counted, and one of the store's two breakers is
told: what reads may go on where writes hang. A store that is busy or that refuses a block is not
broken. Knows nothing of what a caller did with the answer. Used by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..base import Answer, StoreTier, TierStats
from ..block import KEY_BYTES
from ..errors import TierBusy
from .breaker import Breaker
from .traffic import Traffic

LATE = "late"
LATE_WRITE = "late_write"
# Of blocks, and no sign that the store is broken: it would not keep them; the slab's bytes were not
# what came with them; what was read was stored as another block.
REFUSED, DAMAGED, WRONG_TAG = "refused", "damaged_in_slab", "wrong_tag"


class Faults:
    """How often each store failed and why, and whether to ask it now."""

    def __init__(self, stores: Sequence[StoreTier] = ()) -> None:
        self._times: dict[str, dict[str, int]] = {}
        self.breakers = {store.name: Breaker() for store in stores}
        self.write_breakers = {store.name: Breaker() for store in stores}
        # Of each store the last keys that it said it had, or that it was asked for: for probes.
        self._known: dict[str, Sequence[bytes]] = {}

    def count(
        self, store: StoreTier, reason: str | Exception, times: int = 1, *, writing: bool = False
    ) -> None:
        """Note a fault; an exception counts under the name of its class."""
        name = name_of(reason)
        reasons = self._times.setdefault(store.name, {})
        reasons[name] = reasons.get(name, 0) + times
        breaker = (self.write_breakers if writing else self.breakers)[store.name]
        if reason == LATE:
            breaker.was_late()
        elif reason == LATE_WRITE:
            breaker.hung()
        elif reason not in (REFUSED, DAMAGED, WRONG_TAG) and not isinstance(reason, TierBusy):
            breaker.failed()

    def allows(self, store: StoreTier) -> bool:
        """Whether to ask the store for something."""
        return self.breakers[store.name].allows

    def attempt(
        self, store: StoreTier, call: Callable[[], object], *, writing: bool = False
    ) -> None:
        """Have the store do something. That it failed is counted, and has no other consequence."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - any fault of a store is counted, none spreads
            self.count(store, error, writing=writing)

    def add_to(self, stats: dict[str, TierStats]) -> None:
        """Add the counts to the `errors` of each store's statistics."""
        for store_name, reasons in self._times.items():
            errors = stats[store_name].errors
            for reason, times in reasons.items():
                errors[reason] = errors.get(reason, 0) + times

    def show(self, store_name: str, traffic: Traffic) -> None:
        """Note there how the store's breakers are now."""
        breaker, write_breaker = self.breakers[store_name], self.write_breakers[store_name]
        traffic.breaker, traffic.breaker_opened = breaker.state.value, breaker.times_opened
        traffic.write_breaker = write_breaker.state.value
        traffic.write_breaker_opened = write_breaker.times_opened

    def lookup(self, store: StoreTier, keys: Sequence[bytes]) -> list[Answer]:
        """The store's answers; all misses where it fails, which is a fault, or is not asked."""
        if not self.allows(store):
            return [Answer.MISS] * len(keys)
        try:
            answers = store.lookup(keys)
            check_answers(answers, keys)
        except Exception as error:  # noqa: BLE001 - any fault of a store is a counted miss
            self._known.setdefault(store.name, keys)
            self.count(store, error)
            return [Answer.MISS] * len(keys)
        if Answer.HIT in answers:
            self._known[store.name] = keys
        return answers

    def key_to_probe(self, store: StoreTier) -> bytes:
        """A block that the store should have, if there is one. Asks the store, and raises what it
        raises."""
        keys = self._known.get(store.name, ())
        answers = store.lookup(keys)
        check_answers(answers, keys)
        # The last one: those before it were asked for first, and may have been lost in the fault.
        found = (key for key, a in zip(keys[::-1], answers[::-1], strict=True) if a is Answer.HIT)
        return next(found, keys[-1] if keys else bytes(KEY_BYTES))


def check_answers(answers: Sequence[object], keys: Sequence[bytes]) -> None:
    """Raise ValueError unless there is one for each key."""
    if len(answers) != len(keys):
        raise ValueError(f"{len(answers)} answers to {len(keys)} keys")


def name_of(reason: str | Exception) -> str:
    """A reason in one word."""
    return type(reason).__name__ if isinstance(reason, Exception) else reason
