# SPDX-License-Identifier: Apache-2.0
"""Builds the tiers below one vLLM engine, with their look-ups, transfers and estimates."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np

from ...tiers.hierarchy.hierarchy import Hierarchy
from ...tiers.settings.sizes import show_size
from ..chunks.build import assemble, check_servers
from ..chunks.failed import FailedChunks
from ..chunks.mover import CLOSE_SECONDS
from ..costs.economics import Choice, Economics
from ..costs.rates import PrefillRate
from ..parts import Parts
from .identity import ChunkIdentity, ChunkKeys, chunk_layout
from .settings import VllmSettings
from .tier_lookups import TierLookups
from .tier_transfers import Transfers

log = logging.getLogger(__name__)


class Tiers(NamedTuple):
    """The parts of a StrataTier."""

    hierarchy: Hierarchy
    transfers: Transfers
    lookups: TierLookups
    economics: Economics
    prefill: PrefillRate


def build_tiers(
    settings: VllmSettings,
    identity: ChunkIdentity,
    rows: np.ndarray[Any, Any],
    chunk_tokens: int,
) -> Tiers:
    """Build the tiers below vLLM's region. A row of `rows` is a chunk of `chunk_tokens` tokens. A
    TierConfigError or ConfigError, for settings that cannot work, leaves nothing open."""
    layout = chunk_layout(identity.chunk_bytes, identity.kv_dtype)
    root = identity.root()
    check_servers(settings, layout)
    if settings.faults:
        log.warning("faults are injected on purpose (%s); this is a drill", settings.faults)
    assembly = assemble(settings, layout, identity.namespace())
    hierarchy, slab = assembly.hierarchy, assembly.slab
    try:
        prefill, failed = PrefillRate(), FailedChunks()
        choice = Choice(settings.load)
        economics = Economics(hierarchy, Parts(chunk_tokens), choice, prefill=prefill)
        lookups = TierLookups(
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
        show_size(settings.cpu.capacity_bytes),
        ", ".join(hierarchy.tiers[1:]) or "nothing below it",
        slab.num_slots,
        show_size(layout.page_bytes),
        chunk_tokens,
        root.hex()[:16],
    )
    return Tiers(hierarchy, transfers, lookups, economics, prefill)
