# SPDX-License-Identifier: Apache-2.0
"""The socket by which systemd hears of a service: datagrams of `NAME=value` lines."""

from __future__ import annotations

import socket
from types import TracebackType

WAIT_SECONDS = 60.0


class NotifySocket:
    """Listens at `path`, or at a name of the kernel's own space if that begins with `@`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.settimeout(WAIT_SECONDS)
        self._sock.bind("\0" + path[1:] if path.startswith("@") else path)

    def __enter__(self) -> NotifySocket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sock.close()

    def next(self) -> dict[str, str]:
        """The next message, as soon as it comes."""
        pairs = (line.partition("=") for line in self._sock.recv(4096).decode().split("\n"))
        return {name: value for name, _, value in pairs}

    def is_quiet(self) -> bool:
        """Nobody has said anything more."""
        self._sock.setblocking(False)
        try:
            self._sock.recv(4096)
        except BlockingIOError:
            return True
        finally:
            self._sock.settimeout(WAIT_SECONDS)
        return False
