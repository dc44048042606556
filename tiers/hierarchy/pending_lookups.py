# SPDX-License-Identifier: Apache-2.0
"""Questions to stores that must ask elsewhere, and whether they are answered.

A store that is far away knows of a block only after it asked, so it is told of a prompt's blocks as
soon as the prompt is queued. Knows nothing of what the answers are; `lookup` says them. Used by one
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from ..base import StoreTier
from .completions import Deliver
from .faults import Faults


class Asking:
    """The open questions to each store. `answered` is called, by the thread that takes completions,
    after each question that was answered."""

    def __init__(
        self,
        stores: Sequence[StoreTier],
        faults: Faults,
        deliver: Deliver,
        answered: Callable[[], None],
    ) -> None:
        self._stores = stores
        self._faults = faults
        self._deliver = deliver
        self._answered = answered
        self._open = {store.name: 0 for store in stores}

    def ask(self, keys: Sequence[bytes]) -> bool:
        """Tell the stores that a prompt with these blocks was queued, head first. Whether any of
        them has to ask elsewhere."""
        is_open = False
        for store in self._stores:
            if not self._faults.allows(store):
                continue
            try:
                future = store.ask(keys)
                when_done = None if future is None else future.add_done_callback
            except Exception as error:  # noqa: BLE001 - any fault of a store is a counted miss
                self._faults.count(store, error)
                continue
            if when_done is not None:
                is_open = True
                self._open[store.name] += 1
                when_done(partial(self._ended, store))
        return is_open

    def is_open(self, store: StoreTier) -> bool:
        """Whether the store has been asked something that it has not answered."""
        return self._open[store.name] > 0

    def _ended(self, store: StoreTier, future: Future[None]) -> None:
        """From any thread."""

        def take() -> None:
            self._open[store.name] -= 1
            error = None if future.cancelled() else future.exception()
            if isinstance(error, Exception):
                self._faults.count(store, error)
            self._answered()

        self._deliver(take)
