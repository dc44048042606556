# SPDX-License-Identifier: Apache-2.0
"""Bytes of a data connection that are changed, lost, doubled or moved on their way: never a wrong
block at either end, never a call that does not end, nothing left in anybody's hands."""

from __future__ import annotations

import collections
import random
import threading
import time
from pathlib import Path

import pytest

from stratakv.tiers.contract import make_buffers, make_keys, payload_of
from stratakv.tiers.remote.transports.block_connection import BlockConnection
from stratakv.tiers.wire.limits import Limits
from stratakv.tiers.wire.sockets import ConnectionLost

from ..cache_server.data_plane import KINDS as PATHS
from ..cache_server.data_plane import Plane
from ..cache_server.rig import LAYOUT
from .fault_proxy import KINDS, Damage, FaultProxy

# Of each path: transfers in CI, and in a long run.
TRANSFERS = (1000, 25_000)
THREADS = 4
SECONDS = 0.1  # of one transfer; what was lost is waited for so long
# A transfer that overlooks its deadline waits until the server hangs up. Between the two there is
# time for a machine with other work.
IDLE_SECONDS = 60.0
LATE_SECONDS = 30.0
BLOCKS, BATCH = 48, 4
# Damaged is one of so many chunks: of a transfer through memory only a few words pass.
ONE_IN = {"data": 40.0, "memory": 6.0}


class Mover:
    """One thread of transfers through the proxy, and what it saw."""

    def __init__(self, plane: Plane, path: str, seed: int) -> None:
        self.seen: collections.Counter[str] = collections.Counter()
        self._plane = plane
        self._path = path
        self._rng = random.Random(seed)
        self._keys = make_keys(BLOCKS, "damage")
        self._payloads = {key: payload_of(key, LAYOUT) for key in self._keys}
        self._buffers = make_buffers(BATCH, LAYOUT)
        self._connection: BlockConnection | None = None

    def run(self, count: int) -> None:
        for _ in range(count):
            began = time.monotonic()
            try:
                self._transfer(began + SECONDS)
            except ConnectionLost:
                self.seen["lost"] += 1
                self._drop()
            if time.monotonic() - began > LATE_SECONDS:
                self.seen["late"] += 1
        self._drop()

    def _transfer(self, deadline: float) -> None:
        if self._connection is None:
            self._connection = self._plane.connect(self._path, seconds=SECONDS)
        keys = self._rng.sample(self._keys, BATCH)
        size = LAYOUT.page_bytes
        if self._rng.random() < 0.5:
            for key, buffer in zip(keys, self._buffers, strict=True):
                buffer[:size] = self._payloads[key]
            states = self._connection.store(keys, self._buffers, [None] * BATCH, deadline)
            self.seen.update(f"store {state.name}" for state in states)
            return
        for buffer in self._buffers:
            buffer[:size] = bytes(size)
        proofs = self._connection.load(keys, self._buffers, deadline)
        for key, buffer, proof in zip(keys, self._buffers, proofs, strict=True):
            self.seen["load MISS" if proof is None else "load HIT"] += 1
            if proof is not None and buffer[:size] != self._payloads[key]:
                self.seen["wrong"] += 1

    def _drop(self) -> None:
        if self._connection is not None:
            self.seen["corrupt"] += self._connection.corrupt_blocks
            self._connection.close()
            self._connection = None


@pytest.mark.parametrize("path", PATHS)
def test_no_damage_on_the_way_becomes_a_wrong_block(
    path: str, scale: str, seed: int, tmp_path: Path
) -> None:
    # Fewer slots than blocks: slots are used again and again, also those of transfers that broke.
    plane = Plane(slots=32, limits=Limits(request_seconds=0.5, idle_seconds=IDLE_SECONDS))
    target = plane.path if path == "memory" else ("127.0.0.1", plane.port)
    listen = str(tmp_path / "socket") if path == "memory" else ("127.0.0.1", 0)
    with FaultProxy(listen, target) as proxy:
        if path == "memory":
            plane.path = str(proxy.address)
        else:
            plane.port = int(proxy.address[1])
        proxy.damage = Damage(random.Random(seed), ONE_IN[path])
        count = TRANSFERS[scale == "long"]
        movers = [Mover(plane, path, seed + number) for number in range(THREADS)]
        threads = [
            threading.Thread(target=mover.run, args=(count // THREADS,), daemon=True)
            for mover in movers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0 + count * (SECONDS + 1.0) / THREADS)
            assert not thread.is_alive(), "a transfer hangs"
        damage = proxy.damage
        seen = sum((mover.seen for mover in movers), collections.Counter())
    print(f"{path}: {dict(seen)} damage {dict(damage.done)}")
    assert seen["wrong"] == seen["late"] == 0
    # It was damage that counts, and there was something to damage.
    assert min(damage.done[kind] for kind in KINDS) >= count // 100
    assert seen["lost"] >= count // 20
    assert seen["load HIT"] >= count // 10 and seen["store KEPT"] >= count // 10
    # What the server keeps is right too.
    plane.check_idle()
    found = 0
    for key in make_keys(BLOCKS, "damage"):
        read_lease = plane.tenant_store.begin_load([key])
        plane.tenant_store.wait_loaded(read_lease, time.monotonic() + 1.0)
        (slot,) = read_lease.slots
        if slot is not None:
            found += 1
            assert plane.tenant_store.buffer(slot) == payload_of(key, LAYOUT)
        plane.tenant_store.end_load(read_lease)
    assert found
    plane.check_nothing_held()
    plane.close()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_damage_changes_something(kind: str, rng: random.Random) -> None:
    """Or the test above would be of no worth."""
    data = rng.randbytes(10_000)
    held: list[bytes] = []
    result = Damage(rng, 2.0, (kind,), chunk_bytes=100).pass_on(data, held)
    assert result != data
    if kind == "duplicate":
        assert len(result) > len(data)
    if kind in ("drop", "truncate"):
        assert len(result) < len(data)
    if kind == "reorder":
        assert sorted(result + b"".join(held)) == sorted(data)
