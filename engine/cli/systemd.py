# SPDX-License-Identifier: Apache-2.0
"""Tells systemd, of a unit with `Type=notify` or `notify-reload`, when a server can be used, reads
its files anew, and ends: sd_notify(3), a datagram to the socket that NOTIFY_SOCKET names.

Without that variable nothing is told. What cannot be told ends nothing: it is one line in the log.
"""

from __future__ import annotations

import logging
import os
import socket
import time

logger = logging.getLogger(__name__)

VARIABLE = "NOTIFY_SOCKET"
# systemd may be busy; a server that cannot tell it something goes on.
SEND_SECONDS = 1.0


def tell_ready() -> None:
    """Clients are served, or: what SIGHUP asked for is done."""
    _tell("READY=1")


def tell_reloading() -> None:
    """SIGHUP was heard; `tell_ready` follows, whatever comes of it."""
    # The time by which `notify-reload` knows that this answers its signal and no earlier one.
    _tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def tell_stopping() -> None:
    """The end has begun."""
    _tell("STOPPING=1")


def _tell(*lines: str) -> None:
    name = os.environ.get(VARIABLE, "")
    if not name:
        return
    # A name in the kernel's own space begins with a zero byte, which a variable cannot hold.
    address = "\0" + name[1:] if name.startswith("@") else name
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(SEND_SECONDS)
            sock.sendto("\n".join(lines).encode(), address)
    except (OSError, ValueError) as error:
        logger.warning("systemd cannot be told %s at %s=%s: %s", lines[0], VARIABLE, name, error)
