# SPDX-License-Identifier: Apache-2.0
"""How one direction of the CUDA device copies: chosen by measurement, then done.

Knows where pool and slab lie, and nothing of events, order or threads.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ...kernels.copy.copy_engine import Batch, CudaError
from .base import Stream
from .copy_plan import (
    PAGEABLE_WAYS,
    Geometry,
    Pairs,
    Way,
    choose_locked,
    choose_pageable,
    make_batch,
    split_locked,
)
from .cuda_rates import Rates, measure_rates
from .cuda_runtime import Runtime
from .cuda_slab import locked_memory_advice
from .cuda_staging import StagingBuffer

log = logging.getLogger(__name__)

GB = 1e9


@dataclass(frozen=True, slots=True)
class Memory:
    """Pool and slab, as addresses and as uint8 `[blocks or slots, page_bytes]`."""

    geometry: Geometry
    pool: torch.Tensor
    slab: torch.Tensor


class Copier:
    """One direction. Its streams are handles; everything is queued in the one that is given."""

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
        """Measure, and choose from now on what was best. The stream must be idle."""
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
        """What it costs that slots are not page-locked, in words."""
        if not self._rates:
            return f"{self._direction.value}s as the driver does it"
        slow, quick = (self._rates[way] / GB for way in (self.pageable, self.locked))
        return f"{self._direction.value}s at {slow:.1f} instead of {quick:.1f} GB/s"

    def run(self, memory: Memory, pairs: Pairs, num_locked: int, stream: int) -> None:
        """Queue the copies of a job; those whose slots are not among the first `num_locked`, with
        the help of the calling thread, which reads or writes slots itself."""
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
        """Nothing may be queued any more. Raises CudaError."""
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
