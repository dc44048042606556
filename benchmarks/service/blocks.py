# SPDX-License-Identifier: Apache-2.0
"""The blocks of one end: shared memory, as an engine's slab is, warm and full of noise.

Every block carries a stamp at both ends, new whenever it is stored, so that a load that brought
nothing, or another block, is noticed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from ...tiers.block import BlockLayout
from ...tiers.shared_memory import SharedMemory
from ..harness.comparison import WrongWork
from ..tiers.scale import MIB, layout_of

STAMP_BYTES = 16


class Blocks:
    """`buffers[i]` is block i, of `layout.page_bytes`, at `addresses[i]`."""

    def __init__(self, block_bytes: int, count: int) -> None:
        self.layout: BlockLayout = layout_of(block_bytes)
        size = self.layout.slot_bytes
        shared = SharedMemory(
            "stratakv-bench", count * size, huge_pages=False, threads=1, progress=None
        )
        self._map = shared.map
        os.close(shared.fd)
        whole = memoryview(self._map)
        noise = os.urandom(MIB)
        for start in range(0, len(whole), MIB):
            part = whole[start : start + MIB]
            part[:] = noise[: len(part)]
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.size = len(whole)
        places = range(0, count * size, size)
        self.buffers = [whole[place : place + block_bytes] for place in places]
        self.addresses = [self.base + place for place in places]

    def __len__(self) -> int:
        return len(self.buffers)

    def stamp(self) -> list[bytes]:
        """New stamps on all blocks."""
        stamps = [os.urandom(STAMP_BYTES) for _ in self.buffers]
        for buffer, stamp in zip(self.buffers, stamps, strict=True):
            buffer[:STAMP_BYTES] = buffer[-STAMP_BYTES:] = stamp
        return stamps

    def scrub(self) -> None:
        """Take all stamps off."""
        none = bytes(STAMP_BYTES)
        for buffer in self.buffers:
            buffer[:STAMP_BYTES] = buffer[-STAMP_BYTES:] = none

    def check(self, stamps: Sequence[bytes]) -> None:
        """Raise WrongWork unless each block has its stamp."""
        for index, (buffer, stamp) in enumerate(zip(self.buffers, stamps, strict=True)):
            if not buffer[:STAMP_BYTES] == buffer[-STAMP_BYTES:] == stamp:
                raise WrongWork(f"block {index} was loaded, but its buffer does not hold it")
