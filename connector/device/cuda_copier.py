# SPDX-License-Identifier: Apache-2.0
"""The copies of one direction of the CUDA device, made in the fastest measured way. This module
uses addresses in pool and slab, and handles no events, order or threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.copy.copy_engine import Batch, CudaError
from ...kernels.kernel_choice import KernelRefused
from .base import Stream
from .copy_plan import (
    FRAGMENT_BYTES,
    PAGEABLE_WAYS,
    Geometry,
    Pairs,
    Way,
    choose_locked,
    choose_pageable,
    make_batch,
    split_locked,
)
from .cuda_copy_runtime import Runtime
from .cuda_events import Point
from .cuda_slab import locked_memory_advice
from .cuda_staging import StagingBuffer

log = logging.getLogger(__name__)

ROUNDS = 3
MOST_COPIES = 256  # copies in a measured round; some ways take microseconds for a copy
Rates = dict[Way, float]

GB = 1e9


def measure_rates(
    runtime: Runtime, staging: StagingBuffer, stream: int, direction: Stream, block_bytes: int
) -> Rates:
    """Measure the bytes per second of each way to copy that works on this machine. `staging` must
    be idle. The measurement takes some milliseconds, and copies scattered pieces of a block's size
    between scratch buffers, never the pool or the slab. Only for small blocks, which the copy
    engine copies slowly, is a kernel compiled and measured."""
    locked = staging.memory.tensor()
    size = min(block_bytes, locked.numel() // 2)
    count = min(MOST_COPIES, locked.numel() // size)
    on_device = runtime.device_memory(count * size)
    ordinary = torch.zeros(count * size, dtype=torch.uint8)
    to_host = direction is Stream.STORE
    # Reversed, so that no two places are neighbours.
    places = np.arange(count - 1, -1, -1) * size

    def batch(host: torch.Tensor) -> Batch:
        ends = (on_device.data_ptr() + places, host.data_ptr() + places)
        source, target = ends if to_host else ends[::-1]
        return Batch(source, target, np.full(count, size))

    def kernel() -> None:
        rows = [memory[: count * size].view(count, size) for memory in (on_device, locked)]
        source, target = rows if to_host else rows[::-1]
        numbers = range(count)
        runtime.move_blocks(source, target, numbers, numbers, stream)

    def single(part: Batch, stream: int) -> None:
        runtime.copy_each(part, stream, to_host=to_host)

    quick = runtime.copy_batch if runtime.batch_refusal is None else single
    through = staging.store if to_host else staging.load
    between, outside = batch(locked), batch(ordinary)
    ways: dict[Way, Callable[[], None]] = {
        Way.SINGLE: lambda: single(between, stream),
        Way.PAGEABLE: lambda: single(outside, stream),
        Way.STAGED: lambda: through(outside, stream, quick),
    }
    if runtime.batch_refusal is None:
        ways[Way.BATCHED] = lambda: runtime.copy_batch(between, stream)
    if block_bytes < FRAGMENT_BYTES:
        ways[Way.KERNEL] = kernel
    rates = {}
    for way, launch in ways.items():
        try:
            rates[way] = count * size / _best_seconds(runtime, stream, launch)
        except (CudaError, KernelRefused) as error:
            if way in (Way.SINGLE, Way.PAGEABLE):
                raise  # single copies must work on any device
            log.warning("no copies by %s here: %s", way.value, error)
    return rates


def _best_seconds(runtime: Runtime, stream: int, launch: Callable[[], None]) -> float:
    """Return the shortest of ROUNDS times, by the CPU's clock because the CPU may copy too."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        launch()
        Point(runtime, stream).synchronise()
        best = min(best, time.perf_counter() - began)
    return best


@dataclass(frozen=True, slots=True)
class Memory:
    """Pool and slab, as addresses and as uint8 tensors `[blocks or slots, page_bytes]`."""

    geometry: Geometry
    pool: torch.Tensor
    slab: torch.Tensor


class Copier:
    """Copies in one direction. All work is queued in `stream`, the handle of a CUDA stream."""

    def __init__(self, runtime: Runtime, direction: Stream, staging_bytes: int) -> None:
        self._runtime = runtime
        self._direction = direction
        self._is_store = direction is Stream.STORE
        self._staging: StagingBuffer | None = None
        try:
            self._staging = StagingBuffer(runtime, staging_bytes)
        except (CudaError, OSError) as error:
            log.warning(
                "%ss have no page-locked buffer, so nothing is measured: %s. %s",
                direction.value,
                error,
                locked_memory_advice(2 * staging_bytes),
            )
        self._rates: Rates = {}
        self.locked = Way.BATCHED if runtime.batch_refusal is None else Way.SINGLE
        self.pageable = Way.PAGEABLE

    def calibrate(self, stream: int, block_bytes: int) -> None:
        """Measure the ways to copy, and use the fastest from now on. The stream must be idle."""
        if self._staging is None:
            return
        rates = self._rates = measure_rates(
            self._runtime, self._staging, stream, self._direction, block_bytes
        )
        self.locked = choose_locked(
            {way: rate for way, rate in rates.items() if way not in PAGEABLE_WAYS}
        )
        self.pageable = choose_pageable(rates)
        log.info(
            "%ss of %d bytes: %s, and %s where the slab is not page-locked; measured %s",
            self._direction.value,
            block_bytes,
            self.locked.value,
            self.pageable.value,
            ", ".join(f"{way.value} {rate / GB:.1f} GB/s" for way, rate in rates.items()),
        )

    def cost_of_pageable(self) -> str:
        """Return, in words, the speed of copies of slots that are not page-locked."""
        if not self._rates:
            return f"{self._direction.value}s as the driver does it"
        slow, quick = (self._rates[way] / GB for way in (self.pageable, self.locked))
        return f"{self._direction.value}s at {slow:.1f} instead of {quick:.1f} GB/s"

    def run(self, memory: Memory, pairs: Pairs, num_locked: int, stream: int) -> None:
        """Queue the copies of a job. Slots below `num_locked` are page-locked; the other slots are
        copied by the calling thread, through the staging buffer, or by the driver."""
        locked, rest = split_locked(pairs, num_locked)
        if locked:
            if self.locked is Way.KERNEL:
                self._run_kernel(memory, locked, stream)
            else:
                self._copy(make_batch(memory.geometry, self._direction, locked), stream)
        if not rest:
            return
        batch = make_batch(memory.geometry, self._direction, rest)
        if self.pageable is Way.PAGEABLE or self._staging is None:
            self._runtime.copy_each(batch, stream, to_host=self._is_store)
        elif self._is_store:
            self._staging.store(batch, stream, self._copy)
        else:
            self._staging.load(batch, stream, self._copy)

    def close(self) -> None:
        """Release the staging buffer; no copy may be queued afterwards. Raises CudaError."""
        if self._staging is not None:
            self._staging.close()

    def _copy(self, batch: Batch, stream: int) -> None:
        if self.locked is Way.BATCHED:
            self._runtime.copy_batch(batch, stream)
        else:
            self._runtime.copy_each(batch, stream, to_host=self._is_store)

    def _run_kernel(self, memory: Memory, pairs: Pairs, stream: int) -> None:
        blocks, slots = zip(*pairs, strict=True)
        if self._is_store:
            self._runtime.move_blocks(memory.pool, memory.slab, blocks, slots, stream)
        else:
            self._runtime.move_blocks(memory.slab, memory.pool, slots, blocks, stream)
