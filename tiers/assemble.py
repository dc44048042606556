# SPDX-License-Identifier: Apache-2.0
"""Builds the slab, stores and admission filter of an engine, or of a tenant of a cache server, from
settings.

All functions raise TierConfigError for invalid sizes, paths and names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .admission import AdmissionFilter, AdmitAll, WriteBudget, make_filter
from .base import StoreTier
from .block import BlockLayout
from .codecs.known_codecs import CodecFactory, make_codec
from .errors import TierConfigError, TierDown
from .hierarchy.hierarchy import Hierarchy
from .hierarchy.hierarchy_options import HierarchyOptions
from .mac_key import MacKey, read_mac_key
from .policies.known_policies import policy_factory
from .registry import TierRequest, open_tier
from .reopening_store import DiskStore, ReopeningStore
from .slab.cpu_slab import CpuSlab
from .ssd.disk_array import Disk, SeveralDisks
from .ssd.store import SsdStore
from .tag import Tagger
from .tier_settings import CpuSettings, SsdSettings, TierSettings

if TYPE_CHECKING:
    from .remote.membership import ServerAddress
    from .remote.peer_tier import PeerTier
    from .remote.remote_store import RemoteStore

CLOSE_SECONDS = 5.0
REQUIRED_SECONDS = 10.0  # the longest wait at start for required servers


class OpenHierarchy(NamedTuple):
    """An open hierarchy and its parts. Closing the hierarchy closes slab and stores."""

    hierarchy: Hierarchy
    slab: CpuSlab
    tagger: Tagger


def make_slab(
    layout: BlockLayout,
    cpu: CpuSettings,
    progress: Callable[[int, int], None] | None = None,
    *,
    is_served: bool = False,
) -> CpuSlab:
    """Make the slab. While the kernel allocates its pages, `progress` is called with the bytes done
    and in total. `is_served` says that another process serves the slab to other engines."""
    return CpuSlab(
        layout,
        cpu.capacity_bytes,
        populate_threads=cpu.populate_threads,
        huge_pages=cpu.huge_pages,
        progress=progress,
        policy=policy_factory(cpu.policy)(cpu.capacity_bytes // layout.slot_bytes),
        is_served=is_served,
    )


def make_admission(layout: BlockLayout, ssd: SsdSettings | None) -> AdmissionFilter:
    """Make the SSD tier's admission filter; without an SSD tier it admits every block."""
    if ssd is None:
        return AdmitAll()
    admission = make_filter(ssd.admission, ssd.capacity_bytes // layout.slot_bytes)
    if ssd.daily_bytes is None:
        return admission
    return WriteBudget(admission, ssd.daily_bytes / layout.page_bytes)


def open_ssd(
    layout: BlockLayout,
    ssd: SsdSettings,
    *,
    namespace: bytes,
    mac_key: MacKey | None = None,
    codecs: Mapping[str, CodecFactory] | None = None,
    require: bool = False,
    after_opening: Callable[[Path], None] | None = None,
) -> StoreTier:
    """Open the SSD tier on one disk or on several. `codecs` adds codecs to those in `codecs/`. The
    tier works without an unavailable disk and opens the disk later; with `require`, an unavailable
    disk raises TierDown. `after_opening` is called with each opened store's folder, and may raise
    TierDown."""
    open_one = partial(
        _open_disk,
        layout,
        namespace=namespace,
        mac_key=mac_key,
        codecs=codecs,
        after_opening=after_opening,
    )
    if not ssd.paths:
        raise TierConfigError("the ssd tier needs a directory")
    if len(ssd.paths) == 1:
        return open_or_wait("ssd", layout, partial(open_one, ssd), require=require)
    share = ssd.capacity_bytes // len(ssd.paths)
    disks: list[Disk] = []
    try:
        for path in ssd.paths:
            opener = partial(open_one, replace(ssd, path=path, capacity_bytes=share))
            store = open_or_wait(f"ssd in {path}", layout, opener, require=require)
            disks.append(Disk(os.path.realpath(path), store))
    except BaseException:
        close_stores([disk.store for disk in disks])
        raise
    return SeveralDisks(disks, layout)


def _open_disk(
    layout: BlockLayout,
    ssd: SsdSettings,
    create: bool,
    *,
    namespace: bytes,
    mac_key: MacKey | None,
    codecs: Mapping[str, CodecFactory] | None,
    after_opening: Callable[[Path], None] | None,
) -> SsdStore:
    assert ssd.path is not None
    store = SsdStore(
        ssd.path,
        layout,
        ssd.capacity_bytes,
        namespace=namespace,
        durability=ssd.durability,
        codec=make_codec(ssd.codec, layout, codecs),
        mac_key=mac_key,
        policy=ssd.policy,
        io_threads=ssd.io_threads,
        create=create,
    )
    try:
        if after_opening is not None:
            after_opening(store.path)
    except BaseException:
        store.close(0.0)
        raise
    return store


def open_hierarchy(
    layout: BlockLayout,
    settings: TierSettings,
    wakeup: Callable[[], None],
    *,
    namespace: bytes,
    codecs: Mapping[str, CodecFactory] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> OpenHierarchy:
    """Open the slab, stores and hierarchy of an engine. `wakeup` is called, on any thread, when the
    hierarchy may have work. `progress` is passed to `make_slab`. Raises the errors of
    `open_stores`. If a part fails to open, the opened parts are closed."""
    # The stores are opened before the slab: page faults of a slab take seconds, and a wrong path
    # should fail before.
    stores = open_stores(layout, settings, namespace=namespace, codecs=codecs)
    try:
        is_served = settings.listen_address is not None
        slab = make_slab(layout, settings.cpu, progress, is_served=is_served)
        try:
            tagger = Tagger(layout.layout_id(), layout.page_bytes)
            hierarchy = Hierarchy(
                slab,
                stores,
                wakeup=wakeup,
                options=HierarchyOptions(
                    watermark=settings.watermark,
                    read_seconds=settings.read_seconds,
                    inclusive=not (settings.has_ssd and settings.ssd.exclusive),
                    admission=make_admission(layout, settings.ssd if settings.has_ssd else None),
                    tagger=tagger,
                    keeps_unwritten=settings.keeps_unwritten,
                ),
            )
        except BaseException:
            slab.close()
            raise
    except BaseException:
        close_stores(stores)
        raise
    return OpenHierarchy(hierarchy, slab, tagger)


def open_stores(
    layout: BlockLayout,
    settings: TierSettings,
    *,
    namespace: bytes,
    codecs: Mapping[str, CodecFactory] | None = None,
) -> list[StoreTier]:
    """Open the stores below an engine's slab, the fastest first. `settings.drill` may inject faults
    into the stores. A thread keeps trying to open a store that is down; if `require_tiers` is set,
    TierDown is raised instead. If a store fails to open, the opened stores are closed."""
    require, drill = settings.require_tiers, settings.drill
    stores: list[StoreTier] = []
    try:
        if settings.has_ssd:
            ssd, key = settings.ssd, None
            if ssd.mac_key_file is not None:
                for path in ssd.paths:
                    key = read_mac_key(ssd.mac_key_file, "--kv-offload-ssd-mac-key-file", path)
            store = open_ssd(
                layout, ssd, namespace=namespace, mac_key=key, codecs=codecs, require=require
            )
            stores.append(store)
        for name in settings.other_tiers:
            request = TierRequest(name, layout, namespace, settings.tier_options.get(name, {}))
            opener = partial(_open_other, request)
            stores.append(open_or_wait(name, layout, opener, require=require))
        if settings.peer_addresses:
            stores.append(_open_peers(layout, settings, namespace))
        if settings.cache_servers:
            stores.append(_open_remote(layout, settings, namespace))
        return stores if drill is None else [drill.wrap(store) for store in stores]
    except BaseException:
        close_stores(stores)
        raise


def open_or_wait(
    name: str, layout: BlockLayout, open_it: Callable[[bool], StoreTier], *, require: bool = False
) -> StoreTier:
    """Open a store with `open_it`. If `open_it` raises TierDown, the store is opened later; with
    `require`, the error is raised. A DiskStore that loses its disk is reopened when the disk is
    back. `open_it(False)` must open only an existing store. Raises all other errors of
    `open_it`."""
    try:
        store = open_it(True)
    except TierDown as error:
        if require:
            raise
        return ReopeningStore.wait_for(name, layout, open_it, error)
    return ReopeningStore(name, layout, open_it, store) if isinstance(store, DiskStore) else store


def _open_other(request: TierRequest, create: bool) -> StoreTier:
    return open_tier(request)


def close_stores(stores: list[StoreTier]) -> None:
    """Close the stores, after another part failed to open. Each store may take `CLOSE_SECONDS`."""
    for store in stores:
        store.close(CLOSE_SECONDS)


def _open_remote(layout: BlockLayout, settings: TierSettings, namespace: bytes) -> StoreTier:
    # Imported here, so that engines without cache servers do not load grpc.
    from .remote.remote_settings import RemoteSettings
    from .remote.remote_store import open_remote

    file = settings.remote.tag_key_file
    key = None if file is None else read_mac_key(file, "--kv-offload-remote-tag-key-file").tag_key
    client = RemoteSettings(
        credentials=settings.remote.credentials(),
        lookup_seconds=settings.remote.lookup_seconds,
        tag_key=key,
        namespace=namespace,
    )
    store = open_remote(settings.cache_servers, layout, client)
    return _attached(store, settings, "cache server", settings.cache_servers)


def _open_peers(layout: BlockLayout, settings: TierSettings, namespace: bytes) -> StoreTier:
    from .remote.peer_tier import PeerTier
    from .remote.remote_settings import RemoteSettings

    # Peers use no tag key: the engines that serve the blocks would have the key too.
    client = RemoteSettings(credentials=settings.peer.credentials(), namespace=namespace)
    tier = PeerTier(settings.peer_addresses, layout, client)
    return _attached(tier, settings, "engine", settings.peer_addresses)


def _attached(
    store: RemoteStore | PeerTier,
    settings: TierSettings,
    what: str,
    addresses: Sequence[ServerAddress],
) -> StoreTier:
    """Return the store. With `require_tiers`, first wait until all its servers are attached, and
    raise TierDown after `REQUIRED_SECONDS`."""
    if settings.require_tiers and not store.wait_up(REQUIRED_SECONDS):
        store.close(CLOSE_SECONDS)
        raise TierDown(
            f"not every {what} of {', '.join(map(str, addresses))} could be attached within "
            f"{REQUIRED_SECONDS:g} s; start them, or start without them"
        )
    return store
