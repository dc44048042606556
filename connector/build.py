# SPDX-License-Identifier: Apache-2.0
"""Puts the parts of offloading together: slab, stores, hierarchy, device, and the two sides.

Takes plain arguments and knows nothing of the engine's configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..tiers.base import StoreTier
from ..tiers.block import BlockLayout
from ..tiers.cpu import CpuSlab
from ..tiers.hierarchy import READ_SECONDS, WATERMARK, Hierarchy
from ..tiers.ssd.store import SsdStore
from .device.cpu import CpuCopyDevice
from .offload_scheduler import OffloadScheduler
from .offload_worker import OffloadWorker
from .transfer import CopySignal

MIB = 1024**2
# Blocks waiting to be read or written; more are refused, and stores are dropped before loads.
QUEUE_BYTES = 256 * MIB
CLOSE_SECONDS = 5.0


def build_offload(
    layout: BlockLayout,
    *,
    namespace: bytes,
    cpu_bytes: int,
    ssd_path: Path | None = None,
    ssd_bytes: int = 0,
    io_threads: int = 4,
    populate_threads: int = 2,
    watermark: float = WATERMARK,
    read_seconds: float = READ_SECONDS,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[OffloadScheduler, OffloadWorker]:
    """The two sides of a connector for the CPU device, sharing one process.

    `namespace` binds the SSD store to whoever may read it, usually the root of the block identity.
    `progress` is called with bytes done and bytes in all while memory is faulted in. Raises
    TierConfigError for sizes and paths that cannot work; nothing stays open then.
    """
    # The store first: faulting a slab in takes seconds, and a bad path should not wait for that.
    stores: list[StoreTier] = []
    try:
        if ssd_path is not None:
            store = SsdStore(
                ssd_path,
                layout,
                ssd_bytes,
                namespace=namespace,
                io_threads=io_threads,
                queue_bytes=max(QUEUE_BYTES, 4 * layout.slot_bytes),
            )
            stores.append(store)
        slab = CpuSlab(layout, cpu_bytes, populate_threads=populate_threads, progress=progress)
        try:
            return _connect(slab, stores, watermark, read_seconds)
        except BaseException:
            slab.close()
            raise
    except BaseException:
        for opened in stores:
            opened.close(CLOSE_SECONDS)
        raise


def _connect(
    slab: CpuSlab, stores: list[StoreTier], watermark: float, read_seconds: float
) -> tuple[OffloadScheduler, OffloadWorker]:
    signal = CopySignal()
    hierarchy = Hierarchy(
        slab, stores, wakeup=signal.wake, watermark=watermark, read_seconds=read_seconds
    )
    device = CpuCopyDevice()
    device.register_slab(slab)
    scheduler_side = OffloadScheduler(hierarchy, slab.layout.block_size, signal)
    return scheduler_side, OffloadWorker(device, signal)
