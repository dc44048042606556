# SPDX-License-Identifier: Apache-2.0
"""SessionServer: accepts data connections, each of which a separate thread serves.

The number of connections is limited, in total and for each tenant. A stranger (a connection that
has not sent a ticket) has a short time to send a ticket. If the total is reached, the oldest
stranger is shut down. `DataServer` and `MemoryServer` are the two implementations."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import TierClosed
from ...wire.frames import (
    GREETING,
    VERSION,
    Status,
    Welcome,
    WireError,
    decode_greeting,
    encode_welcome,
)
from ...wire.limits import Limits
from ...wire.sockets import Connection, ConnectionLost
from ..access.shares import Shares
from ..served_store import ServedStore
from .session import Draining, NotKnown, Session

log = logging.getLogger(__name__)

_BACKLOG = 128
_TELL_SECONDS = 1.0  # between two warnings about clients' faults
_PAUSE_SECONDS = 0.5  # before another `accept`, and for aborted threads to end


class Opened(NamedTuple):
    """The tenant and the tenant store to which a ticket gives access."""

    tenant_store: ServedStore
    tenant: str
    # Returns whether the client's credentials are still valid; called before every request.
    is_known: Callable[[], bool] = lambda: True


# Reasons to refuse or end a connection: no valid ticket; no place for its tenant; no ticket sent
# while all places are taken; credentials that no longer belong to the tenant.
TICKET, BUSY, SILENT, CREDENTIALS = REFUSALS = ("ticket", "busy", "silent", "credentials")

# A function from a ticket to what the ticket opens; None for an invalid ticket.
Resolve = Callable[[bytes], Opened | None]


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The settings that `DataServer` and `MemoryServer` share."""

    boot_id: bytes
    resolve: Resolve
    limits: Limits
    num_tenants: int = 1
    refused: Callable[[str], None] = lambda _reason: None


