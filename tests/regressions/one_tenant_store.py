# SPDX-License-Identifier: Apache-2.0
"""A tenant's store over a store on the disk, and blocks for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from stratakv.tiers.cache_server.access.tenants import Quota
from stratakv.tiers.cache_server.tenant_store import TenantStore
from stratakv.tiers.cache_server.tenant_stores import StoreSettings, TenantStores
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.status import NotReady

from ..tiers.blocks import payload_of
from ..tiers.cache_server.rig import LAYOUT, SECRET, proof_of
from ..tiers.store_contract import SECONDS


def make_room(path: Path, cpu_blocks: int = 16) -> tuple[TenantStores, TenantStore]:
    quota = Quota(cpu_blocks * LAYOUT.slot_bytes, 4 * 2**20)
    tenant_stores = TenantStores({"tenant": quota}, StoreSettings(secret=SECRET, ssd_path=path))
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return tenant_stores, tenant_stores.attach("tenant", LAYOUT)
        except NotReady:
            assert time.monotonic() < deadline
        time.sleep(0.002)


def keep(tenant_store: TenantStore, keys: Sequence[bytes]) -> list[State]:
    write_lease = tenant_store.begin_store(keys)
    for key, slot in zip(keys, write_lease.slots, strict=True):
        if slot is not None:
            tenant_store.buffer(slot)[:] = payload_of(key, LAYOUT)
    tags = [proof_of(key, memoryview(payload_of(key, LAYOUT))) for key in keys]
    return tenant_store.end_store(write_lease, tags)
