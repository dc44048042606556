# SPDX-License-Identifier: Apache-2.0
"""Limits on gRPC connections. After some time without valid credentials, one is shut down.

grpc does not expose its connections, but each connection is a file descriptor of this process. A
few times a second, a thread lists the connections of the gRPC port, and shuts down

    strangers        connections on which no call has had valid credentials: after a time; and the
                     oldest ones if one address, or all addresses together, have too many
    tenants' newest  the newest connections of a tenant that has more than its share

grpc then closes the connections that were shut down. The thread identifies a connection by its
inode. Before a shutdown the thread compares the inode of a duplicate descriptor, so that no other
connection is shut down."""

from __future__ import annotations

import collections
import ipaddress
import logging
import os
import socket
import stat
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...wire.limits import Limits
from .shares import Shares

log = logging.getLogger(__name__)

# Reasons to end a connection: no valid credentials in time; too many connections without
# credentials from one address, or in all; more connections than the tenant's share.
SILENT, ADDRESS, STRANGERS, SHARE = REASONS = ("silent", "address", "strangers", "share")

LOOK_SECONDS = 0.2  # between two rounds of the thread
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_OWN_FILES = "/proc/self/fd"

Peer = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Connection:
    """A connection of the gRPC port."""

    fd: int
    inode: int
    peer: Peer
    seen_at: float  # the time when the thread first listed it


class CallConnections:
    """Limits connections from `start` to `close`. `CallGuard` calls `note_tenant` for each call."""

    def __init__(
        self, limits: Limits, num_tenants: int, count: Callable[[str], None] = lambda _why: None
    ) -> None:
        self._limits = limits
        self._num_tenants = num_tenants
        self._count = count
        self._port = 0
        self._seen: dict[int, _Connection | None] = {}  # by inode; None for other sockets
        self._lock = threading.Lock()
        self._tenants: dict[str, str] = {}  # by grpc's name of the peer
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.turned_away: collections.Counter[str] = collections.Counter()

    def set_tenants(self, num_tenants: int) -> None:
        self._num_tenants = num_tenants

    @property
    def most_known(self) -> int:
        """The most connections of all tenants together. Other connections are for strangers."""
        return max(1, self._limits.max_connections - self._limits.max_strangers)

    def start(self, port: int) -> None:
        """Start to limit the connections of the gRPC port `port`."""
        self._port = port
        self._thread = threading.Thread(
            target=self._look_for_ever, name="stratakv-connections", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(10 * LOOK_SECONDS)

    def note_tenant(self, peer: str, tenant: str) -> None:
        """Record that a call from `peer`, as grpc writes it, had credentials of `tenant`."""
        if self._tenants.get(peer) != tenant:
            with self._lock:
                self._tenants[peer] = tenant

    def _look_for_ever(self) -> None:
        while not self._ending.wait(LOOK_SECONDS):
            try:
                self.look_once()
            except Exception:  # the thread must go on: without it strangers could stay
                log.exception("the connections of calls could not be looked at")

    def look_once(self) -> None:
        """List the connections once, and shut down those beyond the limits."""
        with self._lock:
            known = {_peer(text): (text, tenant) for text, tenant in self._tenants.items()}
        connections = self._connections()
        here = {connection.peer for connection in connections}
        with self._lock:  # remove closed peers, but not peers noted since this round began
            for peer, (text, _) in known.items():
                if peer not in here:
                    del self._tenants[text]
        strangers: list[_Connection] = []
        shares = Shares(self.most_known, self._num_tenants)
        for connection in sorted(connections, key=lambda each: each.seen_at):
            if connection.peer not in known:
                strangers.append(connection)
            elif not shares.take_place(known[connection.peer][1]):
                self._turn_away([connection], SHARE)
        self._turn_away_strangers(strangers)

    def _turn_away_strangers(self, strangers: list[_Connection]) -> None:
        """Shut down the strangers beyond the limits. `strangers` begins with the oldest."""
        limits = self._limits
        begun = time.monotonic() - limits.stranger_seconds
        late = [each for each in strangers if each.seen_at <= begun]
        self._turn_away(late, SILENT)
        rest: list[_Connection] = []
        of_address: collections.Counter[str] = collections.Counter()
        for each in reversed(strangers[len(late) :]):
            of_address[each.peer[0]] += 1
            if of_address[each.peer[0]] > limits.max_strangers_per_address:
                self._turn_away([each], ADDRESS)
            else:
                rest.append(each)
        self._turn_away(rest[limits.max_strangers :], STRANGERS)

    def _connections(self) -> list[_Connection]:
        now = time.monotonic()
        seen: dict[int, _Connection | None] = {}
        for name in os.listdir(_OWN_FILES):
            fd = int(name)
            try:
                status = os.fstat(fd)
            except OSError:
                continue  # closed meanwhile
            if not stat.S_ISSOCK(status.st_mode) or status.st_ino in seen:
                continue
            if status.st_ino in self._seen:
                seen[status.st_ino] = self._seen[status.st_ino]
            else:
                seen[status.st_ino] = self._look_at(fd, status.st_ino, now)
        self._seen = seen
        return [each for each in seen.values() if each is not None]

    def _look_at(self, fd: int, inode: int, now: float) -> _Connection | None:
        duplicate = _duplicate(fd, inode)
        if duplicate is None:
            return None
        with duplicate:
            try:
                if duplicate.family not in _FAMILIES or duplicate.getsockname()[1] != self._port:
                    return None
                host, port = duplicate.getpeername()[:2]
            except OSError:
                return None  # a listening socket, or a connection that has gone
        return _Connection(fd, inode, (_plain(host), port), now)

    def _turn_away(self, connections: Iterable[_Connection], why: str) -> None:
        for connection in connections:
            duplicate = _duplicate(connection.fd, connection.inode)
            if duplicate is None:
                continue
            with duplicate:
                try:
                    duplicate.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the connection was closed meanwhile
            # If grpc closes the socket late, the next round must not shut down and count this
            # connection again.
            self._seen[connection.inode] = None
            self.turned_away[why] += 1
            self._count(why)


def _duplicate(fd: int, inode: int) -> socket.socket | None:
    """Return a duplicate of the socket at `fd`, or None if its inode is not `inode`."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        if os.fstat(copy).st_ino == inode:
            return socket.socket(fileno=copy)
    except OSError:
        pass
    os.close(copy)
    return None


def _peer(text: str) -> Peer:
    """Parse a peer as grpc writes it, such as `ipv4:127.0.0.1:80` or `ipv6:%5B::1%5D:80`."""
    host, _, port = urllib.parse.unquote(text).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port) if port.isdecimal() else 0


def _plain(host: str) -> str:
    """Return the canonical text of an IP address, without a zone; IPv4-mapped IPv6 becomes IPv4."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