class SessionServer(ABC):
    """Accepts connections on a listening socket, which a subclass makes."""

    def __init__(self, settings: SessionSettings) -> None:
        self._resolve = settings.resolve
        self._refused = settings.refused
        self._boot_id = settings.boot_id
        self._limits = settings.limits
        self._shares = Shares(self._limits.max_data_connections, settings.num_tenants)
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._sessions: dict[threading.Thread, Connection | None] = {}
        # Connections without a ticket, the oldest first, each with a duplicate socket for shutdown.
        self._strangers: dict[threading.Thread, socket.socket] = {}
        self._draining = Draining()
        self._closed = False
        self._told_at = float("-inf")

    def set_tenants(self, num_tenants: int) -> None:
        self._shares.set_tenants(num_tenants)

    @property
    def num_connections(self) -> int:
        return len(self._sessions)

    @abstractmethod
    def _wrap(self, sock: socket.socket) -> Connection:
        """Make a connection, on its own thread. Raises OSError, or ConnectionLost if refused."""

    @abstractmethod
    def _session(self, connection: Connection, tenant_store: ServedStore) -> Session:
        """Make the session that serves a client."""

    def _greet(self, connection: Connection, tenant_store: ServedStore, deadline: float) -> None:
        layout = tenant_store.layout
        welcome = Welcome(Status.OK, self._boot_id, layout.page_bytes, layout.slot_bytes, 0)
        connection.send([encode_welcome(welcome)], deadline)

    def _accept_from(self, listener: socket.socket) -> None:
        listener.listen(_BACKLOG)
        self._listener = listener
        self._acceptor = threading.Thread(
            target=self._accept, args=(listener,), name="stratakv-accept", daemon=True
        )
        self._acceptor.start()

    def close(self, timeout_seconds: float) -> None:
        """Stop accepting. Abort connections still open after `timeout_seconds`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            self._draining.begin_drain()
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
            listener.close()
        self._join(time.monotonic() + timeout_seconds)
        for connection in list(self._sessions.values()):
            if connection is not None:
                connection.abort()
        self._join(time.monotonic() + _PAUSE_SECONDS)
        if not self._sessions:
            self._draining.close()

    def _join(self, deadline: float) -> None:
        for thread in list(self._sessions):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._draining.has_begun:
                    return
                # A temporary error: no free descriptor, or a client that has already disconnected.
                log.warning("a data connection could not be taken: %s", error)
                time.sleep(_PAUSE_SECONDS)
                continue
            try:
                self._begin_session(sock)
            except (OSError, RuntimeError) as error:  # no free descriptor or thread
                log.warning("a data connection could not be served: %s", error)
                sock.close()

    def _begin_session(self, sock: socket.socket) -> None:
        """Start a thread, or close the socket at the limit. Raises OSError, RuntimeError."""
        thread = threading.Thread(
            target=self._serve, args=(sock,), name="stratakv-data", daemon=True
        )
        with self._lock:
            if self._draining.has_begun or not self._make_way():
                sock.close()
                return
            self._strangers[thread] = sock.dup()
            self._sessions[thread] = None
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                del self._sessions[thread]
                self._strangers.pop(thread).close()
            raise

    def _make_way(self) -> bool:
        """Whether a connection may begin. At the limit, the oldest stranger is shut down first."""
        most = self._shares.most
        if len(self._sessions) < most:
            return True
        if not self._strangers or len(self._sessions) >= 2 * most:
            return False  # connections that were shut down have not ended yet
        handle = self._strangers.pop(next(iter(self._strangers)))
        with handle, contextlib.suppress(OSError):
            handle.shutdown(socket.SHUT_RDWR)
        self._refused(SILENT)
        return True

    def _mark_known(self, thread: threading.Thread) -> None:
        """Remove a connection from the strangers, because it has sent a ticket or has ended."""
        with self._lock:
            handle = self._strangers.pop(thread, None)
        if handle is not None:
            handle.close()

    def _serve(self, sock: socket.socket) -> None:
        """Serve a connection until it ends. Runs on the connection's thread."""
        me = threading.current_thread()
        try:
            deadline = time.monotonic() + self._limits.handshake_seconds
            sock.settimeout(self._limits.handshake_seconds)
            connection = self._wrap(sock)
            with self._lock:
                self._sessions[me] = connection
            if self._draining.has_begun:
                return
            opened = self._open_session(connection, deadline)
            if opened is None:
                return
            session, tenant = opened
            try:
                session.run()
            finally:
                session.close()
                self._shares.give_back_place(tenant)
        except NotKnown as error:
            self._refused(CREDENTIALS)
            log.debug("a data connection was ended: %s", error)
        except (ConnectionLost, OSError, TierClosed) as error:
            log.debug("a data connection ended: %s", error)
        except WireError as error:
            log.log(self._level(), "a data connection was ended: %s", error)
        except Exception:
            log.exception("a data connection was ended by a fault of this server")
        finally:
            sock.close()
            self._mark_known(me)
            with self._lock:
                known = self._sessions.pop(me, None)
            if known is not None:
                known.close()

    def _level(self) -> int:
        """Return the log level for a client's fault: DEBUG within _TELL_SECONDS of the last
        warning, so that clients cannot fill the log, else WARNING."""
        now = time.monotonic()
        with self._lock:
            is_new = now - self._told_at >= _TELL_SECONDS
            self._told_at = now if is_new else self._told_at
        return logging.WARNING if is_new else logging.DEBUG

    def _open_session(self, connection: Connection, deadline: float) -> tuple[Session, str] | None:
        """Receive the greeting. Return the session and its tenant, or None for a refused client."""
        version, ticket = decode_greeting(connection.receive(GREETING.size, deadline))
        opened = self._resolve(ticket) if version == VERSION else None
        status = Status.BAD_VERSION if version != VERSION else Status.BAD_TICKET
        if opened is not None:
            tenant_store, tenant, is_known = opened
            if self._shares.take_place(tenant):
                self._mark_known(threading.current_thread())
                try:
                    self._greet(connection, tenant_store, deadline)
                    session = self._session(connection, tenant_store)
                    session.is_known = is_known
                    return session, tenant
                except BaseException:
                    self._shares.give_back_place(tenant)
                    raise
            status = Status.BUSY
        self._refused(BUSY if status is Status.BUSY else TICKET)
        refusal = Welcome(status, self._boot_id, 0, 0, 0)
        connection.send([encode_welcome(refusal)], deadline)
        return None
