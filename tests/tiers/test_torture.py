# SPDX-License-Identifier: Apache-2.0
"""No wrong byte, whatever is done to the disk, to a server's memory, and to its clients.

    1,000 stores on an SSD damaged in one to three ways each
    300 clients of a cache server stopped for longer than their leases, or killed, in mid-call,
    while bits of its memory flip, and 100 orderly restarts in between
    a bit flipped before each tenth write-back

CI does a tenth of each; `pytest tests/tiers/test_torture.py --scale long` does all of it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from stratakv.tiers.base import Stored
from stratakv.tiers.contract import make_keys, payload_of, put
from stratakv.tiers.errors import TierError
from stratakv.tiers.remote.server_link import ServerLink
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.tag import Proofs

from ..nursery_site.nursery_client import popen
from .blocks import SMALL
from .cache_server.bare_client import ROOT
from .cache_server.data_plane import Plane, fetch
from .cache_server.data_plane import put as send
from .cache_server.rig import LAYOUT as TINY
from .cache_server.rig import ServerProcess, server_process
from .torture_client import KEYS, LAYOUT, Client, open_store

pytestmark = [pytest.mark.slow, pytest.mark.regression]

STORES = {"ci": 30, "long": 1000}
RESTARTS = {"ci": 5, "long": 100}
CLIENTS = 3  # in each life of the server
WRITE_BACKS = {"ci": 400, "long": 6000}
CALL_SECONDS = 0.3
WAIT_SECONDS = 30.0

# --- stores on an SSD

STORE_KEYS = make_keys(60)
CAPACITY = 2 * 1024**2

Damage = Callable[[Path, Path, random.Random], None]


def _edit(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def _flip(name: str, times: int) -> Damage:
    def damage(path: Path, _earlier: Path, rng: random.Random) -> None:
        def change(data: bytearray) -> None:
            for _ in range(times):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)

        _edit(path / name, change)

    return damage


def _pages(name: str, change: Callable[[bytearray, int, int, random.Random], None]) -> Damage:
    def damage(path: Path, _earlier: Path, rng: random.Random) -> None:
        def edit(data: bytearray) -> None:
            one, other = (4096 * rng.randrange(len(data) // 4096) for _ in range(2))
            change(data, one, other, rng)

        _edit(path / name, edit)

    return damage


def _zero(data: bytearray, one: int, _other: int, _rng: random.Random) -> None:
    data[one : one + 4096] = bytes(4096)


def _noise(data: bytearray, one: int, _other: int, rng: random.Random) -> None:
    data[one : one + 4096] = rng.randbytes(4096)


def _swap(data: bytearray, one: int, other: int, _rng: random.Random) -> None:
    data[one : one + 4096], data[other : other + 4096] = (
        data[other : other + 4096],
        data[one : one + 4096],
    )


def _copy(data: bytearray, one: int, other: int, _rng: random.Random) -> None:
    data[one : one + 4096] = data[other : other + 4096]


def _cut(name: str) -> Damage:
    def damage(path: Path, _earlier: Path, rng: random.Random) -> None:
        with (path / name).open("r+b") as file:
            file.truncate(rng.randrange((path / name).stat().st_size))

    return damage


def _stale(name: str) -> Damage:
    def damage(path: Path, earlier: Path, _rng: random.Random) -> None:
        shutil.copyfile(earlier / name, path / name)

    return damage


def _gone(name: str) -> Damage:
    def damage(path: Path, _earlier: Path, _rng: random.Random) -> None:
        (path / name).unlink()

    return damage


INDEX = "index/data.mdb"
DAMAGES: dict[str, Damage] = {
    f"{what} {name}": make(name)
    for name in ("blocks", INDEX)
    for what, make in {
        "a bit of": lambda name: _flip(name, 1),
        "many bits of": lambda name: _flip(name, 200),
        "a page of zeros in": lambda name: _pages(name, _zero),
        "a page of noise in": lambda name: _pages(name, _noise),
        "pages swapped in": lambda name: _pages(name, _swap),
        "a page copied in": lambda name: _pages(name, _copy),
        "the end cut off": _cut,
        "an earlier": _stale,
    }.items()
} | {
    "no index": _gone(INDEX),
    "no identity": _gone("identity"),
    "a bit of the identity": _flip("identity", 1),
}

# In a process of its own: what LMDB does with a damaged file may end it.
JUDGE = """
import json, mmap, sys
from pathlib import Path
from stratakv.tiers.contract import fetch, put
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.ssd import SsdStore
from tests.tiers.blocks import SMALL
from tests.tiers.test_torture import CAPACITY, STORE_KEYS
for line in sys.stdin:
    path = Path(line.strip())
    try:
        store = SsdStore(path, SMALL, CAPACITY)
    except TierConfigError as error:
        print(json.dumps([None, str(error)]), flush=True)
        continue
    found = fetch(store, STORE_KEYS)  # raises at a wrong byte
    again = sum(put(store, STORE_KEYS[:20]))
    store.close(10)
    store = SsdStore(path, SMALL, CAPACITY)
    fetch(store, STORE_KEYS)
    store.close(10)
    print(json.dumps([len(found) - found.count(None), again]), flush=True)
