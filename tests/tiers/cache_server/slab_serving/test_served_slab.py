# SPDX-License-Identifier: Apache-2.0
"""Leases of an engine's own slab, without a process that serves it."""

from __future__ import annotations

import time
from typing import Any, cast

from stratakv.tiers.cache_server.slab_serving.served_slab import PeerStore
from stratakv.tiers.contract import payload_of
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.slab.slab_index import SlabReader

from ...blocks import make_keys
from ..rig import LAYOUT
from .rig import TAGGER


def test_a_lease_of_a_prompt_with_a_gap_holds_nothing_behind_the_gap() -> None:
    slab = CpuSlab(LAYOUT, 8 * LAYOUT.slot_bytes, is_served=True)
    names = make_keys(3)
    here = [names[0], names[2]]
    slab.reserve(here)
    slab.commit(here, [True] * 2, [TAGGER.prove(key, payload_of(key, LAYOUT)) for key in here])
    assert slab.index is not None
    store = PeerStore(SlabReader(slab.index.fd, 8, 0.5), slab.fd, LAYOUT, cast("Any", None))
    lease = store.pin(names, 60.0, time.monotonic() + 1.0)
    assert lease.held == names[:1]
    assert store.stats()["cpu"].pinned_blocks == 1
    assert store.unpin(lease.number)
    assert store.stats()["cpu"].pinned_blocks == 0
    store.close(0.0)
    slab.close()
