# SPDX-License-Identifier: Apache-2.0
"""Puts the tiers together that lie below one vLLM engine, and what decides for it."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np

from ...tiers.hierarchy.hierarchy import Hierarchy
from ...tiers.hierarchy.hierarchy_options import WATERMARK
from ...tiers.settings.sizes import show_size
from ..chunks.build import assemble, check_servers
from ..chunks.chunk_settings import Settings
from ..chunks.failed import FailedChunks
from ..chunks.mover import CLOSE_SECONDS
from ..costs.economics import Choice, Economics
from ..costs.rates import PrefillRate
from ..parts import Parts
from .identity import ChunkIdentity, ChunkKeys, chunk_layout
from .settings import VllmSettings, drill_of
from .tier_lookups import Lookups
from .tier_transfers import Transfers

log = logging.getLogger(__name__)


class Tiers(NamedTuple):
    """What a tier of vLLM's is made of."""

    hierarchy: Hierarchy
    transfers: Transfers
    lookups: Lookups
    economics: Economics
    prefill: PrefillRate


def build_tiers(
    settings: Settings[VllmSettings],
    identity: ChunkIdentity,
    rows: np.ndarray[Any, Any],
    chunk_tokens: int,
) -> Tiers:
    """The tiers below vLLM's region, whose chunks of `chunk_tokens` tokens are `rows`. Raises
    TierConfigError, or ConfigError, for what cannot work; nothing stays open then."""
    layout = chunk_layout(identity.chunk_bytes, identity.kv_dtype)
    tiers, root, own = settings.tiers(), identity.root(), settings.own
    check_servers(tiers.addresses, layout, tiers.remote.credentials())
    drill = drill_of(settings)
    if drill is not None:
        log.warning("faults are injected on purpose (%s); this is a drill", own.faults)
    assembly = assemble(
        tiers,
        layout,
        identity.namespace(),
        read_seconds=own.read_seconds,
        watermark=1.0 if own.write_through else WATERMARK,
        drill=drill,
    )
    hierarchy, slab = assembly.hierarchy, assembly.slab
    try:
        prefill, failed = PrefillRate(), FailedChunks()
        economics = Economics(hierarchy, Parts(chunk_tokens), Choice(own.load), prefill=prefill)
        lookups = Lookups(
            hierarchy,
            ChunkKeys(root),
            economics,
            failed,
            chunk_tokens=chunk_tokens,
            region_chunks=len(rows),
        )
        transfers = Transfers(assembly, rows, economics, failed)
    except BaseException:
        hierarchy.close(CLOSE_SECONDS)
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
