# SPDX-License-Identifier: Apache-2.0
"""Which threads of the product a test has left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

# Of every thread that works for a tier, a device or a server.
PREFIX = "stratakv"
WAIT_SECONDS = 10.0


def check_threads(before: Collection[threading.Thread]) -> None:
    """Every thread that was not there `before` has ended, or does so at once."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        left = [
            thread.name
            for thread in threading.enumerate()
            if thread.name.startswith(PREFIX) and thread not in before
        ]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.002)
    assert not left, f"threads that nobody has ended: {left}; was something not closed?"
