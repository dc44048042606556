# SPDX-License-Identifier: Apache-2.0
"""Session: the server's side of one data connection, which answers requests in order. `DataSession`
and `MemorySession` implement the verbs."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from ...block import KEY_BYTES
from ...wire.frames import (
    REQUEST,
    ReplyFrame,
    RequestFrame,
    Status,
    Verb,
    WireError,
    decode_request,
    encode_reply,
    unpack_keys,
)
from ...wire.limits import Limits
from ...wire.sockets import Connection
from ..served_store import ServedStore


class Draining:
    """A flag that is set when the server shuts down. `fd` wakes threads that wait for a socket."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.has_begun = False

    def begin_drain(self) -> None:
        """Set the flag. Any thread may call this method. Idempotent."""
        self.has_begun = True
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Close `fd`, for which no thread may still wait."""
        os.close(self.fd)


class NotKnown(Exception):
    """The credentials that opened a connection no longer belong to the tenant."""


class Session(ABC):
    """The session of one client with one tenant store."""

    def __init__(
        self,
        connection: Connection,
        tenant_store: ServedStore,
        limits: Limits,
        draining: Draining,
    ) -> None:
        self._connection = connection
        self._tenant_store = tenant_store
        self._limits = limits
        self._draining = draining
        self._verbs = self._answers()
        self.is_known: Callable[[], bool] = lambda: True  # whether the credentials are valid

    @abstractmethod
    def _answers(self) -> Mapping[Verb, Callable[[RequestFrame, float], None]]:
        """Return the method that answers each verb; a method takes a request and a deadline."""

    def run(self) -> None:
        """Answer requests until the client ends or is idle. Raises ConnectionLost, NotKnown,
        WireError."""
        while self._wait_for_request():
            if not self.is_known():
                raise NotKnown("the client's credentials are not known any more")
            deadline = time.monotonic() + self._limits.request_seconds
            request = decode_request(self._connection.receive(REQUEST.size, deadline))
            answer = self._verbs.get(request.verb)
            if self._draining.has_begun:
                self._send_reply(request, Status.DRAINING, deadline)
                return
            try:
                if answer is None:
                    raise WireError(f"{request.verb.name} is no word of this connection")
                answer(request, deadline)
            except WireError:
                self._send_reply(request, Status.BAD_REQUEST, deadline)
                raise

    def close(self) -> None:  # noqa: B027 - most sessions hold nothing
        """Release all blocks and slots that the client has leased."""

    def _wait_for_request(self) -> bool:
        """Wait for a request. Return False after `idle_seconds`, or when the server drains."""
        silent_until = time.monotonic() + self._limits.idle_seconds
        return self._connection.wait_readable(silent_until, self._draining.fd)

    def _receive_keys(self, request: RequestFrame, deadline: float) -> list[bytes]:
        return unpack_keys(self._connection.receive(request.blocks * KEY_BYTES, deadline))

    def _send_reply(
        self,
        request: RequestFrame,
        status: Status,
        deadline: float,
        *,
        blocks: int = 0,
        argument: int = 0,
        rest: bytes = b"",
    ) -> None:
        head = ReplyFrame(request.verb, status, blocks, request.number, argument)
        self._connection.send([encode_reply(head) + rest], deadline)
