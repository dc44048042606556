# SPDX-License-Identifier: Apache-2.0
"""A tenant's room over a store on the disk, and blocks for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from stratakv.tiers.cache_server.access.tenants import Quota
from stratakv.tiers.cache_server.tenant_store import Room
from stratakv.tiers.cache_server.tenant_stores import Rooms
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.status import NotReady

from ..tiers.blocks import payload_of
from ..tiers.cache_server.rig import LAYOUT, SECRET, proof_of
from ..tiers.store_contract import SECONDS


def make_room(path: Path, cpu_blocks: int = 16) -> tuple[Rooms, Room]:
    quota = Quota(cpu_blocks * LAYOUT.slot_bytes, 4 * 2**20)
    rooms = Rooms({"tenant": quota}, SECRET, path, max_slots=1000)
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return rooms, rooms.attach("tenant", LAYOUT)
        except NotReady:
            assert time.monotonic() < deadline
        time.sleep(0.002)


def keep(room: Room, keys: Sequence[bytes]) -> list[State]:
    intake = room.begin_store(keys)
    for key, slot in zip(keys, intake.slots, strict=True):
        if slot is not None:
            room.buffer(slot)[:] = payload_of(key, LAYOUT)
    tags = [proof_of(key, memoryview(payload_of(key, LAYOUT))) for key in keys]
    return room.end_store(intake, tags)
