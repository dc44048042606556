# SPDX-License-Identifier: Apache-2.0
"""Copies between the pool and pageable memory, through a small page-locked buffer in two halves.

The copy engine works on one half while the calling thread works on the other half. A call waits
until all its copies have ended."""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable

from ...kernels.copy.copy_engine import Batch
from .copy_plan import cut
from .cuda_copy_runtime import Runtime
from .cuda_events import Point

HALF_BYTES = 8 << 20
Copies = list[tuple[int, int, int]]
Copy = Callable[[Batch, int], None]


class StagingBuffer:
    """The buffer for one direction. The function `copy` queues a batch of copies between
    page-locked memory and the device in a stream."""

    def __init__(self, runtime: Runtime, half_bytes: int = HALF_BYTES) -> None:
        self._runtime = runtime
        self._half_bytes = half_bytes
        self.memory = runtime.page_locked(2 * half_bytes)

    def store(self, batch: Batch, stream: int, copy: Copy) -> None:
        """Copy from the device to pageable memory; all bytes are in place on return."""
        landing: deque[tuple[Copies, Copies, Point]] = deque()
        for half, group in zip(self._halves(), cut(batch, self._half_bytes), strict=False):
            if len(landing) == 2:
                self._land(*landing.popleft())
            placed = _placed(half, group)
            copy(_batch([(source, at, size) for (source, _, size), at in placed]), stream)
            out = [(at, target, size) for (_, target, size), at in placed]
            landing.append((group, out, Point(self._runtime, stream)))
        while landing:
            self._land(*landing.popleft())

    def load(self, batch: Batch, stream: int, copy: Copy) -> None:
        """Copy from pageable memory to the device; all sources have been read on return."""
        busy: deque[Point] = deque()
        for half, group in zip(self._halves(), cut(batch, self._half_bytes), strict=False):
            if len(busy) == 2:
                busy.popleft().synchronise()
            placed = _placed(half, group)
            for (source, _, size), at in placed:
                ctypes.memmove(at, source, size)
            copy(_batch([(at, target, size) for (_, target, size), at in placed]), stream)
            busy.append(Point(self._runtime, stream))
        # The next copy needs both halves empty.
        while busy:
            busy.popleft().synchronise()

    def close(self) -> None:
        """Release the buffer, which no copy may use any more."""
        self.memory.close()

    def _halves(self) -> itertools.cycle[int]:
        return itertools.cycle((self.memory.address, self.memory.address + self._half_bytes))

    def _land(self, group: Copies, out: Copies, point: Point) -> None:
        point.synchronise()
        for source, target, size in out:
            ctypes.memmove(target, source, size)


def _placed(half: int, group: Copies) -> list[tuple[tuple[int, int, int], int]]:
    """Return each copy with its address in a half of the buffer, where copies lie without gaps."""
    ends = itertools.accumulate((size for _, _, size in group), initial=half)
    return list(zip(group, ends, strict=False))


def _batch(copies: Copies) -> Batch:
    sources, targets, sizes = zip(*copies, strict=True)
    return Batch(sources, targets, sizes)
