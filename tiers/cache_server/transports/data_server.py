# SPDX-License-Identifier: Apache-2.0
"""The data connection's port: TCP, with TLS where the service has it.

Socket buffers are left to the kernel, which tunes them better than any fixed size. Knows nothing of
what is said.
"""

from __future__ import annotations

import errno
import socket
import ssl

from ...errors import TierConfigError
from ...wire.limits import Limits
from ...wire.sockets import Connection
from ..tenant_store import Room
from .data_session import DataSession
from .session import Session
from .session_server import Resolve, SessionServer


class DataServer(SessionServer):
    """Listens on `host` and `port`; 0 is any free one."""

    def __init__(
        self,
        resolve: Resolve,
        host: str,
        port: int,
        *,
        boot_id: bytes,
        limits: Limits,
        tls: ssl.SSLContext | None,
        num_tenants: int = 1,
    ) -> None:
        super().__init__(resolve, boot_id=boot_id, limits=limits, num_tenants=num_tenants)
        self._host = host
        self._port = port
        self._tls = tls

    def start(self) -> int:
        """Listen; the port. Raises TierConfigError where that cannot be."""
        try:
            infos = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            family, _, _, _, address = infos[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            cure = "choose another --data-port" if error.errno == errno.EADDRINUSE else "see --host"
            raise TierConfigError(
                f"the data connection cannot listen on {self._host} port {self._port}: "
                f"{error.strerror or error}; {cure}"
            ) from error
        self._accept_from(listener)
        port: int = listener.getsockname()[1]
        return port

    def _wrap(self, sock: socket.socket) -> Connection:
        if self._tls is None:
            return Connection(sock)
        # The handshake has the time limit that the socket was given.
        return Connection(self._tls.wrap_socket(sock, server_side=True))

    def _session(self, connection: Connection, room: Room) -> Session:
        return DataSession(connection, room, self._limits, self._draining)
