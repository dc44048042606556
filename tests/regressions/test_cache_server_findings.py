# SPDX-License-Identifier: Apache-2.0
"""What an audit found at the cache server: one client against the server or against the others."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.base import Stored
from stratakv.tiers.cache_server import tenant_store as tenant_store_module
from stratakv.tiers.cache_server.access.shares import Shares
from stratakv.tiers.contract import make_buffers, make_keys
from stratakv.tiers.remote.membership import ServerAddress
from stratakv.tiers.remote.remote_settings import RemoteSettings
from stratakv.tiers.remote.remote_store import open_remote
from stratakv.tiers.remote.transports.block_connection import Refused
from stratakv.tiers.remote.transports.data_client import DataConnection
from stratakv.tiers.remote.transports.memory_client import MemoryConnection
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.wire.frames import (
    WELCOME,
    State,
    Status,
    Welcome,
    encode_greeting,
    encode_welcome,
)
from stratakv.tiers.wire.limits import Limits
from stratakv.tiers.wire.rpc import Stub
from stratakv.tiers.wire.sockets import ConnectionLost

from ..tiers.cache_server.data_plane import BOOT_ID, TICKET, Plane, fetch, put
from ..tiers.cache_server.raw_http2 import RawConnection
from ..tiers.cache_server.rig import (
    LAYOUT,
    WAIT_SECONDS,
    RunningServer,
    running_server,
    store_blocks,
    tenant,
    token_of,
)

pytestmark = pytest.mark.regression

Code = grpc.StatusCode


def soon() -> float:
    return time.monotonic() + WAIT_SECONDS


def wait_for(what: Callable[[], bool]) -> None:
    deadline = soon()
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# T2: memory that a client cuts short


def memory_fd(plane: Plane) -> int:
    """What a client of the tenant is handed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(plane.path)
        sock.sendall(encode_greeting(TICKET))
        _, fds, _, _ = socket.recv_fds(sock, WELCOME.size, 1)
    return fds[0]


def test_t02_shrunk_memory() -> None:
    """ftruncate of the shared memory by one client ended the server for all tenants."""
    plane = Plane()
    fd = memory_fd(plane)
    try:
        for size in (0, 4096, os.fstat(fd).st_size + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):  # nor is a seal added that would end writing
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(fd)
    keys = make_keys(4)
    with contextlib.closing(plane.connect("memory")) as connection:
        assert put(connection, keys, LAYOUT) == [State.KEPT] * 4
        assert None not in fetch(connection, keys, LAYOUT)
    plane.close()


@contextlib.contextmanager
def handing_out(fd: int, folder: Path) -> Iterator[str]:
    """A server's Unix socket that hands out any file as the memory."""
    path = str(folder / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(4096)
                size = LAYOUT.page_bytes, LAYOUT.slot_bytes
                welcome = encode_welcome(Welcome(Status.OK, BOOT_ID, *size, 4))
                socket.send_fds(sock, [welcome], [fd])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield path
        thread.join(WAIT_SECONDS)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK])
def test_t02_memory_without_seals(tmp_path: Path, seals: int) -> None:
    """A client mapped whatever it was handed, and died with it when it was cut short."""
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4 * LAYOUT.slot_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with (
        handing_out(fd, tmp_path) as path,
        pytest.raises(ConnectionLost, match="could be cut short"),
    ):
        MemoryConnection.open(path, TICKET, LAYOUT, soon())
    os.close(fd)


def test_t02_a_client_that_refuses_memory_takes_the_socket(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "stratakv.tiers.remote.transports.memory_client.has_fixed_size", lambda _fd: False
    )
    with running_server() as server:
        store = open_remote([ServerAddress("127.0.0.1", server.port)], LAYOUT, RemoteSettings())
        try:
            assert store.wait_up(WAIT_SECONDS)
            keys = make_keys(2)
            (future,) = [store.store(keys, make_buffers(2, LAYOUT))]
            assert future.result(WAIT_SECONDS) == [Stored.KEPT] * 2
            assert store.stats().errors["no_memory"] >= 1
        finally:
            store.close(WAIT_SECONDS)
    assert "no shared memory" in caplog.text and "blocks go through socket" in caplog.text