"""


@pytest.mark.timeout(3600)
def test_damaged_stores(tmp_path: Path, rng: random.Random, scale: str) -> None:
    pristine, earlier = tmp_path / "pristine", tmp_path / "earlier"
    store = SsdStore(pristine, SMALL, CAPACITY)
    # Blocks that come and go, so that slots and pages have a past.
    put(store, make_keys(40, "before"))
    store.close(10)
    shutil.copytree(pristine, earlier)
    store = SsdStore(pristine, SMALL, CAPACITY)
    store.drop(make_keys(40, "before")[:30])
    assert all(put(store, STORE_KEYS))
    store.close(10)
    judge = popen(
        [sys.executable, "-c", JUDGE],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert judge.stdin is not None and judge.stdout is not None
    hits = refused = 0
    for number in range(STORES[scale]):
        path = tmp_path / str(number)
        shutil.copytree(pristine, path)
        names = rng.sample(sorted(DAMAGES), rng.choice((1, 1, 2, 3)))
        for name in names:
            try:
                DAMAGES[name](path, earlier, rng)
            except (FileNotFoundError, ValueError):  # taken away, or cut to nothing, before
                pass
        judge.stdin.write(f"{path}\n")
        judge.stdin.flush()
        answer = judge.stdout.readline()
        assert answer, f"the process ended over {names}: exit {judge.wait(10)}"
        found, again = json.loads(answer)
        if found is None:
            refused += 1
            assert "made for" in again, (names, again)
        else:
            hits += found
            assert again == 20, names
        shutil.rmtree(path)
    judge.stdin.close()
    assert judge.wait(30) == 0
    print(f"{STORES[scale]} damaged stores: {hits} good hits, {refused} refused, 0 wrong")
    assert hits > 10 * STORES[scale]
    assert refused < STORES[scale] // 4


# --- clients of a cache server


def _start(port: int, seed: int, kind: str) -> Any:
    return popen(
        [
            *(sys.executable, "-m", "tests.tiers.torture_client"),
            *(str(port), str(seed), kind, str(CALL_SECONDS)),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _end(client: Any) -> Counter[str]:
    assert client.stdin is not None and client.stdout is not None
    client.stdin.close()
    said = client.stdout.read()
    assert client.wait(60) == 0
    return Counter(json.loads(said))


def _flip_memory(server: ServerProcess, rng: random.Random, times: int) -> None:
    """Bits of the server's slab, through the memory that it hands to its clients."""
    store = open_store(server.port, shares_memory=True)
    try:
        assert store.wait_up(WAIT_SECONDS)
        link: ServerLink = store._servers[0].link
        connection = link.connect(time.monotonic() + WAIT_SECONDS)
        assert connection.kind == "memory"
        view = connection._view  # type: ignore[attr-defined]
        for _ in range(times):
            view[rng.randrange(view.nbytes)] ^= 1 << rng.randrange(8)
        connection.close()
    finally:
        store.close(5.0)


