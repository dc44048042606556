# SPDX-License-Identifier: Apache-2.0
"""A short calibration: how fast each way to copy is on this machine, in bytes per second.

It copies scratch memory only, never the pool or the slab, in pieces of the size of a block that
lie apart. Some milliseconds in all; a kernel, which has to be compiled, is tried only for blocks so
small that the copy engine is known to be slow. Knows nothing of how the figures are used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from ...kernels.choice import KernelRefused
from ...kernels.copy.copy_engine import Batch, CudaError
from .base import Stream
from .copy_plan import FRAGMENT_BYTES, Way
from .cuda_events import Point
from .cuda_runtime import Runtime
from .cuda_staging import StagingBuffer

log = logging.getLogger(__name__)

ROUNDS = 3
MOST_COPIES = 256  # in a round; some ways take microseconds for each
Rates = dict[Way, float]


def measure_rates(
    runtime: Runtime, staging: StagingBuffer, stream: int, direction: Stream, block_bytes: int
) -> Rates:
    """One figure for each way that works here. `staging` must be idle."""
    locked = staging.memory.tensor()
    size = min(block_bytes, locked.numel() // 2)
    count = min(MOST_COPIES, locked.numel() // size)
    on_device = runtime.device_memory(count * size)
    ordinary = torch.zeros(count * size, dtype=torch.uint8)
    to_host = direction is Stream.STORE
    # Reversed, so that no two are neighbours.
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
                raise  # there is always this one to fall back to, or there is no device
            log.warning("no copies by %s here: %s", way.value, error)
    return rates


def _best_seconds(runtime: Runtime, stream: int, launch: Callable[[], None]) -> float:
    """The best of a few, by the clock of the CPU, which takes part in some of the ways."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        launch()
        Point(runtime, stream).synchronise()
        best = min(best, time.perf_counter() - began)
    return best
