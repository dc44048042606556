# SPDX-License-Identifier: Apache-2.0
"""Notifies systemd when a server is ready, reloads its files, and stops: sd_notify(3).

The notifications are for units with `Type=notify` or `notify-reload`. A message is a datagram to
the socket that the variable NOTIFY_SOCKET names; without the variable no message is sent. A message
that cannot be sent causes one log line and does not end the server."""

from __future__ import annotations

import logging
import os
import socket
import time

logger = logging.getLogger(__name__)

VARIABLE = "NOTIFY_SOCKET"
# Time limit for sending a message to a busy systemd. The server goes on without the message.
SEND_SECONDS = 1.0


def tell_ready() -> None:
    """Notify systemd that the server serves clients, or that a reload is done."""
    _tell("READY=1")


def tell_reloading() -> None:
    """Notify systemd that a reload begins. `tell_ready` must follow, even if the reload fails."""
    # The time shows systemd (`notify-reload`) which of its signals the message answers.
    _tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def tell_stopping() -> None:
    _tell("STOPPING=1")


def _tell(*lines: str) -> None:
    name = os.environ.get(VARIABLE, "")
    if not name:
        return
    # In NOTIFY_SOCKET, @ stands for the zero byte at the start of an abstract socket's name.
    address = "\0" + name[1:] if name.startswith("@") else name
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(SEND_SECONDS)
            sock.sendto("\n".join(lines).encode(), address)
    except (OSError, ValueError) as error:
        logger.warning("systemd cannot be told %s at %s=%s: %s", lines[0], VARIABLE, name, error)
