# SPDX-License-Identifier: Apache-2.0
"""A copy device that moves nothing and watches the order in which everything would move.

Three virtual streams, compute, store and load, run as on a GPU: each works through its own queue
while the host goes on. An operation starts as soon as its stream and its events let it, because
what may start early is caught early; when it ends is for the test to choose. At every start the
checker looks for operations that should have ended before:

    a store of a block               its last writer, and its load
    a pass or a load that writes it  its stores, the passes that read or write it, and its load
    a pass that reads a block        its load
    a copy into or out of a slot     the copies that write to it or, where it writes, read from it

Knows nothing of requests, keys or tiers: blocks and slots are numbers here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stratakv.connector.device.base import CopyDevice, DeviceError, Event, Stream

from ..copy_event import CopyEvent

COMPUTE = "compute"
# Chooses one of so many possibilities; the first is always that the host goes on.
Choose = Callable[[int], int]


class OutOfOrder(AssertionError):
    """Something started before what it had to wait for had ended."""


@dataclass(eq=False)
class Operation(CopyEvent):
    """One pass or copy job in its stream; an event as well, for what comes after it."""

    device: RecordingDevice
    stream: str
    name: str
    reads: frozenset[Any] = frozenset()  # block ids, and slots as ("slot", index)
    writes: frozenset[Any] = frozenset()
    after: Sequence[Operation] = ()
    number: int = 0  # in the order in which the host queued them
    # Passes that the host let overtake this store, having waited as long as it was told to.
    overtaken_by: set[Operation] = field(default_factory=set)

    def wait(self, timeout_seconds: float) -> bool:
        return self.device.wait_for(self)

    def must_wait_for(self, earlier: Operation) -> bool:
        """Whether both touch the same thing, and one of them writes to it."""
        return not (
            self.writes.isdisjoint(earlier.writes)
            and self.writes.isdisjoint(earlier.reads)
            and self.reads.isdisjoint(earlier.writes)
        )


class RecordingDevice(CopyDevice):
    """See above. `fails` says whether the next copy is refused ("refuse"), breaks ("break") or
    goes well (""); `gives_up` whether the host's wait for a store runs out of time."""

    def __init__(
        self,
        choose: Choose,
        fails: Callable[[], str] = lambda: "",
        gives_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._choose = choose
        self._fails = fails
        self._gives_up = gives_up
        self._notify: Callable[[], None] = lambda: None
        self._queues: dict[str, deque[Operation]] = {
            COMPUTE: deque(), Stream.STORE.value: deque(), Stream.LOAD.value: deque()
        }  # fmt: skip
        self._given_up: set[Operation] = set()
        self._last_pass = Operation(self, COMPUTE, "nothing", started=True, ended=True)
        self._num_queued = 0
        self.torn: set[Operation] = set()  # stores whose blocks were overwritten under them
        self.moments: list[object] = []  # when the device could choose, and how waits ended
        self._wrong: list[str] = []

    def set_notify(self, notify: Callable[[], None]) -> None:
        self._notify = notify

    def register_slab(self, slab: object) -> None:
        """Nothing is copied."""

    def register_pool(self, pool: torch.Tensor) -> None:
        """Nothing is copied."""

    def writer_event(self) -> Event:
        return self._last_pass

    def copy(
        self,
        stream: Stream,
        block_ids: Sequence[int],
        slots: Sequence[int],
        after: Sequence[Event] = (),
    ) -> Event:
        operation = self._operation(stream, block_ids, slots, after)
        self._queue(operation)
        return operation

    def copy_held(
        self, block_ids: Sequence[int], slots: Sequence[int], after: Sequence[Event] = ()
    ) -> Event:
        """Before earlier stores, perhaps; without any it would be as one that ends soon."""
        may_overtake = self._queues[Stream.STORE.value] and all(event.done() for event in after)
        if not (may_overtake and self._choose(2)):
            return self.copy(Stream.STORE, block_ids, slots, after)
        operation = self._operation(Stream.STORE, block_ids, slots, after)
        self._number(operation)
        self._check(operation)
        operation.started = operation.ended = True
        self._notify()
        return operation

    def compute(self, reads: Sequence[int], writes: Sequence[int]) -> None:
        """The host launches a forward pass."""
        name = f"the pass that reads {sorted(reads)} and writes {sorted(writes)}"
        operation = Operation(self, COMPUTE, name, frozenset(reads), frozenset(writes))
        for store in self._given_up:
            if not store.ended and not operation.writes.isdisjoint(store.reads):
                store.overtaken_by.add(operation)
                self.torn.add(store)
        self._last_pass = operation
        self._queue(operation)
        self._raise_what_is_wrong()

    def let_time_pass(self) -> None:
        """Any operations that could end now do so, or none."""
        self._raise_what_is_wrong()
        self.moments.append("time passes")
        while heads := self._running():
            choice = self._choose(1 + len(heads))
            if choice == 0:
                return
            self._end(heads[choice - 1])

    def wait_for(self, operation: Operation) -> bool:
        """The host waits: others may end before, and go on ending meanwhile."""
        self.moments.append("the host waits")
        if not operation.ended and self._gives_up():
            self._given_up.add(operation)
        while not operation.ended and operation not in self._given_up:
            heads = self._running()
            self._end(heads[self._choose(len(heads))])
        self.moments.append(operation.ended)
        return operation.ended

    def close(self, timeout_seconds: float) -> bool:
        while heads := self._running():
            self._end(heads[0])
        return True

    def progress(self) -> tuple[int, ...]:
        """How far each stream has come; with what the host has seen, the whole state."""
        return tuple(map(len, self._queues.values()))

    def _operation(
        self,
        stream: Stream,
        block_ids: Sequence[int],
        slots: Sequence[int],
        after: Sequence[Event],
    ) -> Operation:
        fault = self._fails()
        if fault == "refuse":
            raise DeviceError("the queue is full")
        blocks, places = frozenset(block_ids), frozenset(("slot", slot) for slot in slots)
        stores = stream is Stream.STORE
        name = f"the {stream.value} of blocks {list(block_ids)}"
        reads, writes = (blocks, places) if stores else (places, blocks)
        operation = Operation(self, stream.value, name, reads, writes, after)  # type: ignore[arg-type]
        operation.failure = DeviceError("the copy broke") if fault else None
        return operation

    def _number(self, operation: Operation) -> None:
        self._num_queued += 1
        operation.number = self._num_queued

    def _queue(self, operation: Operation) -> None:
        self._number(operation)
        self._queues[operation.stream].append(operation)
        self._start_what_can()

    def _running(self) -> list[Operation]:
        heads = [queue[0] for queue in self._queues.values() if queue]
        return [operation for operation in heads if operation.started]

    def _start_what_can(self) -> None:
        for queue in self._queues.values():
            if queue and not queue[0].started and all(event.ended for event in queue[0].after):
                self._check(queue[0])
                queue[0].started = True

    def _end(self, operation: Operation) -> None:
        operation.ended = True
        self._queues[operation.stream].popleft()
        self._start_what_can()
        self._raise_what_is_wrong()
        if operation.stream != COMPUTE:
            self._notify()

    def _raise_what_is_wrong(self) -> None:
        # Not from `copy`: whoever queues a copy takes an error there for a copy that failed.
        if self._wrong:
            raise OutOfOrder("; ".join(self._wrong))

    def _check(self, starting: Operation) -> None:
        for queue in self._queues.values():
            for earlier in queue:
                if earlier.number >= starting.number:
                    break
                if starting.must_wait_for(earlier) and starting not in earlier.overtaken_by:
                    self._wrong.append(f"{starting.name} began before the end of {earlier.name}")
