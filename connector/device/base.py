# SPDX-License-Identifier: Apache-2.0
"""The promise of a copy device: what moves bytes between the KV pool and the slab, in which order.

A device has two streams, one for each direction, and marks points in them with events. On CUDA
these are real streams and events; on the CPU they are threads, with the same rules, so that every
ordering rule can be tested without a GPU.

A caller may rely on this:
- copies in one stream run in the order in which they were queued;
- a copy starts only after every event in its `after` has ended, whether it ended well or not;
- an event that has ended well means that all its bytes are in place and visible to everyone; one
  that ended with an error means that they may be partly there, and that nothing more is written;
- queueing never waits: a full queue is an error at once;
- `notify` is called from any thread after each copy that has ended.

A caller must do this:
- store a block only after the event of its last writer (`writer_event`), and overwrite it only
  after the event of its store;
- read a block only after the event of its load;
- leave slots alone between `copy` and the end of its event.
Knows nothing of keys, requests or tiers below the slab.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from ...tiers.block import BlockLayout


class DeviceError(Exception):
    """A copy that could not be queued or did not finish; the blocks of that copy are not valid."""


class Stream(Enum):
    """The two directions; each has its own order."""

    STORE = "store"  # pool → slab
    LOAD = "load"  # slab → pool


class Event(Protocol):
    """A point in a stream that work can wait for."""

    def done(self) -> bool:
        """Whether everything before this point has ended, well or not."""

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for the end, at most so long; the same as `done` afterwards."""

    def error(self) -> Exception | None:
        """Why the work of this event failed. None if it ended well or has not ended."""

    def seconds(self) -> float:
        """How long the copy of this event ran, without its time in the queue; 0 until it ended and
        for an event that is no copy."""


class SlabMemory(Protocol):
    """What a device needs of a slab: its memory, in this process."""

    @property
    def layout(self) -> BlockLayout: ...
    @property
    def num_slots(self) -> int: ...
    def memory(self) -> memoryview:
        """As `SlabTier.memory`."""


class CopyDevice(ABC):
    """Copies whole blocks between one pool and one slab."""

    @abstractmethod
    def set_notify(self, notify: Callable[[], None]) -> None:
        """Call `notify` after each copy that has ended. It must return at once."""

    @abstractmethod
    def register_slab(self, slab: SlabMemory) -> None:
        """Make the slab's memory reachable (page-locked, on CUDA). Once, before the pool."""

    def make_digests(self) -> None:  # noqa: B027 - without tiers below the slab there is no use for them
        """From now on every store has digests. Before the first copy."""

    def digests(self, store: Event) -> list[bytes] | None:
        """The `payload_digest` of what a store left in each of its slots, in their order. None for
        a store that did not end well, for any other event, and where `make_digests` was not
        called."""
        return None

    def wait_locked(self, timeout_seconds: float) -> bool:
        """Wait until copies run at full speed. CUDA page-locks the slab in the background, and
        copies more slowly until that is done. False if the time was too short."""
        return True

    @abstractmethod
    def register_pool(self, pool: torch.Tensor) -> None:
        """The contiguous KV pool `[num_blocks, ...]`, `page_bytes` a block; InvalidBlock where it
        does not fit the slab's layout."""

    @abstractmethod
    def writer_event(self) -> Event:
        """Ends when everything that computes on the pool and was queued before has run."""

    def hold_compute(self, events: Sequence[Event], timeout_seconds: float) -> list[Event]:
        """Whatever computes on the pool and is queued from now on runs after the events. Those
        that were not over in time, and hold nothing: their bytes may be overwritten. Here the
        caller waits; a device whose computing has a stream lets that wait instead."""
        deadline = time.monotonic() + timeout_seconds
        return [event for event in events if not event.wait(max(0.0, deadline - time.monotonic()))]

    @abstractmethod
    def copy(
        self,
        stream: Stream,
        block_ids: Sequence[int],
        slots: Sequence[int],
        after: Sequence[Event] = (),
    ) -> Event:
        """Queue a copy of `block_ids[i]` ↔ `slots[i]`, which must stay as they are until its end.
        Raises DeviceError where the queue is full or the device closed, InvalidBlock for ids
        outside the pool or the slab."""

    def copy_held(
        self, block_ids: Sequence[int], slots: Sequence[int], after: Sequence[Event] = ()
    ) -> Event:
        """Copy a store that the next computation will wait for. It may run at once, on the caller's
        thread, and so before stores that were queued earlier."""
        return self.copy(Stream.STORE, block_ids, slots, after)

    @abstractmethod
    def close(self, timeout_seconds: float) -> bool:
        """Let queued copies end, at most so long, and let go of pool and slab. False if copies
        are still running: the memory must then stay. Idempotent."""
