# SPDX-License-Identifier: Apache-2.0
"""FaultyStore: a wrapper of any store that adds seeded faults, for tests and drills.

A drill checks that a broken tier causes misses and nothing else. So the wrapper keeps the contract
of `StoreTier`: a HIT still means the exact bytes, and buffers are used only until the future ends.
`fault_plan.py` lists the kinds of faults, which do not include damage to bytes on a disk."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..base import NO_CONTEXT, Answer, RequestContext, Stored, StoreTier, TierStats, load_for
from ..errors import InvalidBlock, TierBusy, TierClosed, TierConfigError, TierError
from ..forwarding_store import ForwardingStore
from ..mailbox import Alarm
from ..tag import Proof, Proofs
from .fault_plan import BATCHES, CALLS, MAX_DELAY_SECONDS, FaultPlan, parse_faults, parse_rule

MAX_SEED = 2**63 - 1
_SEED = "seed="

REORDER_SECONDS = 0.1  # the longest time for which a completion is held back

_T = TypeVar("_T")


class InjectedFault(TierError):
    """The error of a call that the plan makes fail."""


class _Batch(Generic[_T]):
    """A load or store with chosen faults, from the call to the end of the future."""

    def __init__(self, call: str, count: int, chosen: list[int], nothing: _T) -> None:
        self.call = call
        self.chosen = chosen  # positions passed on; others get the answer `nothing`
        self.fails = False
        self.stands_back = False
        self.part: Future[list[_T]] | None = None  # the inner call, once begun
        self.future: Future[list[_T]] = Future()
        self.future.set_running_or_notify_cancel()
        self._answers = [nothing] * count

    def resolve_future(self) -> None:
        """End the future with the result or error of the inner call."""
        assert self.part is not None
        error = self.part.exception(timeout=0)
        if error is not None:
            self.future.set_exception(error)
            return
        for index, answer in zip(self.chosen, self.part.result(timeout=0), strict=True):
            self._answers[index] = answer
        self.future.set_result(self._answers)


class FaultyStore(ForwardingStore):
    """The store `inner` with the faults of `plan`, which may be replaced at any time. Thread-safe.
    `close` closes `inner` too. The same seed and calls give the same faults. `stats().errors`
    counts each fault as `injected_<call>_<kind>`."""

    def __init__(self, inner: StoreTier, plan: FaultPlan, *, seed: int = 0) -> None:
        super().__init__(inner.name, inner.layout, inner)
        self.plan = plan
        self._random = random.Random(seed)  # noqa: S311 - chooses faults, keeps no secret
        self._lock = threading.Lock()  # guards the next fields
        self._calls = dict.fromkeys(CALLS, 0)
        self._counts: dict[str, int] = {}
        self._open: set[_Batch[Any]] = set()
        self._standing_back: dict[str, list[_Batch[Any]]] = {call: [] for call in BATCHES}
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # a heap by time
        self._num_delayed = 0
        self._closed = False
        self._alarm = Alarm(self._run_due)

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        with self._lock:
            fails = self._fails("lookup")
            missing = self._choose_missing("lookup", len(keys))
        if fails:
            raise InjectedFault("this look-up was to fail")
        answers = self.inner.lookup(keys)
        return [Answer.MISS if i in missing else answer for i, answer in enumerate(answers)]

    def load(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        context: RequestContext = NO_CONTEXT,
    ) -> Future[list[Proof | None]]:
        def load(chosen: Sequence[int]) -> Future[list[Proof | None]]:
            wanted, into = [keys[i] for i in chosen], [buffers[i] for i in chosen]
            return load_for(self.inner, wanted, into, context)

        return self._run("load", keys, buffers, load, None)

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        given = [None] * len(keys) if proofs is None else proofs

        def store(chosen: Sequence[int]) -> Future[list[Stored]]:
            return self.inner.store(
                [keys[i] for i in chosen],
                [buffers[i] for i in chosen],
                [given[i] for i in chosen],
            )

        return self._run("store", keys, buffers, store, Stored.REFUSED)

    def drop(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            fails = self._fails("drop")
        if fails:
            raise InjectedFault("this drop was to fail")
        return self.inner.drop(keys)

    def stats(self) -> TierStats:
        stats = self.inner.stats()
        with self._lock:
            stats.errors |= self._counts
        return stats

    def close(self, timeout_seconds: float) -> None:
        """See StoreTier. Calls that hang or have not begun end with TierClosed."""
        with self._lock:
            self._closed = True
        self._alarm.close()
        self.inner.close(timeout_seconds)
        with self._lock:
            # While the inner call runs, the buffers are in use.
            ended = [b for b in self._open if b.part is None or b.part.done()]
            self._open.difference_update(ended)
        for batch in ended:
            batch.future.set_exception(TierClosed(f"the {self.name} tier was closed"))

    def _run(
        self,
        call: str,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        begin: Callable[[Sequence[int]], Future[list[_T]]],
        nothing: _T,
    ) -> Future[list[_T]]:
        self._check_buffers(keys, buffers)
        with self._lock:
            if self._closed:
                raise TierClosed(f"the {self.name} tier was closed")
            fails = self._fails(call)
            if fails and self._random.random() < 0.5:
                raise InjectedFault(f"this {call} was to fail")
            if self._happens(call, "busy"):
                raise TierBusy(f"this {call} was to find a full queue")
            batch = _Batch(call, len(keys), self._choose(call, len(keys)), nothing)
            batch.fails = fails
            batch.stands_back = self._happens(call, "reorder")
            delay = self._choose_delay(call)
            self._open.add(batch)
            if self._happens(call, "hang"):
                return batch.future
        if delay is None:
            try:
                self._start_batch(batch, lambda: begin(batch.chosen))
            except BaseException:
                self._claim_batch(batch)
                raise
        else:
            self._later(delay, lambda: self._begin_late(batch, lambda: begin(batch.chosen)))
        return batch.future

    def _check_buffers(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """Raise InvalidBlock for wrong buffers at the call, even if the inner call begins later."""
        size = self.layout.page_bytes
        if len(keys) != len(buffers) or any(buffer.nbytes < size for buffer in buffers):
            raise InvalidBlock(
                f"every block takes a key and a buffer of {size} bytes; {len(keys)} keys came with "
                f"buffers of {[buffer.nbytes for buffer in buffers[:8]]}"
            )

    def _start_batch(self, batch: _Batch[_T], begin: Callable[[], Future[list[_T]]]) -> None:
        if not batch.fails:
            batch.part = begin()
            batch.part.add_done_callback(lambda _part: self._arrived(batch))
        elif self._claim_batch(batch):
            batch.future.set_exception(InjectedFault(f"this {batch.call} was to fail"))

    def _begin_late(self, batch: _Batch[_T], begin: Callable[[], Future[list[_T]]]) -> None:
        try:
            self._start_batch(batch, begin)
        except Exception as error:  # noqa: BLE001 - the caller has gone; its future has to end
            if self._claim_batch(batch):
                batch.future.set_exception(error)

    def _arrived(self, batch: _Batch[Any]) -> None:
        if batch.stands_back:
            with self._lock:
                self._standing_back[batch.call].append(batch)
            self._later(REORDER_SECONDS, lambda: self._finish(batch))
            return
        self._finish(batch)
        with self._lock:
            passed, self._standing_back[batch.call] = self._standing_back[batch.call], []
        for each in passed:
            self._finish(each)

    def _finish(self, batch: _Batch[Any]) -> None:
        if self._claim_batch(batch):
            batch.resolve_future()

    def _claim_batch(self, batch: _Batch[Any]) -> bool:
        """Remove an open batch. Return True to the first caller, which ends the batch's future."""
        with self._lock:
            known = batch in self._open
            self._open.discard(batch)
            return known

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        moment = time.monotonic() + seconds
        with self._lock:
            self._num_delayed += 1
            heapq.heappush(self._due, (moment, self._num_delayed, action))
        self._alarm.at(moment)

    def _run_due(self) -> None:
        while True:
            with self._lock:
                if self._closed or not self._due or self._due[0][0] > time.monotonic():
                    return
                action = heapq.heappop(self._due)[2]
            action()

    # The next methods are called under the lock, since they use the random generator and count.

    def _fails(self, call: str) -> bool:
        """Count a call. Return whether the plan makes the call fail."""
        self._calls[call] += 1
        every = self.plan.find_rule(call, "every")
        if every is not None and self._calls[call] % int(every.value) == 0:
            self._count_injected(call, "every")
            return True
        return self._happens(call, "error")

    def _happens(self, call: str, kind: str) -> bool:
        rule = self.plan.find_rule(call, kind)
        if rule is None or self._random.random() >= rule.value:
            return False
        self._count_injected(call, kind)
        return True

    def _choose(self, call: str, count: int) -> list[int]:
        """Return the positions of a batch that are passed on to the inner store."""
        missing = self._choose_missing(call, count)
        length = count
        if count and self._happens(call, "partial"):
            length = self._random.randrange(count)
        return [index for index in range(length) if index not in missing]

    def _choose_missing(self, call: str, count: int) -> set[int]:
        rule = self.plan.find_rule(call, "miss")
        if rule is None:
            return set()
        chosen = {index for index in range(count) if self._random.random() < rule.value}
        self._count_injected(call, "miss", len(chosen))
        return chosen

    def _choose_delay(self, call: str) -> float | None:
        rule = self.plan.find_rule(call, "delay")
        if rule is None:
            return None
        self._count_injected(call, "delay")
        if rule.exponential:
            return min(MAX_DELAY_SECONDS, rule.value * self._random.expovariate(1.0))
        return self._random.uniform(rule.value, rule.value if rule.upper is None else rule.upper)

    def _count_injected(self, call: str, kind: str, times: int = 1) -> None:
        if times:
            name = f"injected_{call}_{kind}"
            self._counts[name] = self._counts.get(name, 0) + times


