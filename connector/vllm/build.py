# SPDX-License-Identifier: Apache-2.0
"""Puts the tiers together that lie below one vLLM engine.

Before that it looks at the cache servers: one that will never take this engine's chunks is a reason
not to start, one that is down is none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
import numpy as np

from ...proto.v1 import cache_service_pb2 as messages
from ...tiers.assemble import close_stores, make_admission, make_slab, open_stores
from ...tiers.block import BlockLayout
from ...tiers.hierarchy.hierarchy import WATERMARK, Hierarchy
from ...tiers.remote.address import ServerAddress
from ...tiers.remote.credentials import Credentials
from ...tiers.remote.server_link import open_channel
from ...tiers.settings.sizes import show_size
from ...tiers.settings.values import ConfigError
from ...tiers.tag import Tagger
from ...tiers.wire.messages import layout_message
from ...tiers.wire.rpc import Stub
from ...tiers.wire.status import verdict_of
from ..economics import Choice, Economics
from ..rates import PrefillRate
from .identity import ChunkIdentity, ChunkKeys, chunk_layout
from .lookups import Lookups
from .settings import Settings
from .transfers import Transfers

log = logging.getLogger(__name__)

LOOK_SECONDS = 3.0
WRONG_LAYOUT = "layout"
# What no waiting mends.
REFUSALS = (WRONG_LAYOUT, "unauthenticated", "version", "invalid")


class Tiers(NamedTuple):
    """What a tier of vLLM's is made of."""

    hierarchy: Hierarchy
    transfers: Transfers
    lookups: Lookups
    economics: Economics
    prefill: PrefillRate


def build_tiers(
    settings: Settings, identity: ChunkIdentity, rows: np.ndarray[Any, Any], chunk_tokens: int
) -> Tiers:
    """The tiers below vLLM's region, whose chunks of `chunk_tokens` tokens are `rows`. Raises
    TierConfigError, or ConfigError, for what cannot work; nothing stays open then."""
    layout = chunk_layout(identity.chunk_bytes, identity.kv_dtype)
    tiers, root = settings.tiers(), identity.root()
    drill = settings.drill()
    wakeup = threading.Event()
    _check_servers(tiers.addresses, layout, tiers.remote.credentials())
    stores = open_stores(layout, tiers, namespace=identity.namespace())
    try:
        if drill is not None:
            log.warning("faults are injected on purpose (%s); this is a drill", settings.own.faults)
            stores = [drill.wrap(store) for store in stores]
        slab = make_slab(layout, tiers.cpu)
        try:
            hierarchy = Hierarchy(
                slab,
                stores,
                wakeup=wakeup.set,
                watermark=1.0 if settings.own.write_through else WATERMARK,
                read_seconds=settings.own.read_seconds,
                inclusive=tiers.ssd is None or not tiers.ssd.exclusive,
                admission=None if tiers.ssd is None else make_admission(layout, tiers.ssd),
                tagger=Tagger(layout.layout_id(), layout.page_bytes),
            )
            prefill = PrefillRate()
            economics = Economics(
                hierarchy.tiers,
                chunk_tokens,
                layout.page_bytes,
                Choice(settings.own.load),
                prefill=prefill,
            )
            lookups = Lookups(
                hierarchy,
                ChunkKeys(root),
                economics,
                chunk_tokens=chunk_tokens,
                region_chunks=len(rows),
            )
            transfers = Transfers(hierarchy, slab, rows, economics, wakeup, lookups.failed)
        except BaseException:
            slab.close()
            raise
    except BaseException:
        close_stores(stores)
        raise
    log.info(
        "StrataKV below vLLM: %s of memory, %s; %d chunks of %s, %d tokens each; identity %s",
        show_size(tiers.cpu.capacity_bytes),
        ", ".join(hierarchy.tiers[1:]) or "nothing below it",
        slab.num_slots,
        show_size(layout.page_bytes),
        chunk_tokens,
        root.hex()[:16],
    )
    return Tiers(hierarchy, transfers, lookups, economics, prefill)


def _check_servers(
    addresses: Sequence[ServerAddress], layout: BlockLayout, credentials: Credentials
) -> None:
    """Raises ConfigError, or TierConfigError for credentials that cannot be read, where a server
    refuses this engine for good."""
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
        return f"{address} refuses this engine: {error.details()}; {cure}"
    finally:
        channel.close()
    return None
