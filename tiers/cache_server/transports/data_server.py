# SPDX-License-Identifier: Apache-2.0
"""DataServer: accepts data connections on a TCP port, with TLS if the gRPC service uses TLS. The
kernel chooses the sizes of socket buffers, which is better than any fixed size."""

from __future__ import annotations

import errno
import socket
import ssl

from ...errors import TierConfigError
from ...wire.sockets import Connection
from ..served_store import ServedStore
from .data_session import DataSession
from .session import Session
from .session_server import SessionServer, SessionSettings


class DataServer(SessionServer):
    """Accepts data connections on `host` and `port`. Port 0 means any free port."""

    def __init__(
        self, settings: SessionSettings, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(settings)
        self._host = host
        self._port = port
        self._tls = tls

    def set_tls(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls

    def start(self) -> int:
        """Listen, and return the port. Raises TierConfigError if the port cannot be opened."""
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
        # The timeout of the socket limits the time of the handshake.
        return Connection(self._tls.wrap_socket(sock, server_side=True))

    def _session(self, connection: Connection, tenant_store: ServedStore) -> Session:
        return DataSession(connection, tenant_store, self._limits, self._draining)
