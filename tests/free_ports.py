# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that are started in a moment, and started again after they were killed."""

from __future__ import annotations

import random
import socket

# Below the ports that the kernel gives to outgoing connections: one of those could take the port of
# a server that is not there for a while.
_FIRST, _LAST = 10_000, 32_000
_rng = random.SystemRandom()  # two processes that run the same test must not draw the same


def free_ports(count: int) -> list[int]:
    """So many in a row, of which nobody listened at any a moment ago."""
    for _ in range(1000):
        first = _rng.randrange(_FIRST, _LAST - count)
        ports = list(range(first, first + count))
        if all(map(_is_free, ports)):
            return ports
    raise AssertionError(f"no {count} free ports in a row")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
