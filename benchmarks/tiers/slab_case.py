# SPDX-License-Identifier: Apache-2.0
"""The case of blocks copied into and out of the real slab, compared with plain copies.

The two sides copy with numpy on one thread, at random places of regions that are larger than all
caches. The difference is the slab's own work and the cost of shared memory with small pages.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...tiers.slab.cpu_slab import CpuSlab
from ..harness.comparison import Comparison, WrongWork
from .scale import MIB, key_of, layout_of

BATCH_BYTES = 32 * MIB
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_TIMES_CACHE = 4
_UNITS = {"K": 1024, "M": MIB}

Bytes = NDArray[np.uint8]


def footprint_bytes(least: int, caches: Path = _CACHES) -> int:
    """Return the bytes of four times the largest cache, but at least `least`."""
    sizes = [_cache_bytes(each.read_text().strip()) for each in caches.glob("index*/size")]
    return max(least, _TIMES_CACHE * max(sizes, default=0))


def _cache_bytes(text: str) -> int:
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text)


class SlabCase:
    """A full slab, memory to copy from and to, and plain memory for the limit."""

    def __init__(self, block_bytes: int, slab_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.slab = CpuSlab(layout_of(block_bytes), slab_bytes)
        self.num_blocks = self.slab.num_slots
        size = self.num_blocks * block_bytes
        self._slots: Bytes = np.frombuffer(self.slab.memory(), np.uint8)
        self._outside = _plain_memory(size)
        self._plain = _plain_memory(size)
        self._rng = random.Random(block_bytes)
        self._keys = [key_of(number) for number in range(2 * self.num_blocks)]
        self._batch = max(1, BATCH_BYTES // block_bytes)
        self._places: Sequence[int] = []
        self.put()

    def comparisons(self, name: str) -> list[Comparison]:
        """Return the comparisons for blocks into the slab, and for blocks out of the slab."""
        return [
            Comparison(f"slab_put_{name}", "bytes/s", "memcpy", self.put, self.copy),
            Comparison(f"slab_get_{name}", "bytes/s", "memcpy", self.get, self.copy),
        ]

    def put(self) -> float:
        """Put as many new blocks as there are slots, which are free in random order; return the
        rate."""
        self._empty()
        keys, slab, size = self._keys[: self.num_blocks], self.slab, self.block_bytes
        began = time.perf_counter()
        for start in range(0, self.num_blocks, self._batch):
            batch = keys[start : start + self._batch]
            slots = slab.reserve(batch)
            for slot, place in zip(slots, self._places[start:], strict=False):
                if slot is None:
                    raise WrongWork("the slab had no slot for a new block")
                _copy(self._slots, slot * size, self._outside, place, size)
            slab.commit(batch, [True] * len(batch))
        return self._rate(began)

    def get(self) -> float:
        """Get every block once, in random order; return the rate."""
        keys, slab, size = self._keys[: self.num_blocks], self.slab, self.block_bytes
        self._rng.shuffle(keys)
        self._places = self._random_places()
        began = time.perf_counter()
        for start in range(0, self.num_blocks, self._batch):
            batch = keys[start : start + self._batch]
            slots = slab.pin(batch)
            for slot, place in zip(slots, self._places[start:], strict=False):
                if slot is None:
                    raise WrongWork("a block was not in the slab")
                _copy(self._outside, place, self._slots, slot * size, size)
            slab.unpin(batch)
        return self._rate(began)

    def copy(self) -> float:
        """Copy as many bytes between plain regions, at random places; return the rate."""
        size = self.block_bytes
        targets = self._random_places()
        sources = self._random_places()
        began = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            _copy(self._plain, target, self._outside, source, size)
        return self._rate(began)

    def close(self) -> None:
        del self._slots
        self.slab.close()

    def _empty(self) -> None:
        """Empty the slab so that its slots are free in random order, and choose new keys."""
        known = self.slab.keys()
        self._rng.shuffle(known)
        self.slab.forget(known)
        half = self.num_blocks
        self._keys = self._keys[half:] + self._keys[:half]
        self._places = self._random_places()

    def _random_places(self) -> Sequence[int]:
        places = list(range(0, self.num_blocks * self.block_bytes, self.block_bytes))
        self._rng.shuffle(places)
        return places

    def _rate(self, began: float) -> float:
        return self.num_blocks * self.block_bytes / (time.perf_counter() - began)


def _copy(target: Bytes, to: int, source: Bytes, at: int, size: int) -> None:
    np.copyto(target[to : to + size], source[at : at + size])


def _plain_memory(size: int) -> Bytes:
    """Return ordinary memory in which every page has been written."""
    memory: Bytes = np.frombuffer(
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
    )
    noise = np.frombuffer(os.urandom(MIB), np.uint8)
    for start in range(0, size, MIB):
        memory[start : start + MIB] = noise[: size - start]
    return memory