def test_t02_huge_pages_are_sealed_too() -> None:
    """Where the host has them; the kernel takes seals of such a memfd whether or not it does."""
    from stratakv.tiers.slab.shared_memory import (
        _MFD_HUGE_2MB,
        HUGE_PAGE_BYTES,
        _make,
        has_fixed_size,
    )

    try:
        fd, memory = _make("huge", os.MFD_HUGETLB | _MFD_HUGE_2MB, HUGE_PAGE_BYTES, 1, None)
    except OSError as error:
        pytest.skip(f"the host has no huge pages: {error}")
    assert has_fixed_size(fd)
    memory.close()
    os.close(fd)


# T8: connections without credentials


def silent(port: int, count: int, host: str = "127.0.0.1") -> list[socket.socket]:
    """Connections of gRPC's that make no call; who says not even so much has five seconds."""
    return [RawConnection((host, port)).sock for _ in range(count)]


def test_t08_strangers_leave_a_place_for_a_good_client() -> None:
    """1,023 connections without credentials kept every new client out for minutes."""
    limits = Limits(max_connections=64, max_strangers=32, max_strangers_per_address=16)
    with running_server([tenant("ann")], limits=limits) as server:
        strangers = silent(server.port, 63)
        with RawConnection(("127.0.0.1", server.port)):
            server.attach(server.stub(token_of("ann")))
            turned_away = server.server._connections.turned_away
            wait_for(lambda: turned_away["address"] >= 64 - 16)
        for sock in strangers:
            sock.close()


def test_t08_a_thousand_strangers() -> None:
    with running_server([tenant("ann")]) as server:
        strangers = silent(server.port, Limits().max_connections)  # all that there are
        server.attach(server.stub(token_of("ann")))
        for sock in strangers:
            sock.close()


def test_t08_who_says_nothing_has_to_leave_and_who_is_known_stays() -> None:
    limits = Limits(stranger_seconds=0.5)
    with running_server([tenant("ann")], limits=limits) as server:
        channel = server.channel(token_of("ann"))
        states: list[Any] = []
        stub = Stub(channel)
        server.attach(stub)
        channel.subscribe(states.append)
        (stranger,) = silent(server.port, 1)
        # A call alone is not enough, nor is asking whether the server is well.
        with RawConnection(("127.0.0.1", server.port)) as guessing:
            guessing.call("/stratakv.cache.v1.CacheService/Lookup", "a guess of a token")
            guessing.call("/grpc.health.v1.Health/Watch")
            while stranger.recv(4096):
                pass
            wait_for(lambda: not guessing.is_open())
        turned_away = server.server._connections.turned_away
        wait_for(lambda: turned_away["silent"] == 2)
        stub.lookup(messages.LookupRequest(), timeout=WAIT_SECONDS)
        assert grpc.ChannelConnectivity.TRANSIENT_FAILURE not in states
        assert grpc.ChannelConnectivity.IDLE not in states[1:]
        channel.close()
        stranger.close()


def test_t08_the_oldest_of_too_many_strangers_make_way() -> None:
    limits = Limits(max_connections=64, max_strangers=4, max_strangers_per_address=3)
    with running_server([tenant("ann")], limits=limits, host="::", insecure=True) as server:
        old = silent(server.port, 3, "::1")
        wait_for(lambda: len(server.server._connections._seen) > 3)
        new = silent(server.port, 3)
        wait_for(lambda: server.server._connections.turned_away["strangers"] == 2)
        ended = [not is_open(sock) for sock in (*old, *new)]
        assert ended.count(True) == 2 and not any(ended[3:])
        for sock in (*old, *new):
            sock.close()


