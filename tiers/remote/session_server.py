# SPDX-License-Identifier: Apache-2.0
"""Takes connections of the data plane: a ticket is shown, a session served, one thread for each.

Bounded in number; strangers have a short time to show a ticket. Knows nothing of what a session
says; `DataServer` and `MemoryServer` are its two forms.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from ..errors import TierClosed
from .limits import Limits
from .room import Room
from .session import Draining, Session
from .sockets import Connection, ConnectionLost
from .wire import (
    GREETING,
    VERSION,
    Status,
    Welcome,
    WireError,
    decode_greeting,
    encode_welcome,
)

log = logging.getLogger(__name__)

# What a ticket opens: a room, and the name of the tenant; None for a ticket that opens nothing.
Resolve = Callable[[bytes], tuple[Room, str] | None]

_BACKLOG = 128
_PAUSE_SECONDS = 0.5  # before another try, and for threads to notice that it is over


class SessionServer(ABC):
    """Accepts on a listening socket that a subclass makes."""

    def __init__(self, resolve: Resolve, *, boot_id: bytes, limits: Limits) -> None:
        self._resolve = resolve
        self._boot_id = boot_id
        self._limits = limits
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._sessions: dict[threading.Thread, Connection | None] = {}
        self._draining = Draining()
        self._closed = False

    @property
    def num_connections(self) -> int:
        """Connections that are open now."""
        return len(self._sessions)

    @abstractmethod
    def _wrap(self, sock: socket.socket) -> Connection:
        """Make a connection of a socket that was accepted, on its own thread. Raises OSError or
        ConnectionLost for one that is refused."""

    @abstractmethod
    def _session(self, connection: Connection, room: Room) -> Session:
        """What serves a client."""

    def _greet(self, connection: Connection, room: Room, deadline: float) -> None:
        """The welcome to a client with a good ticket."""
        layout = room.layout
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
        """Take no more, let requests under way end within the time, then end every connection.
        Idempotent."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            self._draining.begin()
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
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
                # Out of descriptors, or a client that is gone already: neither is for ever.
                log.warning("a data connection could not be taken: %s", error)
                time.sleep(_PAUSE_SECONDS)
                continue
            with self._lock:
                if (
                    self._draining.has_begun
                    or len(self._sessions) >= self._limits.max_data_connections
                ):
                    sock.close()
                    continue
                thread = threading.Thread(
                    target=self._serve, args=(sock,), name="stratakv-data", daemon=True
                )
                self._sessions[thread] = None
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        """A connection's whole life, on its thread."""
        me = threading.current_thread()
        try:
            deadline = time.monotonic() + self._limits.handshake_seconds
            sock.settimeout(self._limits.handshake_seconds)
            connection = self._wrap(sock)
            with self._lock:
                self._sessions[me] = connection
            if self._draining.has_begun:
                return
            session = self._open(connection, deadline)
            if session is not None:
                try:
                    session.run()
                finally:
                    session.close()
        except (ConnectionLost, OSError, TierClosed) as error:
            log.debug("a data connection ended: %s", error)
        except WireError as error:
            log.warning("a data connection was ended: %s", error)
        except Exception:
            log.exception("a data connection was ended by a fault of this server")
        finally:
            sock.close()
            with self._lock:
                known = self._sessions.pop(me, None)
            if known is not None:
                known.close()

    def _open(self, connection: Connection, deadline: float) -> Session | None:
        """Take the greeting. None for a client that was refused."""
        version, ticket = decode_greeting(connection.receive(GREETING.size, deadline))
        opened = self._resolve(ticket) if version == VERSION else None
        if opened is None:
            status = Status.BAD_TICKET if version == VERSION else Status.BAD_VERSION
            refusal = Welcome(status, self._boot_id, 0, 0, 0)
            connection.send([encode_welcome(refusal)], deadline)
            return None
        room, _ = opened
        self._greet(connection, room, deadline)
        return self._session(connection, room)
