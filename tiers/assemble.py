# SPDX-License-Identifier: Apache-2.0
"""Builds slab, stores and admission filter from settings: for an engine, and for each tenant of a
cache server.

Everything here raises TierConfigError for sizes, paths and names that cannot work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .admission import AdmissionFilter, AdmitAll, WriteBudget, make_filter
from .base import StoreTier
from .block import BlockLayout
from .codecs.known_codecs import CodecFactory, make_codec
from .errors import TierConfigError, TierDown
from .mac_key import MacKey, read_mac_key
from .policies.known_policies import policy_factory
from .registry import TierRequest, open_tier
from .reopening_store import open_or_wait
from .slab.cpu_slab import CpuSlab
from .ssd.disk_array import Disk, SeveralDisks
from .ssd.store import SsdStore
from .tier_settings import CpuSettings, SsdSettings, TierSettings

if TYPE_CHECKING:
    from .remote.membership import ServerAddress
    from .remote.peer_tier import PeerTier
    from .remote.remote_store import RemoteStore

# Blocks waiting to be read or written; more are refused, and stores are dropped before loads.
QUEUE_BYTES = 256 * 1024**2
CLOSE_SECONDS = 5.0
REQUIRED_SECONDS = 10.0  # for cache servers to be attached, where they must be


def make_slab(
    layout: BlockLayout,
    cpu: CpuSettings,
    progress: Callable[[int, int], None] | None = None,
    *,
    is_served: bool = False,
) -> CpuSlab:
    """The memory for blocks. `progress` is called with bytes done and bytes in all. `is_served`: to
    other engines, by another process."""
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
    """The filter of what is written to the SSD, if there is one."""
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
    """The store on the disk, or on all disks. `codecs` are those beside the ones in `codecs/`. The
    tier goes on without disks that are down until they come back; raises TierDown where they are
    required. `after_opening` is called with the folder of each store that was opened, and may raise
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
        queue_bytes=max(QUEUE_BYTES, 4 * layout.slot_bytes),
        create=create,
    )
    try:
        if after_opening is not None:
            after_opening(store.path)
    except BaseException:
        store.close(0.0)
        raise
    return store


def open_stores(
    layout: BlockLayout,
    settings: TierSettings,
    *,
    namespace: bytes,
    codecs: Mapping[str, CodecFactory] | None = None,
) -> list[StoreTier]:
    """The stores below an engine's slab, the fastest first. One that is down is waited for behind
    the scenes, unless the settings require it: then TierDown says which. Nothing stays open after
    an error."""
    require = settings.require
    stores: list[StoreTier] = []
    try:
        if (ssd := settings.ssd) is not None:
            key = None
            if ssd.mac_key_file is not None:
                for path in ssd.paths:
                    key = read_mac_key(ssd.mac_key_file, "--kv-offload-ssd-mac-key-file", path)
            store = open_ssd(
                layout, ssd, namespace=namespace, mac_key=key, codecs=codecs, require=require
            )
            stores.append(store)
        for name in settings.others:
            request = TierRequest(name, layout, namespace, settings.other_options.get(name, {}))
            opener = partial(_open_other, request)
            stores.append(open_or_wait(name, layout, opener, require=require))
        if settings.peers:
            stores.append(_open_peers(layout, settings, namespace))
        if settings.addresses:
            stores.append(_open_remote(layout, settings, namespace))
    except BaseException:
        close_stores(stores)
        raise
    return stores


def _open_other(request: TierRequest, create: bool) -> StoreTier:
    return open_tier(request)


def close_stores(stores: list[StoreTier]) -> None:
    """For when what they were opened for cannot be built."""
    for store in stores:
        store.close(CLOSE_SECONDS)


def _open_remote(layout: BlockLayout, settings: TierSettings, namespace: bytes) -> StoreTier:
    # Here, so that engines without cache servers do not load grpc.
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
    store = open_remote(settings.addresses, layout, client)
    return _attached(store, settings, "cache server", settings.addresses)


def _open_peers(layout: BlockLayout, settings: TierSettings, namespace: bytes) -> StoreTier:
    from .remote.peer_tier import PeerTier
    from .remote.remote_settings import RemoteSettings

    # No key for tags: who has these blocks is an engine, which would have it too.
    client = RemoteSettings(credentials=settings.peer.credentials(), namespace=namespace)
    tier = PeerTier(settings.peers, layout, client)
    return _attached(tier, settings, "engine", settings.peers)


def _attached(
    store: RemoteStore | PeerTier,
    settings: TierSettings,
    what: str,
    addresses: Sequence[ServerAddress],
) -> StoreTier:
    """The store, once all that it asks are attached, where the settings require it."""
    if settings.require and not store.wait_up(REQUIRED_SECONDS):
        store.close(CLOSE_SECONDS)
        raise TierDown(
            f"not every {what} of {', '.join(map(str, addresses))} could be attached within "
            f"{REQUIRED_SECONDS:g} s; start them, or start without them"
        )
    return store
