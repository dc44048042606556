# SPDX-License-Identifier: Apache-2.0
"""Tickets for data connections. A ticket opens one connection of a tenant and soon expires.

A ticket identifies the caller, so the data connection needs no other credentials. A valid ticket
must be kept as secret as a token. Thread-safe."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

from ...wire.frames import TICKET_BYTES
from ...wire.status import TooMuch
from .auth import Caller


class Tickets:
    """The unused tickets: at most `most` of each tenant. A ticket is valid for `seconds`."""

    def __init__(
        self, most: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        # Ordered by expiry, because all tickets are valid for the same time.
        self._open: dict[bytes, tuple[Caller, float]] = {}
        self._count: dict[str, int] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)

    def issue_ticket(self, caller: Caller) -> bytes:
        """Make a ticket. Raises TooMuch if the tenant has too many unused tickets."""
        tenant = caller.tenant.name
        with self._lock:
            now = self._clock()
            self._expire(now)
            if self._count.get(tenant, 0) >= self._most:
                raise TooMuch(
                    f"{self._most} tickets of {tenant} wait to be used; each lasts "
                    f"{self._seconds:g} s"
                )
            ticket = secrets.token_bytes(TICKET_BYTES)
            self._open[ticket] = caller, now + self._seconds
            self._count[tenant] = self._count.get(tenant, 0) + 1
            return ticket

    def use_ticket(self, ticket: bytes) -> Caller | None:
        """Invalidate a ticket. Return the caller of a valid ticket, or None."""
        with self._lock:
            self._expire(self._clock())
            return self._remove(ticket)

    def _expire(self, now: float) -> None:
        while self._open:
            ticket, (_, end) = next(iter(self._open.items()))
            if end > now:
                return
            self._remove(ticket)

    def _remove(self, ticket: bytes) -> Caller | None:
        caller, _ = self._open.pop(ticket, (None, 0.0))
        if caller is not None:
            tenant = caller.tenant.name
            self._count[tenant] -= 1
            if not self._count[tenant]:
                del self._count[tenant]
        return caller
