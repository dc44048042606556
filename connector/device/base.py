# SPDX-License-Identifier: Apache-2.0
"""The contract of a copy device, which copies bytes between the KV pool and the slab in order.

A device has two streams, one for each direction, and events for points in a stream. On CUDA the
streams and events are CUDA's. The CPU device uses threads and obeys the same rules, without a GPU.

A device guarantees to its caller:
- copies in one stream run in the order in which they were queued;
- a copy starts only after every event in its `after` has ended, with or without an error;
- when an event ends well, all bytes of its copy are in place and visible to all threads; when an
  event ends with an error, some bytes may be in place, and no more are written;
- queueing a copy never waits, and raises DeviceError at once if the queue is full;
- `notify` is called after the end of each copy, from any thread.

A caller guarantees to the device:
- a block is stored only after the event of its last writer (`writer_event`), and overwritten only
  after the event of its store;
- a block is read only after the event of its load;
- the slots of a copy are neither read nor written between the call of `copy` and the end of the
  copy's event. A device handles no keys, requests or lower tiers."""

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
    """A copy could not be queued or did not finish; its target blocks are not valid."""


class Stream(Enum):
    """The two directions of copies; copies of one direction run in order."""

    STORE = "store"  # pool → slab
    LOAD = "load"  # slab → pool


class Event(Protocol):
    """A point in a stream that work can wait for."""

    def done(self) -> bool:
        """Whether all work before this point has ended, with or without an error."""

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for the end, `timeout_seconds` at most. Return whether the event has ended."""

    def error(self) -> Exception | None:
        """The exception if the work of this event failed; None before the end and after success."""

    def seconds(self) -> float:
        """The running time of the event's copy, without its time in the queue; 0 until the copy's
        end, and for an event without a copy."""


class SlabMemory(Protocol):
    """A device's view of a slab: its memory in this process."""

    @property
    def layout(self) -> BlockLayout: ...
    @property
    def num_slots(self) -> int: ...
    def memory(self) -> memoryview:
        """Return the slab's bytes, as `SlabTier.memory` does."""


class CopyDevice(ABC):
    """Copies whole blocks between one pool and one slab."""

    @abstractmethod
    def set_notify(self, notify: Callable[[], None]) -> None:
        """Set a function to call after the end of each copy. The function must return at once."""

    @abstractmethod
    def register_slab(self, slab: SlabMemory) -> None:
        """Make the slab's memory reachable (page-locked, on CUDA). Called once, before the pool."""

    def make_digests(self) -> None:  # noqa: B027 - only tiers below the slab need digests
        """Compute digests of the slots of every store from now on. Called before the first copy."""

    def digests(self, store: Event) -> list[bytes] | None:
        """Return the `payload_digest` of each slot of a successful store, in the store's order.
        None if `store` is not the event of a store, or if `make_digests` was not called."""
        return None

    def wait_locked(self, timeout_seconds: float) -> bool:
        """Wait until copies run at full speed: CUDA page-locks the slab in the background, and
        copies more slowly until the slab is locked. Return False if the time was too short."""
        return True

    @abstractmethod
    def register_pool(self, pool: torch.Tensor) -> None:
        """Take the contiguous KV pool `[num_blocks, ...]`, with `page_bytes` bytes per block.
        Raises InvalidBlock if the pool does not match the slab's layout."""

    @abstractmethod
    def writer_event(self) -> Event:
        """Return an event that ends when all computing queued on the pool so far has run."""

    def hold_compute(self, events: Sequence[Event], timeout_seconds: float) -> list[Event]:
        """Delay computing on the pool that is queued after this call until the events have ended.
        Return the events that did not end in time; computing does not wait for such events and may
        overwrite the events' blocks. Here the caller waits; on CUDA the compute stream waits."""
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
        """Queue a copy of `block_ids[i]` ↔ `slots[i]`; neither list may change until the copy ends.
        Raises DeviceError if the queue is full or the device closed, InvalidBlock for ids outside
        the pool or the slab."""

    def copy_held(
        self, block_ids: Sequence[int], slots: Sequence[int], after: Sequence[Event] = ()
    ) -> Event:
        """Copy a store for which the next forward pass will wait. The copy may run at once, on the
        calling thread, and so before stores that were queued earlier."""
        return self.copy(Stream.STORE, block_ids, slots, after)

    @abstractmethod
    def close(self, timeout_seconds: float) -> bool:
        """Let queued copies end, `timeout_seconds` at most, and release pool and slab. Return False
        if copies are still running; then the caller must not free the memory. Idempotent."""
