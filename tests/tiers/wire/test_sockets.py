# SPDX-License-Identifier: Apache-2.0
"""A connection keeps its deadlines, plain and with TLS, against peers of every kind of slowness."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from stratakv.tiers.native import native_library as library
from stratakv.tiers.remote.transports.data_client import DataConnection
from stratakv.tiers.wire.blocks import receive_blocks
from stratakv.tiers.wire.sockets import Connection, ConnectionLost

from ..cache_server.rig import LAYOUT, WAIT_SECONDS
from ..remote.fault_proxy import FaultProxy

# A wait that overlooks its deadline lasts WAIT_SECONDS or for ever; one that takes its time twice
# lasts 2 * ONCE_SECONDS. A busy machine may stand still for a second.
SLACK = 10.0
ONCE_SECONDS = 2.0
BIG = 8 * 1024**2  # more than the kernel's buffers take


def soon(seconds: float = WAIT_SECONDS) -> float:
    return time.monotonic() + seconds


def _contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    authority = trustme.CA()
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server_side)
    client_side = ssl.create_default_context()
    authority.configure_trust(client_side)
    return server_side, client_side


SERVER_SIDE, CLIENT_SIDE = _contexts()


@pytest.fixture(params=["plain", "tls"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Connection, socket.socket]]:
    """A connection, and the socket at its other end, which does what the test says."""
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    listener.close()
    if request.param == "tls":
        taken: list[socket.socket] = []
        thread = threading.Thread(
            target=lambda: taken.append(SERVER_SIDE.wrap_socket(ours, server_side=True))
        )
        thread.start()
        theirs = CLIENT_SIDE.wrap_socket(theirs, server_hostname="localhost")
        thread.join(WAIT_SECONDS)
        (ours,) = taken
    connection = Connection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


def lasts(call: Callable[[], object], message: str) -> float:
    """How long it takes to be lost."""
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=message):
        call()
    return time.monotonic() - began


def slowly(sock: socket.socket, act: Callable[[], object], stopped: threading.Event) -> None:
    """Do something ten times a second, in the background."""

    def run() -> None:
        while not stopped.wait(0.05):
            try:
                act()
            except OSError:
                return

    threading.Thread(target=run, daemon=True).start()


def test_whole_buffers_arrive(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    parts = [os.urandom(size) for size in (1, 100_000, 0, 3_000_000)]
    got = bytearray()

    def take() -> None:
        while len(got) < 3_100_001:
            got.extend(theirs.recv(65536))
        theirs.sendall(got)

    thread = threading.Thread(target=take)
    thread.start()
    connection.send([memoryview(part) for part in parts], soon())
    back = memoryview(bytearray(3_100_001))
    connection.receive_into(back, soon())
    thread.join(WAIT_SECONDS)
    assert bytes(back) == b"".join(parts)


def test_more_buffers_than_one_call_takes(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    connection.send([bytes([i % 256]) for i in range(1500)], soon())
    got = b""
    while len(got) < 1500:
        got += theirs.recv(1500)
    assert got == bytes(i % 256 for i in range(1500))


def test_a_peer_that_says_nothing(pair: tuple[Connection, socket.socket]) -> None:
    connection, _ = pair
    took = lasts(lambda: connection.receive(10, soon(0.2)), "before the deadline")
    assert 0.2 <= took < SLACK


def test_a_timeout_of_the_kernel_that_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts ticks of up to 10 ms, so a timeout may end before the deadline."""
    set_timeout = Connection._set_timeout

    def set_half(self: Connection, deadline: float, option: int) -> None:
        now = time.monotonic()
        set_timeout(self, now + (deadline - now) / 2, option)

    monkeypatch.setattr(Connection, "_set_timeout", set_half)
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    for call in (
        lambda deadline: connection.receive(10, deadline),
        lambda deadline: connection.receive_fd(10, deadline),
        lambda deadline: connection.send([bytes(BIG)], deadline),
    ):
        deadline = soon(0.3)
        assert lasts(functools.partial(call, deadline), "deadline") < SLACK
        assert time.monotonic() >= deadline
    connection.close()
    theirs.close()


