# SPDX-License-Identifier: Apache-2.0
"""Puts the parts of offloading together: the tiers and the scheduler side, the device and the
worker side, which may live in another process."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..tiers.assemble import close_stores, make_admission, make_slab, open_stores
from ..tiers.base import StoreTier
from ..tiers.block import BlockLayout
from ..tiers.cache_server.slab_serving.serving import SlabServing
from ..tiers.errors import TierConfigError
from ..tiers.hierarchy.hierarchy import Hierarchy
from ..tiers.hierarchy.hierarchy_options import READ_SECONDS, WATERMARK, HierarchyOptions
from ..tiers.slab.cpu_slab import CpuSlab
from ..tiers.tag import Tagger
from ..tiers.tier_settings import TierSettings
from .connector_context import ConnectorContext
from .copy_signal import CopySignal
from .costs.economics import Choice
from .costs.rates import PrefillRate
from .device.base import SlabMemory
from .device.device_choice import make_device
from .device.fp8_codec import Fp8Codec
from .offload_scheduler import OffloadScheduler
from .offload_worker import OffloadWorker
from .parts import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSettings(TierSettings):
    """The tiers, the device of the KV pool, and how blocks move between the two."""

    device: str = "cpu"  # cpu, cuda, or one of several GPUs, cuda:1
    load: Choice = Choice.AUTO
    watermark: float = WATERMARK
    read_seconds: float = READ_SECONDS


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What a worker side is built from, in the process of the scheduler side or, since it is plain,
    in any other that has the slab's file descriptor."""

    layout: BlockLayout
    slab_fd: int
    num_slots: int
    device: str
    makes_digests: bool  # of what it stores, for tiers below the slab and other engines


class AttachedSlab:
    """The memory of a slab of another process."""

    def __init__(self, description: WorkerDescription) -> None:
        self.layout = description.layout
        self.num_slots = description.num_slots
        self._map = mmap.mmap(description.slab_fd, self.num_slots * self.layout.slot_bytes)

    def memory(self) -> memoryview:
        """All slots, one after the other."""
        return memoryview(self._map)


class BuiltSide(NamedTuple):
    """The scheduler side, what the worker side is built from, and the slab as it is mapped here."""

    side: OffloadScheduler
    description: WorkerDescription
    slab: CpuSlab


def build_offload(
    layout: BlockLayout,
    settings: OffloadSettings,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> tuple[OffloadScheduler, OffloadWorker]:
    """The two sides of a connector in one process; the arguments are those of
    `build_scheduler_side`. `progress` is called again, on CUDA, from another thread, while memory
    is page-locked."""
    built = build_scheduler_side(layout, settings, progress=progress, **options)
    try:
        worker = build_worker_side(
            built.description, built.side.note_ended, slab=built.slab, progress=progress
        )
    except BaseException:
        built.side.shutdown(0.0)
        raise
    return built.side, worker


def build_scheduler_side(
    layout: BlockLayout,
    settings: OffloadSettings,
    *,
    namespace: bytes,
    progress: Callable[[int, int], None] | None = None,
    wrap_store: Callable[[StoreTier], StoreTier] | None = None,
    num_groups: int = 1,
    prefill: PrefillRate | None = None,
    block_tokens: int | None = None,
    parts: Parts | None = None,
) -> BuiltSide:
    """The scheduler side, and what the worker side is built from.

    `namespace` binds the stores to whoever may read them, usually the root of the block identity.
    `progress` is called with bytes done and bytes in all while memory is faulted in. `wrap_store`
    may put something around each store below the slab, such as
    `tiers/testing/faulty_store.py` for a drill. `num_groups` cache groups have blocks of this
    layout; `parts` says more of them, where they do not attend to everything or live on several
    ranks. `prefill` is what computing costs, where somebody else measures it. `block_tokens`: of a
    block whose layout does not say so, since its bytes are another engine's.
    Raises TierConfigError for sizes, paths and names that cannot work; nothing stays open then. A
    store that is down is waited for behind the scenes, unless the settings require it: then
    TierDown says which.
    """
    if settings.load is Choice.OVERLAP and parts is not None and parts.is_windowed:
        raise TierConfigError(
            "a load of this model cannot be overlapped with its computing, because some of its "
            "layers see only the tokens of a window and their blocks come for one length; take "
            "--kv-offload-load auto or always"
        )
    # The stores first: faulting a slab in takes seconds, and a bad path should not wait for that.
    stores = open_stores(layout, settings, namespace=namespace, codecs={"fp8": Fp8Codec})
    try:
        if wrap_store is not None:
            stores = [wrap_store(store) for store in stores]
        is_served = settings.serve_at is not None
        slab = make_slab(layout, settings.cpu, progress, is_served=is_served)
        serving: SlabServing | None = None
        try:
            if settings.serve_at is not None:
                serving = SlabServing(slab, settings.serve_at, settings.serve, namespace=namespace)
            if parts is None:
                parts = Parts(block_tokens or layout.block_size, [None] * num_groups)
            side = _connect(slab, stores, settings, parts, prefill, serving)
        except BaseException:
            if serving is not None:
                serving.close(0.0)
            slab.close()
            raise
    except BaseException:
        close_stores(stores)
        raise
    description = WorkerDescription(
        slab.layout,
        slab.fd,
        slab.num_slots,
        settings.device,
        makes_digests=bool(stores) or is_served,
    )
    return BuiltSide(side, description, slab)


def build_worker_side(
    description: WorkerDescription,
    wakeup: Callable[[int], None],
    *,
    slab: SlabMemory | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> OffloadWorker:
    """The worker side. `wakeup` has `OffloadScheduler.note_ended` called, in whatever process that
    lives. `slab`: its memory, where this process has it mapped already. Raises TierConfigError for
    a device that is not there."""
    device = make_device(description.device, progress)
    if slab is None:
        slab = AttachedSlab(description)
    device.register_slab(slab)
    if description.makes_digests:
        device.make_digests()
    return OffloadWorker(device, wakeup)


def _connect(
    slab: CpuSlab,
    stores: list[StoreTier],
    settings: OffloadSettings,
    parts: Parts,
    prefill: PrefillRate | None,
    serving: SlabServing | None,
) -> OffloadScheduler:
    signal = CopySignal()
    ssd = settings.ssd
    hierarchy = Hierarchy(
        slab,
        stores,
        wakeup=signal.wake,
        options=HierarchyOptions(
            watermark=settings.watermark,
            read_seconds=settings.read_seconds,
            inclusive=ssd is None or not ssd.exclusive,
            admission=make_admission(slab.layout, ssd),
            tagger=Tagger(slab.layout.layout_id(), slab.layout.page_bytes),
        ),
    )
    prefill = PrefillRate() if prefill is None else prefill
    connector = ConnectorContext(hierarchy, parts, signal, settings.load, prefill)
    return OffloadScheduler(connector, copies_beside=settings.device != "cpu", serving=serving)
