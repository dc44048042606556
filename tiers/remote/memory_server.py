# SPDX-License-Identifier: Apache-2.0
"""The Unix socket that hands a room's memory to processes of the same user on the same host.

It lies in a folder of its own that only the user can enter, and the kernel is asked who calls. A
ticket says whose room it is: nobody gets the memory of another tenant. Knows nothing of what is
said.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import tempfile

from ..errors import TierConfigError
from .memory_session import MemorySession
from .room import Room
from .session import Session
from .session_server import SessionServer
from .sockets import Connection, ConnectionLost
from .wire import Status, Welcome, encode_welcome

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class MemoryServer(SessionServer):
    """Listens on a new path."""

    _folder: str | None = None

    def start(self) -> str:
        """Listen; the path. Raises TierConfigError where that cannot be."""
        try:
            self._folder = tempfile.mkdtemp(prefix="stratakv-memory-")  # 0700
            path = os.path.join(self._folder, "socket")
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(path)
                os.chmod(path, 0o600)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            raise TierConfigError(
                f"no Unix socket can be made under {tempfile.gettempdir()} ({error}); set TMPDIR "
                "to a folder with a shorter name that may be written to"
            ) from error
        self._accept_from(listener)
        return path

    def close(self, timeout_seconds: float) -> None:
        super().close(timeout_seconds)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._folder)

    def _wrap(self, sock: socket.socket) -> Connection:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.geteuid():
            raise ConnectionLost(f"user {uid} may not map the memory of user {os.geteuid()}")
        return Connection(sock)

    def _greet(self, connection: Connection, room: Room, deadline: float) -> None:
        layout = room.layout
        welcome = Welcome(
            Status.OK, self._boot_id, layout.page_bytes, layout.slot_bytes, room.num_slots
        )
        connection.send_fd(encode_welcome(welcome), room.memory_fd, deadline)

    def _session(self, connection: Connection, room: Room) -> Session:
        return MemorySession(connection, room, self._limits, self._draining)
