# SPDX-License-Identifier: Apache-2.0
"""Builds the tiers for chunks of one size and one namespace, below any host.

`open_chunk_tiers` first checks that the cache servers take such chunks. A server that refuses the
chunks raises an error; a server that is down raises no error."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc

from ...proto.v1 import cache_service_pb2 as messages
from ...tiers.assemble import open_hierarchy
from ...tiers.block import ALIGNMENT, BlockLayout
from ...tiers.remote.credentials import Credentials
from ...tiers.remote.membership import ServerAddress
from ...tiers.remote.server_link import open_channel
from ...tiers.settings.sizes import show_size
from ...tiers.settings.values import ConfigError
from ...tiers.tier_settings import TierSettings
from ...tiers.wire.protobuf_messages import layout_message
from ...tiers.wire.rpc import Stub
from ...tiers.wire.status import REFUSALS, WRONG_LAYOUT, verdict_of
from .chunk_settings import ChunkSettings
from .mover import Assembly
from .tiers import ChunkTiers, Limits

log = logging.getLogger(__name__)

LOOK_SECONDS = 3.0
# The fewest slots with which loads do not wait for each other, nor stores for the disk.
LEAST_SLOTS = 8


def chunk_layout(chunk_bytes: int) -> BlockLayout:
    """Return the layout of chunks of `chunk_bytes` bytes, without the layout inside a chunk, which
    is the host's and part of the keys. Raises ConfigError for an odd size."""
    if chunk_bytes < 2 or chunk_bytes % 2:
        raise ConfigError(
            f"a chunk has an even number of bytes, not {chunk_bytes}; what is compressed or packed "
            "to sizes of its own cannot be kept here"
        )
    return BlockLayout(1, 1, 1, chunk_bytes // 2, "fp8_e4m3")


def assemble(settings: TierSettings, layout: BlockLayout, namespace: bytes) -> Assembly:
    """Build slab, stores and hierarchy. A TierConfigError leaves no file or store open."""
    wakeup = threading.Event()
    return Assembly(*open_hierarchy(layout, settings, wakeup.set, namespace=namespace), wakeup)


def open_chunk_tiers(
    settings: ChunkSettings, chunk_bytes: int, namespace: bytes, host: str, folder: str
) -> ChunkTiers:
    """Open the tiers; the SSD tier writes to `folder`. Raises ConfigError, TierConfigError."""
    layout, above = chunk_layout(chunk_bytes), settings.ssd.paths
    if settings.cpu.capacity_bytes < LEAST_SLOTS * layout.slot_bytes:
        raise ConfigError(
            f"cpu_bytes is to hold {LEAST_SLOTS} chunks of {show_size(layout.slot_bytes)} at "
            f"least, not {show_size(settings.cpu.capacity_bytes)} in all; make it "
            f"{show_size(LEAST_SLOTS * layout.slot_bytes)} or more"
        )
    if above and settings.ssd.capacity_bytes // len(above) < layout.slot_bytes + ALIGNMENT:
        where = "" if len(above) == 1 else f" on each of {len(above)} disks"
        raise ConfigError(
            f"ssd_bytes holds not one chunk of {show_size(layout.slot_bytes)}{where}; make it more"
        )
    check_servers(settings, layout)
    _make_folders(above, settings.require_tiers)
    if above:
        settings = replace(settings, ssd=settings.ssd.below(folder))
    assembly = assemble(settings, layout, namespace)
    log.info(
        "StrataKV below %s: %s; %d chunks of %s in memory; namespace %s",
        host,
        ", ".join(assembly.hierarchy.tiers[1:]),
        assembly.slab.num_slots,
        show_size(layout.page_bytes),
        folder,
    )
    limits = Limits(settings.lookup_seconds, settings.read_seconds, settings.store_seconds)
    return ChunkTiers(assembly, limits)


def _make_folders(paths: Sequence[Path], is_each_required: bool) -> None:
    """Make the directories of the ssd tier. Raises ConfigError if all fail, or if one fails and
    `is_each_required`. Otherwise a missing disk may be mounted later."""
    refused = []
    for path in paths:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refused.append(f"{path} cannot be made ({error.strerror})")
    if refused and (is_each_required or len(refused) == len(paths)):
        raise ConfigError(f"ssd_path {', '.join(refused)}; give a directory that can be written")


def check_servers(settings: TierSettings, layout: BlockLayout) -> None:
    """Check that each cache server takes chunks of `layout`. Raises ConfigError if a server refuses
    them permanently, TierConfigError for credentials that cannot be read."""
    addresses, credentials = settings.cache_servers, settings.remote.credentials()
    if not addresses:
        return
    with ThreadPoolExecutor(len(addresses), thread_name_prefix="stratakv-look") as pool:
        for refusal in pool.map(lambda each: _refusal(each, layout, credentials), addresses):
            if refusal is not None:
                raise ConfigError(refusal)


def _refusal(address: ServerAddress, layout: BlockLayout, credentials: Credentials) -> str | None:
    request = messages.AttachRequest(layout=layout_message(layout))
    channel = open_channel(address, credentials)
    try:
        metadata = credentials.metadata(address)
        Stub(channel).attach(request, timeout=LOOK_SECONDS, metadata=metadata)
    except grpc.RpcError as error:
        verdict = verdict_of(error)
        if verdict.reason not in REFUSALS:
            log.warning("%s does not answer yet (%s)", address, verdict.reason)
            return None
        cure = (
            "one tenant has chunks of one size: give each model, and each way to split it, a "
            "tenant of its own"
            if verdict.reason == WRONG_LAYOUT
            else "mend that, or leave the server out"
        )
        return f"{address} refuses these chunks: {error.details()}; {cure}"
    finally:
        channel.close()
    return None