def _life(server: ServerProcess, rng: random.Random) -> Counter[str]:
    """One life of the server: clients are stopped and killed, and what is left is looked at."""
    seen: Counter[str] = Counter()
    kinds = [rng.choice(("memory", "memory", "socket")) for _ in range(CLIENTS)]
    clients = [_start(server.port, rng.randrange(2**32), kind) for kind in kinds]
    witness = Client(open_store(server.port, shares_memory=True), rng.randrange(2**32))
    assert witness._store.wait_up(WAIT_SECONDS)
    deadline = time.monotonic() + WAIT_SECONDS
    while witness.seen["hits"] < 20 and time.monotonic() < deadline:
        witness.turn()
    killed = clients.pop()
    for client in clients:
        os.kill(client.pid, signal.SIGSTOP)
    killed.kill()
    killed.wait(10)
    _flip_memory(server, rng, 3)
    stopped_until = time.monotonic() + 2 * CALL_SECONDS
    while time.monotonic() < stopped_until:
        witness.turn()  # others take the slots of those that were stopped
        time.sleep(0.01)
    for client in clients:
        os.kill(client.pid, signal.SIGCONT)
    for _ in range(3):
        witness.turn()
    for client in clients:
        seen += _end(client)
    witness._store.close(5.0)
    seen += witness.seen
    seen["stopped"] += len(clients)
    seen["killed"] += 1
    return seen


@pytest.mark.timeout(7200)
def test_clients_stopped_and_killed(tmp_path: Path, rng: random.Random, scale: str) -> None:
    slots = 24
    flags = [
        *("--cpu-bytes", str(slots * LAYOUT.slot_bytes)),
        *("--ssd-path", str(tmp_path / "ssd")),
        *("--ssd-bytes", str(80 * (LAYOUT.slot_bytes + 4096) + 32 * 1024**2)),
    ]
    seen: Counter[str] = Counter()
    with server_process(*flags) as server:
        for life in range(RESTARTS[scale]):
            if life:
                assert server.terminate() == 0
                server.start()
                reader = Client(open_store(server.port, shares_memory=life % 2 == 0), life)
                assert reader._store.wait_up(WAIT_SECONDS)
                for start in range(0, len(KEYS), 6):
                    reader.load(KEYS[start : start + 6])
                reader._store.close(5.0)
                seen += reader.seen
                seen["hits after a restart"] += reader.seen["hits"]
            seen += _life(server, rng)
    print(dict(seen))
    assert seen["wrong"] == 0, dict(seen)
    assert seen["stopped"] + seen["killed"] == CLIENTS * RESTARTS[scale]
    assert seen["hits"] > 50 * RESTARTS[scale]
    assert seen["hits after a restart"] > 5 * RESTARTS[scale]


# --- write-backs


class Flipping(SsdStore):
    """In each tenth block that it is given, a bit in the slab changes just before."""

    given = 0
    flipped = 0

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        assert proofs is not None and None not in proofs
        for buffer in buffers:
            self.given += 1
            if self.given % 10 == 0:
                buffer[self.given % TINY.page_bytes] ^= 1 << self.given % 8
                self.flipped += 1
        return super().store(keys, buffers, proofs)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["data", "memory"])
def test_a_flipped_bit_before_each_tenth_write_back(
    tmp_path: Path, rng: random.Random, scale: str, kind: str
) -> None:
    given = flipped = hits = lives = 0
    while given < WRITE_BACKS[scale]:
        lives += 1
        keys = make_keys(200, f"life {lives}")  # which the disk has not got
        store = Flipping(tmp_path, TINY, 16 * 1024**2)
        plane = Plane(slots=32, stores=[store])
        connection = plane.connect(kind)
        for _ in range(150):
            batch = rng.sample(keys, 4)
            try:
                send(connection, batch, TINY)
                found = fetch(connection, batch, TINY)
            except TierError:
                continue
            good = [payload_of(key, TINY) for key in batch]
            assert all(f in (None, g) for f, g in zip(found, good, strict=True))
            hits += sum(f is not None for f in found)
        connection.close()
        deadline = time.monotonic() + WAIT_SECONDS
        while plane.slab.stats().pinned_blocks:  # written back right now
            assert time.monotonic() < deadline
            time.sleep(0.002)
        plane.close()
        given, flipped = given + store.given, flipped + store.flipped
    print(f"{given} blocks written back, {flipped} of them with a flipped bit: {hits} good hits")
    assert flipped >= given // 10 - lives
    assert hits > given // 10
