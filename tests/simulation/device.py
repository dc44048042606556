# SPDX-License-Identifier: Apache-2.0
"""A simulated copy device: two streams in virtual time that copy real bytes, half by half.

The first half of a block moves when its copy begins and the second when it ends, so that a block
which changes in between is torn and seen to be.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stratakv.connector.device.base import CopyDevice, DeviceError, Event, Stream
from stratakv.connector.device.cpu import slab_pages
from stratakv.tiers.base import SlabTier

from ..copy_event import CopyEvent
from .clock import VirtualClock

# How long one copy takes at most; rarely, in a faulty device, much longer.
COPY_SECONDS, STUCK_SECONDS = 0.004, 1.0

Bytes = npt.NDArray[np.uint8]


@dataclass(eq=False)
class Copy(CopyEvent):
    """One job in its stream, and its event."""

    clock: VirtualClock
    stream: Stream
    block_ids: list[int]
    slots: list[int]
    after: Sequence[Event]

    def wait(self, timeout_seconds: float) -> bool:
        return self.clock.wait_for(self.done, timeout_seconds)

    def seconds(self) -> float:
        return COPY_SECONDS if self.ended else 0.0


class SimDevice(CopyDevice):
    """`fault_rate`: of so many copies something goes wrong. `copy_seconds`: what one takes at most.
    `refuses`: whether a step's copies may not even begin."""

    def __init__(
        self,
        clock: VirtualClock,
        rng: random.Random,
        fault_rate: float,
        *,
        copy_seconds: float = COPY_SECONDS,
        refuses: Callable[[], bool] = lambda: False,
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._fault_rate = fault_rate
        self._copy_seconds = copy_seconds
        self._refuses = refuses
        self._queues: dict[Stream, deque[Copy]] = {stream: deque() for stream in Stream}
        self._notify: Callable[[], None] = lambda: None
        self._pool: Bytes
        self._slab: Bytes | None = None
        self._last_pass = CopyEvent(ended=True)  # a CPU has always finished it

    @property
    def targets(self) -> set[int]:
        """Pool blocks that loads may be writing to."""
        return {block for copy in self._queues[Stream.LOAD] for block in copy.block_ids}

    def set_notify(self, notify: Callable[[], None]) -> None:
        self._notify = notify

    def register_slab(self, slab: SlabTier) -> None:
        self._slab = slab_pages(slab)

    def register_pool(self, pool: Any) -> None:
        self._pool = pool.view(np.uint8).reshape(len(pool), -1)

    def writer_event(self) -> Event:
        if self._refuses():
            raise DeviceError("the device marks nothing")
        return self._last_pass

    def copy(
        self,
        stream: Stream,
        block_ids: Sequence[int],
        slots: Sequence[int],
        after: Sequence[Event] = (),
    ) -> Event:
        if self._slab is None or self._happens():
            raise DeviceError("the device takes no more copies")
        copy = Copy(self._clock, stream, list(block_ids), list(slots), after)
        if self._happens():
            copy.failure = DeviceError("the copy stopped half way")
        self._queues[stream].append(copy)
        self._start_what_can()
        return copy

    def close(self, timeout_seconds: float) -> bool:
        self._clock.wait_for(lambda: not any(self._queues.values()), timeout_seconds)
        self._slab = None
        return not any(self._queues.values())

    def _happens(self) -> bool:
        return self._rng.random() < self._fault_rate

    def _start_what_can(self) -> None:
        for queue in self._queues.values():
            copy = queue[0] if queue else None
            if copy and not copy.started and all(event.done() for event in copy.after):
                copy.started = True
                self._move(copy, first_half=True)
                seconds = self._rng.uniform(0.0, self._copy_seconds)
                if self._happens():
                    seconds = self._rng.uniform(0.0, STUCK_SECONDS)
                self._clock.after(seconds, lambda copy=copy: self._end(copy))  # type: ignore[misc]

    def _end(self, copy: Copy) -> None:
        if copy.failure is None:
            self._move(copy, first_half=False)
        copy.ended = True
        self._queues[copy.stream].popleft()
        self._start_what_can()
        self._notify()

    def _move(self, copy: Copy, first_half: bool) -> None:
        slab, pool = self._slab, self._pool
        assert slab is not None
        half = pool.shape[1] // 2
        part = slice(0, half) if first_half else slice(half, None)
        for block, slot in zip(copy.block_ids, copy.slots, strict=True):
            if copy.stream is Stream.STORE:
                slab[slot, part] = pool[block, part]
            else:
                pool[block, part] = slab[slot, part]
