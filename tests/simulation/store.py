# SPDX-License-Identifier: Apache-2.0
"""A simulated store in virtual time: slow, hung, broken, forgetful and damaged by turns.

It keeps the promise of `StoreTier` as a broken disk or server would: a HIT is the bytes that were
stored, whatever else it does to the buffers before the future ends. It notes when those who use it
break theirs.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from stratakv.tiers.base import Answer, Stored, StoreTier, TierStats
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.errors import TierBusy, TierClosed, TierError
from stratakv.tiers.tag import Proof, Proofs, Tagger

from .clock import VirtualClock

# How a store is at a time; what a mode does to a call is drawn anew for each.
# What a store that hangs was asked goes on when it is back; of one that lost it, it does not.
MODES = ("up", "slow", "hung", "lost", "down", "flaky", "full", "damaged")
SOON_SECONDS, SLOW_SECONDS = 0.003, 0.6
ASK_SECONDS = 0.1  # after which a question has no answer
FLAKY = 0.3  # of the calls


@dataclass(eq=False)
class _Call:
    """A load or store that has not ended."""

    future: Future[Any]
    finish: Callable[[], None]


class SimStore(StoreTier):
    """`may_hold` tells what a key may hold; `wrong` takes notes of what must not happen. One that
    is shared knows of a block only after it stored it, or was asked about it."""

    def __init__(
        self,
        name: str,
        layout: BlockLayout,
        num_blocks: int,
        clock: VirtualClock,
        rng: random.Random,
        may_hold: Callable[[bytes, bytes], bool],
        wrong: list[str],
        *,
        is_shared: bool = False,
    ) -> None:
        self.name = name
        self.layout = layout
        self._tagger = Tagger(layout.layout_id(), layout.page_bytes)
        self.is_shared = is_shared
        self.mode = "up"
        self.log: list[str] = []
        self._num_blocks = num_blocks
        self._clock = clock
        self._rng = rng
        self._may_hold = may_hold
        self._wrong = wrong
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._open: dict[Future[Any], _Call] = {}
        self._hung: list[_Call] = []
        self._lost: list[_Call] = []
        self._known: set[bytes] = set()
        self._asked: Counter[bytes] = Counter()
        self._closed = False

    def set_mode(self, mode: str) -> None:
        """From now on; what hung until now goes on."""
        self.mode = mode
        if mode != "hung":
            hung, self._hung = self._hung, []
            for call in hung:
                self._end_later(call)

    def give_up_lost(self) -> None:
        """What was lost ends at last, as everything must."""
        lost, self._lost = self._lost, []
        for call in lost:
            if self._open.pop(call.future, None) is not None:
                call.future.set_exception(TierError("the answer was lost"))

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        self._maybe_raise("lookup")
        answers = [self._answer(key) for key in keys]
        if self.mode == "flaky" and self._happens():
            return answers[:-1]  # makes no sense, and must be taken for a fault
        if self.mode == "damaged":  # has forgotten what it had, or is not sure
            return [self._rng.choice([Answer.MISS, Answer.PENDING, answer]) for answer in answers]
        return answers

    def prefetch_lookup(self, keys: Sequence[bytes]) -> Future[None] | None:
        new = [key for key in keys if key not in self._known and key not in self._asked]
        if not self.is_shared or not new:
            return None
        self._maybe_raise("question")
        self._asked.update(new)
        future: Future[None] = Future()
        answers = self.mode not in ("hung", "lost")

        def finish() -> None:
            self._asked.subtract(new)
            self._asked = +self._asked
            if answers and self.mode != "down":
                self._known.update(new)
                future.set_result(None)
            else:
                future.set_exception(TierError("no answer in time"))

        soon = min(ASK_SECONDS, SLOW_SECONDS if self.mode == "slow" else SOON_SECONDS)
        self._clock.after(self._rng.uniform(0.0, soon) if answers else ASK_SECONDS, finish)
        return future

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        self._maybe_raise("load")
        for buffer in buffers:
            self._scribble(buffer)  # a read that has begun
        return self._begin("load", lambda: self._load_now(keys, buffers))

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        self._maybe_raise("store")
        if self.mode == "full":
            raise TierBusy("the queue is full")
        given = [self._page(buffer) for buffer in buffers]
        for key, page in zip(keys, given, strict=True):
            if not self._may_hold(key, page):
                self._wrong.append(f"{self.name} was given wrong bytes of {key[:4].hex()}")
        return self._begin("store", lambda: self._store_now(keys, buffers, given))

    def drop(self, keys: Sequence[bytes]) -> int:
        self._maybe_raise("drop")
        return sum(self._blocks.pop(key, None) is not None for key in keys)

    def clear(self) -> None:
        self._blocks.clear()
        self._known.clear()
        self._maybe_raise("clear")

    def stats(self) -> TierStats:
        size = self.layout.page_bytes
        return TierStats(
            capacity_bytes=self._num_blocks * self.layout.slot_bytes * 2,
            used_bytes=len(self._blocks) * size,
            blocks=len(self._blocks),
        )

    def close(self, timeout_seconds: float) -> None:
        self._closed = True
        for call in list(self._open.values()):
            del self._open[call.future]
            call.future.set_exception(TierClosed(f"the {self.name} tier was closed"))

    def _begin(self, what: str, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def finish() -> None:
            if self._open.pop(future, None) is None:
                return  # closed before
            if self.mode == "flaky" and self._happens():
                self.log.append(f"{self.name} lost a {what}")
                future.set_exception(TierError("the answer was lost"))
                return
            future.set_result(work())

        call = self._open[future] = _Call(future, finish)
        if self.mode == "hung":
            self._hung.append(call)
        elif self.mode == "lost":
            self._lost.append(call)
        else:
            self._end_later(call)
        return future

    def _end_later(self, call: _Call) -> None:
        most = SLOW_SECONDS if self.mode == "slow" else SOON_SECONDS
        # Some end at once, on the thread of the caller.
        seconds = self._rng.uniform(0.0, most) if self._rng.random() < 0.9 else 0.0
        if seconds:
            self._clock.after(seconds, call.finish)
        else:
            call.finish()

    def _answer(self, key: bytes) -> Answer:
        if self.is_shared and key not in self._known:
            return Answer.PENDING if key in self._asked else Answer.MISS
        return Answer.HIT if key in self._blocks else Answer.MISS

    def _load_now(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Proof | None]:
        answers: list[Proof | None] = []
        for key, buffer in zip(keys, buffers, strict=True):
            page = self._blocks.get(key)
            bad = self.mode == "damaged" and self._rng.random() < 0.5
            if page is None or bad:
                self._scribble(buffer)  # read, found damaged, and forgotten
                self._blocks.pop(key, None)
                answers.append(None)
            else:
                buffer[: len(page)] = page
                self._blocks.move_to_end(key)
                answers.append(self._tagger.prove(key, page))
        if self.mode == "flaky" and self._happens():
            return answers[:-1]
        return answers

    def _store_now(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], given: Sequence[bytes]
    ) -> list[Stored]:
        kept = []
        for key, buffer, page in zip(keys, buffers, given, strict=True):
            if self._page(buffer) != page:
                self._wrong.append(f"a slot changed while {self.name} was writing it down")
            keeps = self.mode != "damaged" or self._rng.random() < 0.5
            if keeps:
                self._keep(key, page)
            kept.append(Stored.KEPT if keeps else Stored.REFUSED)
        return kept

    def _keep(self, key: bytes, page: bytes) -> None:
        self._blocks[key] = page
        self._known.add(key)
        self._blocks.move_to_end(key)
        if len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)

    def _maybe_raise(self, what: str) -> None:
        if self._closed:
            raise TierClosed(f"the {self.name} tier was closed")
        if self.mode == "down" or (self.mode == "flaky" and self._happens()):
            self.log.append(f"{self.name} refused a {what}")
            raise self._rng.choice([TierError("broken"), OSError("no such device"), TierBusy("no")])

    def _happens(self) -> bool:
        return self._rng.random() < FLAKY

    def _page(self, buffer: memoryview) -> bytes:
        return bytes(buffer[: self.layout.page_bytes])

    def _scribble(self, buffer: memoryview) -> None:
        buffer[: self.layout.page_bytes] = self._rng.randbytes(self.layout.page_bytes)
