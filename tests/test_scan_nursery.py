# SPDX-License-Identifier: Apache-2.0
"""The process that forks scans for the tests outlives what its scans and their askers do."""

from __future__ import annotations

import os
import selectors
import socket

from .scan_nursery import _kill, _tell


def test_a_scan_that_ends_as_its_asker_leaves_is_not_killed() -> None:
    """Both are told of in one turn: the answer comes first, and closes the connection."""
    asker, connection = socket.socketpair()
    pid = os.fork()
    if not pid:
        os._exit(3)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    end = os.pidfd_open(pid)
    with asker, selectors.DefaultSelector() as selector:
        selector.register(end, selectors.EVENT_READ)
        selector.register(connection, selectors.EVENT_READ)
        _tell(end, selector, pid, connection)
        assert asker.recv(10) == b"3"
        _kill(connection, selector, os.getpid())  # it would end this process
        assert not selector.get_map()
