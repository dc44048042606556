# SPDX-License-Identifier: Apache-2.0
"""Puts the parts of offloading together: slab, stores, hierarchy, device, and the two sides.

Takes plain settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..tiers.admission import DEFAULT_FILTER, AdmissionFilter, WriteBudget, make_filter
from ..tiers.base import StoreTier
from ..tiers.block import BlockLayout
from ..tiers.codecs.choice import DEFAULT_CODEC, make_codec
from ..tiers.cpu import CpuSlab
from ..tiers.errors import TierDown
from ..tiers.hierarchy.hierarchy import READ_SECONDS, WATERMARK, Hierarchy
from ..tiers.mac_key import MacKey
from ..tiers.policies.choice import DEFAULT_POLICY, DEFAULT_SSD_POLICY, policy_factory
from ..tiers.registry import TierRequest, open_tier
from ..tiers.remote.address import ServerAddress
from ..tiers.remote.credentials import Credentials
from ..tiers.ssd.store import SsdStore
from ..tiers.standby import open_or_wait
from ..tiers.tag import Tagger
from .device.choice import make_device
from .economics import Choice
from .fp8_codec import Fp8Codec
from .offload_scheduler import OffloadScheduler
from .offload_worker import OffloadWorker
from .transfer import CopySignal

MIB = 1024**2
# Blocks waiting to be read or written; more are refused, and stores are dropped before loads.
QUEUE_BYTES = 256 * MIB
CLOSE_SECONDS = 5.0
REQUIRED_SECONDS = 10.0  # for cache servers to be attached, where they must be


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdSettings:
    """The SSD tier. `daily_bytes` bounds what is written to it, shutdown apart; `mac_key` seals it
    against whoever else can write there."""

    path: Path
    capacity_bytes: int
    durability: str = "sync"
    codec: str = DEFAULT_CODEC
    policy: str = DEFAULT_SSD_POLICY
    admission: str = DEFAULT_FILTER
    daily_bytes: int | None = None
    exclusive: bool = False
    io_threads: int = 4
    mac_key: MacKey | None = None


@dataclass(frozen=True, slots=True)
class RemoteTier:
    """Cache servers, which are one tier together, and what is shown to them. With a `tag_key` only
    blocks are taken from them whose tags were made with it."""

    addresses: Sequence[ServerAddress]
    credentials: Credentials = field(default_factory=Credentials)
    tag_key: MacKey | None = None  # of all engines that share blocks; no server has it


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSettings:
    """The tiers from the slab down. `others` are names of tiers that other packages bring."""

    cpu_bytes: int
    device: str = "cpu"  # where the KV pool is: cpu, cuda, or one of several GPUs, cuda:1
    huge_pages: bool = False
    policy: str = DEFAULT_POLICY
    load: Choice = Choice.AUTO
    ssd: SsdSettings | None = None
    remote: RemoteTier | None = None
    others: Sequence[str] = ()
    other_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    require: bool = False  # refuse to start without one of the stores below the slab
    populate_threads: int = 2
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
    stores: list[StoreTier] = []
    try:
        if settings.ssd is not None:
            opener: Callable[[], StoreTier] = partial(_open_ssd, layout, settings.ssd, namespace)
            stores.append(_open("ssd", layout, opener, settings.require))
        for name in settings.others:
            request = TierRequest(name, layout, namespace, settings.other_options.get(name, {}))
            opener = partial(open_tier, request)
            stores.append(_open(name, layout, opener, settings.require))
        if settings.remote is not None:
            stores.append(_open_remote(layout, settings.remote, settings.require))
        if wrap_store is not None:
            stores = [wrap_store(store) for store in stores]
        slab = CpuSlab(
            layout,
            settings.cpu_bytes,
            populate_threads=settings.populate_threads,
            huge_pages=settings.huge_pages,
            progress=progress,
            policy=policy_factory(settings.policy)(settings.cpu_bytes // layout.slot_bytes),
        )
        try:
            return _connect(slab, stores, settings, progress)
        except BaseException:
            slab.close()
            raise
    except BaseException:
        for opened in stores:
            opened.close(CLOSE_SECONDS)
        raise


def _open(
    name: str, layout: BlockLayout, opener: Callable[[], StoreTier], require: bool
) -> StoreTier:
    return opener() if require else open_or_wait(name, layout, opener)


def _open_ssd(layout: BlockLayout, ssd: SsdSettings, namespace: bytes) -> SsdStore:
    return SsdStore(
        ssd.path,
        layout,
        ssd.capacity_bytes,
        namespace=namespace,
        durability=ssd.durability,
        codec=make_codec(ssd.codec, layout, {"fp8": Fp8Codec}),
        mac_key=ssd.mac_key,
        policy=ssd.policy,
        io_threads=ssd.io_threads,
        queue_bytes=max(QUEUE_BYTES, 4 * layout.slot_bytes),
    )


def _open_remote(layout: BlockLayout, remote: RemoteTier, require: bool) -> StoreTier:
    # Here, so that engines without cache servers do not load grpc.
    from ..tiers.remote.remote_store import open_remote
    from ..tiers.remote.settings import RemoteSettings

    tag_key = None if remote.tag_key is None else remote.tag_key.tag_key
    settings = RemoteSettings(credentials=remote.credentials, tag_key=tag_key)
    store = open_remote(remote.addresses, layout, settings)
    if require and not store.wait_up(REQUIRED_SECONDS):
        store.close(CLOSE_SECONDS)
        servers = ", ".join(map(str, remote.addresses))
        raise TierDown(
            f"not every cache server of {servers} could be attached within {REQUIRED_SECONDS:g} s; "
            "start them, or start without them"
        )
    return store


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
        admission=None if ssd is None else _admission(ssd, slab.layout),
        tagger=Tagger(slab.layout.layout_id(), slab.layout.page_bytes),
    )
    device.register_slab(slab)
    if stores:
        device.make_digests()
    scheduler_side = OffloadScheduler(
        hierarchy, slab.layout.block_size, signal, choice=settings.load
    )
    return scheduler_side, OffloadWorker(device, signal)


def _admission(ssd: SsdSettings, layout: BlockLayout) -> AdmissionFilter:
    admission = make_filter(ssd.admission, ssd.capacity_bytes // layout.slot_bytes)
    if ssd.daily_bytes is None:
        return admission
    return WriteBudget(admission, ssd.daily_bytes / layout.page_bytes)