@dataclass(frozen=True, slots=True)
class Drill:
    """The faults of a running engine: a plan for each tier that must fail.

    In the text form of a drill, a rule of `fault_plan.py` may begin with the name of a tier, and
    one item may be the seed of the random choice of faults:

        load:error=0.1                       every tier below the slab
        ssd:load:delay=0.2,net:store:hang=1  one fault in each of two tiers
        load:error=0.1,seed=7                the same calls give the same faults again; default 0"""

    plans: Mapping[str, FaultPlan]
    seed: int = 0

    def wrap(self, store: StoreTier) -> StoreTier:
        """Wrap a store in a FaultyStore with its plan; return a store without a plan unchanged."""
        plan = self.plans.get(store.name)
        return store if plan is None else FaultyStore(store, plan, seed=self.seed)


def parse_drill(text: str, tiers: Sequence[str]) -> Drill:
    """Parse a drill. `tiers` are the names of the tiers below the slab. Raises TierConfigError."""
    rules: dict[str, list[str]] = {}
    seed: int | None = None
    for item in [part.strip() for part in text.split(",")]:
        if item.startswith(_SEED):
            seed = _parse_seed(item, seed)
            continue
        tier, _, rule = item.partition(":")
        if ":" not in rule:
            tier, rule = "", item
            parse_rule(rule)
        elif tier not in tiers:
            known = (
                f"those below cpu are {', '.join(tiers)}" if tiers else "there is none below cpu"
            )
            raise TierConfigError(f"{item!r} is for a tier {tier!r} that cannot fail; {known}")
        for name in [tier] if tier else tiers:
            rules.setdefault(name, []).append(rule)
    if not tiers:
        raise TierConfigError(
            "faults befall tiers below cpu, and there is none; add one or drop them"
        )
    return Drill({name: parse_faults(",".join(rules[name])) for name in rules}, seed or 0)


def _parse_seed(item: str, earlier: int | None) -> int:
    digits = item.removeprefix(_SEED)
    if earlier is not None or not (digits.isascii() and digits.isdecimal()):
        raise TierConfigError(f"a drill takes one seed, a whole number as in seed=7, not {item!r}")
    if len(digits) > len(str(MAX_SEED)) or int(digits) > MAX_SEED:
        raise TierConfigError(f"a drill's seed is at most {MAX_SEED}, not {digits[:40]}")
    return int(digits)
