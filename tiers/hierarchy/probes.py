# SPDX-License-Identifier: Apache-2.0
"""Probes: a store whose breaker is open is asked for one block now and then, for nobody.

What is read goes to memory of the probe's own, which a store that hangs may keep: slots of the slab
would be missing. The answer says whether the store works; what it was is dropped. Knows nothing of
loads or of writes, which a write-back probes with a block that it has to write anyway.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ..base import StoreTier
from ..tag import Proof
from .completions import Deliver
from .faults import Faults, check_answers


class Probes:
    """Of the stores' reads. `set_alarm` is asked to have `run` called at a moment. Called by one
    thread."""

    def __init__(
        self,
        stores: Sequence[StoreTier],
        faults: Faults,
        *,
        deliver: Deliver,
        set_alarm: Callable[[float], None],
    ) -> None:
        self._stores = stores
        self._faults = faults
        self._deliver = deliver
        self._set_alarm = set_alarm
        self._announced: dict[str, float] = {}  # the alarm that is set for each store

    def run(self) -> None:
        """Begin the probes that are due."""
        for store in self._stores:
            breaker = self._faults.breakers[store.name]
            if breaker.allows:
                continue
            if breaker.probe_due:
                self._begin(store)
            moment = breaker.probes_at
            if moment is not None and moment != self._announced.get(store.name):
                self._announced[store.name] = moment
                self._set_alarm(moment)

    def _begin(self, store: StoreTier) -> None:
        breaker = self._faults.breakers[store.name]
        breaker.probe_began()
        try:
            key = self._faults.key_to_probe(store)
            buffer = memoryview(mmap.mmap(-1, store.layout.slot_bytes))
            future = store.load([key], [buffer])
        except Exception as error:  # noqa: BLE001 - any fault of a store is counted, none spreads
            self._fail(store, error)
            return
        future.add_done_callback(lambda done: self._deliver(lambda: self._ended(store, done)))

    def _ended(self, store: StoreTier, future: Future[list[Proof | None]]) -> None:
        try:
            check_answers(future.result(timeout=0), [b""])
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(store, error)
        else:
            self._faults.breakers[store.name].probe_ended(answered=True)

    def _fail(self, store: StoreTier, error: Exception) -> None:
        self._faults.count(store, error)
        self._faults.breakers[store.name].probe_ended(answered=False)
