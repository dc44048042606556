# SPDX-License-Identifier: Apache-2.0
"""What tests of grammars within limits share."""

from __future__ import annotations

import time
from collections.abc import Callable

from stratakv.engine.structured.processes.limited_thread import Limit

SHORT = Limit(cpu_seconds=0.05)
WAIT_SECONDS = 60.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
