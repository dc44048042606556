# SPDX-License-Identifier: Apache-2.0
"""The rig for the checks of `contract.py`: a device with a pool and a slab. A test of a device
subclasses `Surroundings`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...tiers.block import BlockLayout
from ...tiers.slab.cpu_slab import CpuSlab
from .base import CopyDevice, Event, Stream

# Layouts with pages shorter than their slots, and with pages that fill their slots.
SHORT_PAGES = BlockLayout(2, 4, 1, 24, "bfloat16")
WHOLE_PAGES = BlockLayout(2, 16, 1, 32, "bfloat16")
LAYOUTS = (SHORT_PAGES, WHOLE_PAGES)
NUM_BLOCKS = 12
NUM_SLOTS = 40
WAIT_SECONDS = 10.0
MOMENT_SECONDS = 0.02  # the time after which an absent event counts as absent


class ContractBroken(AssertionError):
    """A device breaks its contract."""


class Gate(NamedTuple):
    """An event that copies can wait for, and the function that ends it."""

    event: Event
    open: Callable[[], None]


class Surroundings(ABC):
    """Makes a device, its pools and its events for a test."""

    @abstractmethod
    def device(self) -> CopyDevice:
        """Make a device, without pool and slab."""

    @abstractmethod
    def pool(self, num_blocks: int, layout: BlockLayout) -> torch.Tensor:
        """Make a pool of random numbers in the device's memory."""

    @abstractmethod
    def gate(self, device: CopyDevice) -> Gate:
        """Make a closed gate. Several gates may exist, and may be opened in any order."""

    def write(self, pool: torch.Tensor, block_id: int, value: int) -> None:
        """Fill a block with `value` like a forward pass: on a GPU, after all queued kernels."""
        pool[block_id] = value

    def settle(self) -> None:  # noqa: B027 - empty if the caller computes itself
        """Wait until the caller's changes to the pool are done."""


class Rig:
    """A device with a pool of random numbers and an empty slab."""

    def __init__(self, surroundings: Surroundings, layout: BlockLayout) -> None:
        self.layout = layout
        self.surroundings = surroundings
        self.slab = CpuSlab(layout, NUM_SLOTS * layout.slot_bytes, populate_threads=1)
        self.device = surroundings.device()
        self.notified = 0
        self.device.set_notify(self._count_notification)
        self.pool = surroundings.pool(NUM_BLOCKS, layout)
        self.device.register_slab(self.slab)
        self.device.register_pool(self.pool)
        surroundings.settle()

    def close(self) -> None:
        """Close the device and the slab. Raises ContractBroken if the device does not end."""
        expect(self.device.close(WAIT_SECONDS), "an idle device closes")
        expect(self.device.close(WAIT_SECONDS), "a closed device may be closed again")
        self.slab.close()

    def gate(self) -> Gate:
        return self.surroundings.gate(self.device)

    def block(self, block_id: int) -> bytes:
        block = self.pool[block_id].cpu().contiguous().view(torch.uint8)
        return bytes(block.flatten().tolist())

    def write(self, block_id: int, value: int) -> bytes:
        self.surroundings.write(self.pool, block_id, value)
        self.surroundings.settle()
        return self.block(block_id)

    def slot(self, slot: int) -> bytes:
        return bytes(self.slab.buffer(slot)[: self.layout.page_bytes])

    def fill(self, slot: int, value: int) -> bytes:
        page = bytes([value]) * self.layout.page_bytes
        self.slab.buffer(slot)[: self.layout.page_bytes] = page
        return page

    def queue_copy(self, stream: Stream, pairs: dict[int, int], *after: Event) -> Event:
        """Queue a copy of `{block: slot}`."""
        return self.device.copy(stream, list(pairs), list(pairs.values()), after)

    def _count_notification(self) -> None:
        self.notified += 1


def expect(is_so: bool, what: str) -> None:
    if not is_so:
        raise ContractBroken(f"expected that {what}")


def expect_end(event: Event) -> None:
    expect(event.wait(WAIT_SECONDS) and event.done(), "a copy ends")
    expect(event.error() is None, f"a copy ends well, not with {event.error()!r}")
    expect(event.seconds() >= 0.0, "a copy takes time")