def is_open(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
        return False
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


# T9: what many tenants leave to one


@pytest.mark.parametrize("most", [1, 3, 64, 256, 512])
@pytest.mark.parametrize("num_tenants", [1, 2, 8, 9, 20, 300])
def test_t09_every_tenant_finds_what_is_kept_for_it(most: int, num_tenants: int) -> None:
    shares = Shares(most, num_tenants)
    names = [str(number) for number in range(num_tenants)]
    taken = dict.fromkeys(names[:-1], 0)
    for name in names[:-1]:
        while shares.take_place(name):
            taken[name] += 1
    last = 0
    while shares.take_place(names[-1]):
        last += 1
    assert last >= shares.kept >= 1
    assert sum(taken.values()) + last <= shares.most == max(most, num_tenants)
    for name in names[:-1]:
        for _ in range(taken[name]):
            shares.give_back_place(name)
    for _ in range(last):
        shares.give_back_place(names[-1])
    assert not shares._taken and not shares._beyond


def connect(server: RunningServer, stub: Stub) -> DataConnection:
    offer = stub.open_data(messages.OpenDataRequest(), timeout=WAIT_SECONDS)
    return DataConnection.open("127.0.0.1", offer.port, offer.ticket, LAYOUT, soon())


def test_t09_eight_greedy_tenants_leave_the_ninth_its_places() -> None:
    """Eight held all data connections and all watchers."""
    names = [f"greedy-{number}" for number in range(8)] + ["ninth"]
    limits = Limits(max_data_connections=32, max_watchers=16)
    with running_server([tenant(name) for name in names], limits=limits) as server:
        stubs = {name: server.stub(token_of(name)) for name in names}
        for stub in stubs.values():
            server.attach(stub)
        held: list[DataConnection] = []
        watched = []
        for name in names[:-1]:
            with contextlib.suppress(Refused):
                while True:
                    held.append(connect(server, stubs[name]))
            with contextlib.suppress(grpc.RpcError):
                while True:
                    watch = stubs[name].watch(messages.WatchRequest(), timeout=WAIT_SECONDS)
                    next(watch)
                    watched.append(watch)
        assert (len(held), len(watched)) == (32 - 1, 16 - 1)
        held.append(connect(server, stubs["ninth"]))
        watched.append(stubs["ninth"].watch(messages.WatchRequest(), timeout=WAIT_SECONDS))
        assert next(watched[-1]).boot_id == server.server.boot_id
        for connection in held:
            connection.close()
        for watch in watched:
            watch.cancel()


def test_t09_calls_and_bytes_of_the_ninth() -> None:
    names = [f"greedy-{number}" for number in range(8)] + ["ninth"]
    limits = Limits(max_calls=16, max_bytes_in_flight=2**23, stall_seconds=WAIT_SECONDS)
    with running_server([tenant(name) for name in names], limits=limits) as server:
        stubs = {name: server.stub(token_of(name)) for name in names}
        for stub in stubs.values():
            server.attach(stub)
        ended = threading.Event()

        def held() -> Iterator[Any]:
            ended.wait(WAIT_SECONDS)
            yield from ()

        calls = [
            stubs[name].store.future(held(), timeout=WAIT_SECONDS)
            for name in names[:-1]
            for _ in range(4)
        ]
        wait_for(lambda: server.server._guard.running >= 15)
        assert store_blocks(stubs["ninth"], make_keys(3)) == [State.KEPT] * 3
        ended.set()
        for call in calls:
            call.cancel()


# T10: one tenant's store and the others' calls


def test_t10_a_room_that_is_held_keeps_nobody_else_waiting() -> None:
    """The event loop took the tenant store's lock, so that one Delete(all) stopped everybody."""
    with running_server([tenant("ann"), tenant("eve")]) as server:
        ann, eve = (server.stub(token_of(name)) for name in ("ann", "eve"))
        for stub in (ann, eve):
            server.attach(stub)
            store_blocks(stub, make_keys(4))
        request = messages.LookupRequest(keys=b"".join(make_keys(4)))
        with server.tenant_store("tenant:eve")._changed:
            pieces = make_keys(2, "more")
            stuck = [
                *(eve.lookup.future(request, timeout=WAIT_SECONDS) for _ in range(20)),
                eve.touch.future(messages.TouchRequest(), timeout=WAIT_SECONDS),
                eve.delete.future(messages.DeleteRequest(all=True), timeout=WAIT_SECONDS),
                eve.describe.future(messages.DescribeRequest(), timeout=WAIT_SECONDS),
                eve.stats.future(messages.StatsRequest(), timeout=WAIT_SECONDS),
                eve.unpin.future(messages.UnpinRequest(lease=7), timeout=WAIT_SECONDS),
            ]
            storing = threading.Thread(target=store_blocks, args=(eve, pieces), daemon=True)
            storing.start()
            loading = eve.load(messages.LoadRequest(keys=make_keys(1)[0]), timeout=WAIT_SECONDS)
            watching = eve.watch(messages.WatchRequest(), timeout=WAIT_SECONDS)
            wait_for(lambda: server.server._guard.running >= 20)
            for _ in range(10):
                assert ann.lookup(request, timeout=WAIT_SECONDS).prefix == 4
                assert ann.stats(messages.StatsRequest(), timeout=WAIT_SECONDS).tiers
                assert server.health() == 1
            assert next(watching).boot_id == server.server.boot_id
            assert not stuck[0].done()
        for call in stuck:
            call.result(WAIT_SECONDS)
        storing.join(WAIT_SECONDS)
        list(loading)
        watching.cancel()
        assert not storing.is_alive()


class CountingLock:
    """A room's condition, which counts how often it is taken, and for how many freed blocks."""

    def __init__(self, inner: Any, slab: CpuSlab) -> None:
        self._inner = inner
        self._slab = slab
        self._free = 0
        self.freed: list[int] = []

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._free = self._slab.free_slots()

    def __exit__(self, *error: Any) -> None:
        self.freed.append(self._slab.free_slots() - self._free)
        self._inner.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_t10_a_room_is_cleared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room was held for a time that grew with its blocks."""
    monkeypatch.setattr(tenant_store_module, "SWEPT_BLOCKS", 16)
    plane = Plane(slots=200)
    tenant_store = plane.tenant_store
    keys = make_keys(200)
    for start in range(0, 200, 50):
        with contextlib.closing(plane.connect()) as connection:
            assert put(connection, keys[start : start + 50], LAYOUT) == [State.KEPT] * 50
    read_lease = tenant_store.begin_load(keys[:3])  # pinned while all is forgotten
    lock = CountingLock(tenant_store._changed, plane.slab)
    tenant_store._changed = lock  # type: ignore[assignment]  # a real one within
    tenant_store.clear()
    assert sum(lock.freed) == 197 and max(lock.freed) <= 16
    assert lock.freed[0] == 0, "nothing is freed in the step in which all is forgotten"
    assert tenant_store.lookup(keys) == [State.MISS] * 200
    tenant_store.end_load(read_lease)
    assert plane.slab.free_slots() == 200
    plane.close()


def test_t10_blocks_that_come_while_a_room_is_swept() -> None:
    """Everything is forgotten at once, and what comes then is kept."""
    plane = Plane(slots=64)
    keys = make_keys(64)
    with contextlib.closing(plane.connect()) as connection:
        assert put(connection, keys, LAYOUT) == [State.KEPT] * 64
        pinned = plane.tenant_store.begin_load(keys[:2])
        plane.tenant_store._hierarchy.clear(sweep=False)
        assert plane.tenant_store.lookup(keys) == [State.MISS] * 64
        assert plane.slab.free_slots() == 0
        assert put(connection, keys, LAYOUT) == [State.NO_ROOM] * 2 + [State.KEPT] * 62
        assert plane.tenant_store.stats()["cpu"].evicted_blocks == 0
        plane.tenant_store.end_load(pinned)
        assert put(connection, keys[:2], LAYOUT) == [State.KEPT] * 2
        assert None not in fetch(connection, keys, LAYOUT)
        assert plane.tenant_store._hierarchy.sweep(100) == 0
    plane.close()
