# SPDX-License-Identifier: Apache-2.0
"""A wire to a server that can be cut, stalled and slowed down while requests run.

with Wire(port_of_the_server) as wire:
    ... talk to wire.port ...
    wire.cut()                   reset all connections
    wire.state = "stalled"       nothing gets through, and nothing is lost; "up" again later
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Literal

from ...free_ports import free_ports

State = Literal["up", "stalled", "slow"]
_PAUSE_SECONDS = 0.01


class Wire:
    """Listens on `port` and passes bytes on to `target`."""

    def __init__(self, target: int) -> None:
        (self.port,) = free_ports(1)
        self.state: State = "up"
        self._target = target
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_error: object) -> None:
        self._closed = True
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Reset every connection."""
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                if not self._closed:
                    near.close()
                continue
            self._sockets |= {near, far}
            for source, drain in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, drain), daemon=True).start()

    def _pass_on(self, source: socket.socket, drain: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                while self.state == "stalled" and not self._closed:
                    time.sleep(_PAUSE_SECONDS)
                if self.state == "slow":
                    time.sleep(_PAUSE_SECONDS)
                drain.sendall(data)
            drain.shutdown(socket.SHUT_WR)
        except OSError:
            with contextlib.suppress(OSError):
                drain.shutdown(socket.SHUT_RDWR)
        if drain not in self._sockets:
            source.close()
        self._sockets.discard(source)
