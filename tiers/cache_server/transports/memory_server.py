# SPDX-License-Identifier: Apache-2.0
"""MemoryServer: shares a tenant store's memory with this user's processes over a Unix socket.

The socket is in its own folder, which only this user can enter, and the server refuses clients of
other users (SO_PEERCRED). The client's ticket selects the tenant store, so no client gets another
tenant's memory. The server locks its folder; a later server removes the unlocked folders that
killed servers left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import tempfile

from ...errors import TierConfigError
from ...wire.frames import Status, Welcome, encode_welcome
from ...wire.sockets import Connection, ConnectionLost
from ..served_store import ServedStore
from .memory_session import MemorySession
from .session import Session
from .session_server import SessionServer

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


_PREFIX, _SOCKET = "stratakv-memory-", "socket"


class MemoryServer(SessionServer):
    """Accepts memory sessions on a Unix socket at a new path."""

    _folder: str | None = None
    _folder_lock: int | None = None

    def start(self) -> str:
        """Listen, and return the path. Raises TierConfigError if no socket can be made."""
        why = []
        for parent in _parents():
            try:
                return self._start_in(parent)
            except OSError as error:
                self._remove_folder()
                why.append(f"{parent}: {error.strerror or error}")
        raise TierConfigError(
            f"no Unix socket can be made for clients on this host ({'; '.join(why)}); set TMPDIR "
            "to a folder with a short name that may be written to, or start without memory for "
            "them: --no-shared-memory"
        )

    def _start_in(self, parent: str) -> str:
        _remove_left_folders(parent)
        self._folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)  # mode 0700
        self._folder_lock = _lock(self._folder)
        path = os.path.join(self._folder, _SOCKET)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            os.chmod(path, 0o600)
        except OSError:
            listener.close()
            raise
        self._accept_from(listener)
        return path

    def close(self, timeout_seconds: float) -> None:
        super().close(timeout_seconds)
        self._remove_folder()

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
        descriptor, self._folder_lock = self._folder_lock, None
        if descriptor is not None:
            os.close(descriptor)

    def _wrap(self, sock: socket.socket) -> Connection:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.geteuid():
            raise ConnectionLost(f"user {uid} may not map the memory of user {os.geteuid()}")
        return Connection(sock)

    def _greet(self, connection: Connection, tenant_store: ServedStore, deadline: float) -> None:
        layout = tenant_store.layout
        welcome = Welcome(
            Status.OK, self._boot_id, layout.page_bytes, layout.slot_bytes, tenant_store.num_slots
        )
        connection.send_fd(encode_welcome(welcome), tenant_store.memory_fd, deadline)

    def _session(self, connection: Connection, tenant_store: ServedStore) -> Session:
        return MemorySession(connection, tenant_store, self._limits, self._draining)


def _lock(folder: str) -> int | None:
    """Lock a folder. Return a descriptor, or None for a locked folder. May raise OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _parents() -> list[str]:
    """Return parents for the socket's folder. The first writable parent is used."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    named = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - the folder in it is 0700 and new
    return list(dict.fromkeys((named, "/tmp", runtime, "/dev/shm")))  # noqa: S108 - likewise


def _remove_left_folders(parent: str) -> None:
    """Remove the folders that this user's killed servers left. A folder without a socket stays,
    since another server may be starting in it. May raise OSError."""
    for entry in os.scandir(parent):
        with contextlib.suppress(OSError):
            if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
                continue
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            descriptor = _lock(entry.path)
            if descriptor is None:
                continue
            try:
                if os.path.lexists(os.path.join(entry.path, _SOCKET)):
                    shutil.rmtree(entry.path)
            finally:
                os.close(descriptor)
