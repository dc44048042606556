# SPDX-License-Identifier: Apache-2.0
"""Scans of the indexes of SSD stores, forked from a process that has imported what a scan does.

A store that opens has `scan.py` look at its index in a Python of its own, of whose 24 ms of
processor time 20 are its start; the tests open some two thousand. `nursery_site/scan_client.py`
asks; `python -m tests.scan_nursery PARENT FD PATH` is this side. A scan ends with the connection of
whoever asked for it.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

import lmdb  # noqa: F401 - for the scans

from .nursery_site.scan_client import MOST_BYTES, SCAN_FOLDER

_DESCRIPTORS = 2  # standard output and standard error
_SCAN_SECONDS = 600  # after which one that nobody ended ends by SIGALRM


def main(descriptor: int, listening: int) -> None:
    sys.path.insert(0, SCAN_FOLDER)
    scan = importlib.import_module("scan")
    with (
        socket.socket(fileno=descriptor) as parent,
        socket.socket(fileno=listening) as listener,
        selectors.DefaultSelector() as selector,
    ):
        selector.register(parent, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ, (_begin, selector, scan))
        while True:
            for key, _ in selector.select():
                if key.fileobj is parent:
                    _end_all(selector)
                    return
                step, *rest = key.data
                try:
                    step(key.fileobj, *rest)
                except Exception:
                    traceback.print_exc()  # of one scan, whose test says what it lacked


def _begin(listener: socket.socket, selector: selectors.BaseSelector, scan: Any) -> None:
    """Fork a scan for whoever asks."""
    connection, _ = listener.accept()
    text, received, _, _ = socket.recv_fds(connection, MOST_BYTES, _DESCRIPTORS)
    pid = os.fork() if text else 0
    if text and not pid:
        _run(scan, json.loads(text), received)
    for number in received:
        os.close(number)
    if not text:
        connection.close()
        return
    end = os.pidfd_open(pid)
    selector.register(end, selectors.EVENT_READ, (_tell, selector, pid, connection))
    selector.register(connection, selectors.EVENT_READ, (_kill, selector, pid))


def _run(scan: Any, request: dict[str, Any], received: list[int]) -> None:
    """In a scan: never returns."""
    status = 1
    try:
        os.dup2(received[0], 1)
        os.dup2(received[1], 2)
        os.closerange(3, 1 << 10)
        signal.alarm(_SCAN_SECONDS)
        os.chdir(request["folder"])
        status = scan.main(request["arguments"])
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _tell(end: int, selector: selectors.BaseSelector, pid: int, connection: socket.socket) -> None:
    """The exit status, negative for a signal, to whoever asked for this scan."""
    selector.unregister(end)
    os.close(end)
    with suppress(KeyError):
        selector.unregister(connection)
    _, status = os.waitpid(pid, 0)
    with connection, suppress(OSError):
        connection.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())


def _kill(connection: socket.socket, selector: selectors.BaseSelector, pid: int) -> None:
    """Who asked has left, or has had enough."""
    if connection.fileno() < 0:
        return  # `_tell`, called for the same turn, has answered: that process is no more
    selector.unregister(connection)
    os.kill(pid, signal.SIGKILL)  # `_tell` alone waits for it


def _end_all(selector: selectors.BaseSelector) -> None:
    for key in list(selector.get_map().values()):
        if key.data and key.data[0] is _kill:
            os.kill(key.data[2], signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
