# SPDX-License-Identifier: Apache-2.0
"""A real pool, slab, copy device and worker side, and plain memory beside them for the limit.

Every region is larger than what caches hold.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...connector.device.cpu import CpuCopyDevice, pool_pages, slab_pages
from ...connector.offload_worker import OffloadWorker
from ...connector.transfer import CopySignal
from ...engine.worker.kv_pool import KvPool
from ...tiers.cpu import CpuSlab
from ..harness.comparison import WrongWork
from ..tiers.scale import MIB, layout_of

WAIT_SECONDS = 60.0
_CLOSE_SECONDS = 10.0

Bytes = NDArray[np.uint8]
Pairs = Sequence[tuple[int, int]]  # block, slot


class Rig:
    """One size of block."""

    def __init__(self, block_bytes: int, region_bytes: int) -> None:
        layout = layout_of(block_bytes)
        self.block_bytes = block_bytes
        self.num_blocks = region_bytes // block_bytes
        self.rng = random.Random(block_bytes)
        self._slab = CpuSlab(layout, self.num_blocks * layout.slot_bytes)
        self._pool = KvPool(layout, self.num_blocks)
        self.pool: Bytes = pool_pages(self._pool.tensor, block_bytes)
        self.slab: Bytes = slab_pages(self._slab)
        # As the pool is made: what is different is what the device does.
        plain = [KvPool(layout, self.num_blocks).tensor for _ in range(2)]
        self.plain: list[Bytes] = [pool_pages(tensor, block_bytes) for tensor in plain]
        for region in (self.pool, self.slab, *self.plain):
            _fill(region)
        self.device = CpuCopyDevice()
        self.device.register_slab(self._slab)
        self.signal = CopySignal()
        self.worker = OffloadWorker(self.device, self.signal)
        self.worker.register_pool(self._pool.tensor)
        self._stamp = 0

    def stamp(self, region: Bytes) -> None:
        """Make every block of a region different from all that were there before."""
        for block in region:
            self._stamp += 1
            block[:8] = np.frombuffer(self._stamp.to_bytes(8, "little"), np.uint8)

    def check(self, source: Bytes, target: Bytes, moves: Pairs) -> None:
        """Raise WrongWork unless the blocks of `source` are where they should be in `target`."""
        for at, to in moves:
            if not np.array_equal(source[at], target[to]):
                raise WrongWork(f"block {at} was copied, but {to} does not hold it")

    def close(self) -> None:
        """Give the memory back."""
        self.worker.shutdown()
        if not self.device.close(_CLOSE_SECONDS):
            raise WrongWork("copies were still running at the end")
        del self.slab
        self._slab.close()
        del self.pool, self.plain, self._pool
        gc.collect()


def copy_plainly(source: Bytes, target: Bytes, moves: Pairs, length: int = 1) -> None:
    """memcpy of `length` blocks at a time, at these places."""
    for at, to in moves:
        np.copyto(target[to : to + length], source[at : at + length])


def _fill(region: Bytes) -> None:
    noise = np.frombuffer(os.urandom(MIB), np.uint8)
    for block in region:
        block[:] = np.resize(noise, block.shape)
