# SPDX-License-Identifier: Apache-2.0
"""Builds the two sides of a connector: the scheduler side with the tiers, and the worker side with
the copy device, perhaps in another process."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..tiers.assemble import CLOSE_SECONDS, open_hierarchy
from ..tiers.block import BlockLayout
from ..tiers.cache_server.slab_serving.serving import SlabServing
from ..tiers.errors import TierConfigError
from ..tiers.slab.cpu_slab import CpuSlab
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


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """The plain data from which a worker side is built, in the scheduler side's process or in
    another process that has the slab's file descriptor."""

    layout: BlockLayout
    slab_fd: int
    num_slots: int
    device: str
    makes_digests: bool  # of stored blocks, for lower tiers and other engines


class AttachedSlab:
    """The memory of a slab that another process has created."""

    def __init__(self, description: WorkerDescription) -> None:
        self.layout = description.layout
        self.num_slots = description.num_slots
        self._map = mmap.mmap(description.slab_fd, self.num_slots * self.layout.slot_bytes)

    def memory(self) -> memoryview:
        return memoryview(self._map)


class BuiltSide(NamedTuple):
    """The scheduler side, the description of its worker side, and the slab in this process."""

    side: OffloadScheduler
    description: WorkerDescription
    slab: CpuSlab


def build_offload(
    layout: BlockLayout,
    settings: TierSettings,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> tuple[OffloadScheduler, OffloadWorker]:
    """Build both sides of a connector in one process, with the arguments of `build_scheduler_side`.
    On CUDA a background thread also calls `progress` while the slab is page-locked."""
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
    settings: TierSettings,
    *,
    namespace: bytes,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    prefill: PrefillRate | None = None,
    parts: Parts | None = None,
) -> BuiltSide:
    """Build the scheduler side, and the description from which the worker side is built.

    Only engines with the same `namespace`, usually the root of the block identity, read each
    other's blocks. `device` is the device with the KV pool: cpu, cuda, or one of several GPUs,
    cuda:1. `progress` is called with the numbers of bytes done and of all bytes while the slab's
    memory is faulted in. `prefill` is the cost of computing tokens, if the caller measures it.
    `parts` describes the attention of the layout's cache groups and the tensor-parallel ranks; by
    default there is one group with full attention. Raises TierConfigError, and leaves no file or
    store open, for sizes, paths and names that cannot work. A store that is down is opened later in
    the background; a required store that is down raises TierDown, which names the store."""
    choice = Choice(settings.load)
    if choice is Choice.OVERLAP and parts is not None and parts.is_windowed:
        raise TierConfigError(
            "a load of this model cannot be overlapped with its computing, because some of its "
            "layers see only the tokens of a window, or carry states, and what they need comes for "
            "one length; take --kv-offload-load auto or always"
        )
    signal = CopySignal()
    tiers = open_hierarchy(
        layout,
        settings,
        signal.wake,
        namespace=namespace,
        codecs={Fp8Codec.name: Fp8Codec},
        progress=progress,
    )
    slab: CpuSlab = tiers.slab
    serving: SlabServing | None = None
    try:
        if (address := settings.listen_address) is not None:
            serving = SlabServing(slab, address, settings.serve, namespace=namespace)
        if parts is None:
            parts = Parts(layout.block_size, [None])
        prefill = PrefillRate() if prefill is None else prefill
        copies_beside = device != "cpu"
        context = ConnectorContext(
            tiers.hierarchy, parts, signal, choice, prefill, copies_beside=copies_beside
        )
        side = OffloadScheduler(context, serving=serving)
    except BaseException:
        if serving is not None:
            serving.close(0.0)
        tiers.hierarchy.close(CLOSE_SECONDS)
        raise
    makes_digests = tiers.hierarchy.has_stores or slab.is_served
    description = WorkerDescription(slab.layout, slab.fd, slab.num_slots, device, makes_digests)
    return BuiltSide(side, description, slab)


def build_worker_side(
    description: WorkerDescription,
    wakeup: Callable[[int], None],
    *,
    slab: SlabMemory | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> OffloadWorker:
    """Build the worker side. A call of `wakeup` must lead to a call of
    `OffloadScheduler.note_ended`, in this process or another. `slab` is the slab's memory, if this
    process has mapped it already. Raises TierConfigError for a device that does not exist."""
    device = make_device(description.device, progress)
    if slab is None:
        slab = AttachedSlab(description)
    device.register_slab(slab)
    if description.makes_digests:
        device.make_digests()
    return OffloadWorker(device, wakeup)
