# SPDX-License-Identifier: Apache-2.0
"""A store that has to ask elsewhere: it knows of a block only after it was told of the prompt.

The test gives the answers: `answer()` with what is there, `fail()` without. Kept in memory
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from stratakv.tiers.base import Answer
from stratakv.tiers.errors import TierError
from stratakv.tiers.testing.memory_store import MemoryStore


class PrefetchingStore(MemoryStore):
    """`questions` are those without an answer, in their order."""

    is_shared = True

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.questions: list[tuple[list[bytes], Future[None]]] = []
        self._known: set[bytes] = set()

    def prefetch_lookup(self, keys: Sequence[bytes]) -> Future[None] | None:
        open_now = {key for asked, _ in self.questions for key in asked}
        unknown = [key for key in keys if key not in self._known and key not in open_now]
        if not unknown:
            return None
        self.questions.append((unknown, Future()))
        return self.questions[-1][1]

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        open_now = {key for asked, _ in self.questions for key in asked}
        return [
            Answer.PENDING if key in open_now
            else answer if key in self._known or answer is not Answer.HIT
            else Answer.MISS
            for key, answer in zip(keys, super().lookup(keys), strict=True)
        ]  # fmt: skip

    def answer(self) -> None:
        """The oldest question."""
        keys, future = self.questions.pop(0)
        self._known.update(keys)
        future.set_result(None)

    def fail(self) -> None:
        """The oldest question has no answer."""
        _, future = self.questions.pop(0)
        future.set_exception(TierError("the server did not answer in time"))