def test_a_peer_that_trickles(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    stopped = threading.Event()
    slowly(theirs, lambda: theirs.sendall(b"x"), stopped)
    took = lasts(lambda: connection.receive(1000, soon(0.4)), "deadline")
    stopped.set()
    assert 0.4 <= took < SLACK


def test_a_peer_that_takes_nothing(pair: tuple[Connection, socket.socket]) -> None:
    connection, _ = pair
    took = lasts(lambda: connection.send([bytes(BIG)], soon(0.2)), "deadline")
    assert 0.2 <= took < SLACK


def test_a_peer_that_takes_little_at_a_time(pair: tuple[Connection, socket.socket]) -> None:
    """All buffers have one time between them."""
    connection, theirs = pair
    stopped = threading.Event()
    slowly(theirs, lambda: theirs.recv(65536), stopped)
    took = lasts(lambda: connection.send([bytes(BIG)] * 4, soon(ONCE_SECONDS)), "deadline")
    stopped.set()
    assert ONCE_SECONDS <= took < 2 * ONCE_SECONDS


def test_a_deadline_that_has_passed(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    theirs.sendall(b"there")
    assert lasts(lambda: connection.receive(5, soon(-1.0)), "the deadline passed") < SLACK
    assert lasts(lambda: connection.send([b"x"], soon(-1.0)), "the deadline passed") < SLACK


@pytest.mark.parametrize("sent", [0, 3])
def test_a_peer_that_leaves(pair: tuple[Connection, socket.socket], sent: int) -> None:
    connection, theirs = pair
    theirs.sendall(b"x" * sent)
    theirs.shutdown(socket.SHUT_RDWR)
    theirs.close()
    assert lasts(lambda: connection.receive(10, soon()), "closed|broke") < SLACK


def test_a_wait_that_another_descriptor_ends(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    event = os.eventfd(0, os.EFD_CLOEXEC)
    assert not connection.wait_readable(soon(0.05), event)
    os.eventfd_write(event, 1)
    began = time.monotonic()
    assert not connection.wait_readable(soon(), event)
    assert time.monotonic() - began < SLACK
    theirs.sendall(b"x")
    assert connection.wait_readable(soon())
    os.close(event)


def test_nothing_is_received_without_waiting() -> None:
    """On a Unix socket the kernel waits for something to come, even for no bytes of it."""
    for family in (socket.AF_UNIX, socket.AF_INET):
        listener = socket.socket(family)
        listener.bind("" if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listener.listen()
        ours = socket.socket(family)
        ours.connect(listener.getsockname())
        connection = Connection(ours)
        began = time.monotonic()
        assert connection.receive(0, soon()) == b""
        assert time.monotonic() - began < SLACK
        connection.close()
        listener.close()


def test_what_tls_has_read_already_counts_as_come() -> None:
    """The socket is empty then, and a wait for it alone would be one for ever."""
    listener = socket.create_server(("127.0.0.1", 0))
    taken: list[ssl.SSLSocket] = []

    def accept() -> None:
        sock, _ = listener.accept()
        taken.append(SERVER_SIDE.wrap_socket(sock, server_side=True))

    thread = threading.Thread(target=accept)
    thread.start()
    ours = socket.create_connection(listener.getsockname())
    connection = Connection(CLIENT_SIDE.wrap_socket(ours, server_hostname="localhost"))
    thread.join(WAIT_SECONDS)
    taken[0].sendall(b"two words")
    assert connection.receive(3, soon()) == b"two"
    began = time.monotonic()
    assert connection.wait_readable(soon())
    assert time.monotonic() - began < SLACK
    assert connection.receive(6, soon()) == b" words"
    connection.close()
    taken[0].close()
    listener.close()


def test_an_end_from_another_thread(pair: tuple[Connection, socket.socket]) -> None:
    connection, _ = pair
    threading.Timer(0.1, connection.abort).start()
    assert lasts(lambda: connection.receive(1, soon()), "closed|broke") < SLACK
    assert lasts(lambda: connection.receive(1, soon()), "closed|broke") < SLACK
    connection.close()
    assert lasts(lambda: connection.receive(1, soon()), "closed|broke") < SLACK


def test_a_descriptor_arrives_and_is_closed_where_the_words_do_not(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    one, other = Connection(ours), Connection(theirs)
    with open(tmp_path / "file", "w+b") as file:
        file.write(b"shared")
        file.flush()
        one.send_fd(b"0123456789", file.fileno(), soon())
        raw, fd = other.receive_fd(10, soon())
        assert raw == b"0123456789" and fd is not None
        assert os.pread(fd, 6, 0) == b"shared"
        os.close(fd)
        before = len(os.listdir("/proc/self/fd"))
        one.send_fd(b"0123", file.fileno(), soon())
        one.abort()
        with pytest.raises(ConnectionLost):
            other.receive_fd(10, soon())
        assert len(os.listdir("/proc/self/fd")) == before
    one.close()
    other.close()


@pytest.mark.parametrize("path", ["library", "twin"])
def test_blocks_that_are_lost_leave_no_view_of_their_places(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "twin":
        monkeypatch.setattr(library, "library", lambda: None)
    ours, theirs = socket.socketpair()
    connection, memory, arrived = Connection(ours), bytearray(2000), list[tuple[bytes, Any]]()
    theirs.sendall(bytes(1500))
    theirs.close()
    gc.disable()  # what only the collector would find stays
    try:
        payloads = [memoryview(memory)[:1000], memoryview(memory)[1000:]]
        with contextlib.suppress(ConnectionLost):
            receive_blocks(connection, payloads, None, 16, soon(), arrived)
        del payloads
        memory.append(0)  # a BufferError where there is a view of it
    finally:
        gc.enable()
        connection.close()
    assert [trailer for trailer, _ in arrived] == [bytes(16)]


# Opening


def open_at(port: int, seconds: float, tls: bool) -> DataConnection:
    return DataConnection.open(
        "localhost",
        port,
        b"t" * 32,
        LAYOUT,
        soon(seconds),
        tls=CLIENT_SIDE if tls else None,
    )


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_server_that_never_answers_is_waited_for_once(tls: bool) -> None:
    """Connecting, the handshake and the welcome have one time between them."""
    with FaultProxy(("127.0.0.1", 0), ("127.0.0.1", 9)) as proxy:
        proxy.swallow(True)
        port = int(proxy.address[1])
        took = lasts(lambda: open_at(port, ONCE_SECONDS, tls), "deadline|timed out")
    assert ONCE_SECONDS <= took < 2 * ONCE_SECONDS


def test_every_address_of_a_host_shares_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had the whole of it."""
    full = [socket.create_server(("127.0.0.1", 0), backlog=0) for _ in range(3)]
    fillers = []
    for listener in full:  # a queue that is full drops what comes
        for _ in range(2):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
            fillers.append(filler)
    addresses = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", listener.getsockname()) for listener in full
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: addresses)
    took = lasts(lambda: open_at(1, ONCE_SECONDS, tls=False), "timed out|deadline")
    for sock in (*full, *fillers):
        sock.close()
    assert took < 2 * ONCE_SECONDS
