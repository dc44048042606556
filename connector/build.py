# SPDX-License-Identifier: Apache-2.0
"""Puts the parts of offloading together: the tiers, the device, and the two sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..tiers.assemble import close_stores, make_admission, make_slab, open_stores
from ..tiers.base import StoreTier
from ..tiers.block import BlockLayout
from ..tiers.cpu import CpuSlab
from ..tiers.hierarchy.hierarchy import READ_SECONDS, WATERMARK, Hierarchy
from ..tiers.tag import Tagger
from ..tiers.tier_settings import TierSettings
from .device.choice import make_device
from .economics import Choice
from .fp8_codec import Fp8Codec
from .offload_scheduler import OffloadScheduler
from .offload_worker import OffloadWorker
from .transfer import CopySignal


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSettings(TierSettings):
    """The tiers, the device of the KV pool, and how blocks move between the two."""

    device: str = "cpu"  # cpu, cuda, or one of several GPUs, cuda:1
    load: Choice = Choice.AUTO
    watermark: float = WATERMARK
    read_seconds: float = READ_SECONDS


def build_offload(
    layout: BlockLayout,
    settings: OffloadSettings,
    *,
    namespace: bytes,
    progress: Callable[[int, int], None] | None = None,
    wrap_store: Callable[[StoreTier], StoreTier] | None = None,
) -> tuple[OffloadScheduler, OffloadWorker]:
    """The two sides of a connector, sharing one process.

    `namespace` binds the stores to whoever may read them, usually the root of the block identity.
    `progress` is called with bytes done and bytes in all while memory is faulted in, and on CUDA
    again, from another thread, while it is page-locked. `wrap_store`
    may put something around each store below the slab, such as
    `tiers/fault_injection/store.py` for a drill.
    Raises TierConfigError for sizes, paths and names that cannot work, and for a device that is not
    there; nothing stays open then. A store that is down is waited for behind the scenes, unless the
    settings require it: then TierDown says which.
    """
    # The stores first: faulting a slab in takes seconds, and a bad path should not wait for that.
    stores = open_stores(layout, settings, namespace=namespace, codecs={"fp8": Fp8Codec})
    try:
        if wrap_store is not None:
            stores = [wrap_store(store) for store in stores]
        slab = make_slab(layout, settings.cpu, progress)
        try:
            return _connect(slab, stores, settings, progress)
        except BaseException:
            slab.close()
            raise
    except BaseException:
        close_stores(stores)
        raise


def _connect(
    slab: CpuSlab,
    stores: list[StoreTier],
    settings: OffloadSettings,
    progress: Callable[[int, int], None] | None,
) -> tuple[OffloadScheduler, OffloadWorker]:
    device = make_device(settings.device, progress)
    signal = CopySignal()
    ssd = settings.ssd
    hierarchy = Hierarchy(
        slab,
        stores,
        wakeup=signal.wake,
        watermark=settings.watermark,
        read_seconds=settings.read_seconds,
        inclusive=ssd is None or not ssd.exclusive,
        admission=None if ssd is None else make_admission(slab.layout, ssd),
        tagger=Tagger(slab.layout.layout_id(), slab.layout.page_bytes),
    )
    device.register_slab(slab)
    if stores:
        device.make_digests()
    scheduler_side = OffloadScheduler(
        hierarchy, slab.layout.block_size, signal, choice=settings.load
    )
    return scheduler_side, OffloadWorker(device, signal)
