# SPDX-License-Identifier: Apache-2.0
"""Seconds that this machine's SSD store takes to read blocks: the unit of "100 times slower"."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

from ...tiers.base import Stored
from ...tiers.block import BlockLayout, pack_key
from ...tiers.ssd.store import SsdStore
from ..harness.report import median
from .engines import RunFailed

_READS = 5
_SECONDS = 60.0
_LEAST_BYTES = 64 * 2**20


def read_seconds(folder: Path, layout: BlockLayout, count: int) -> float:
    """The median of reading `count` blocks in one batch. Raises RunFailed."""
    capacity = max(_LEAST_BYTES, 2 * count * layout.slot_bytes)
    store = SsdStore(folder, layout, capacity)
    size = layout.slot_bytes
    try:
        with mmap.mmap(-1, count * size) as memory, memoryview(memory) as view:
            buffers = [view[i * size : (i + 1) * size] for i in range(count)]
            try:
                return _read(store, buffers)
            finally:
                for buffer in buffers:
                    buffer.release()
    finally:
        store.close(_SECONDS)


def _read(store: SsdStore, buffers: list[memoryview]) -> float:
    keys = [pack_key(number.to_bytes(32, "little")) for number in range(len(buffers))]
    outcomes = store.store(keys, buffers).result(_SECONDS)
    if outcomes.count(Stored.KEPT) != len(keys):
        raise RunFailed("the SSD store did not keep the blocks of the probe")
    taken = []
    for _ in range(_READS):
        began = time.perf_counter()
        proofs = store.load(keys, buffers).result(_SECONDS)
        taken.append(time.perf_counter() - began)
        if None in proofs:
            raise RunFailed("the SSD store did not give back the blocks of the probe")
    return median(taken)
