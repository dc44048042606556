# SPDX-License-Identifier: Apache-2.0
"""Steps an engine core by hand, as the loop around it does, for as long as a test may wait.

Time is what ends it, not a count of steps: an engine that waits for a transfer makes thousands of
them where the machine is busy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.wire import TokenOutput

WAIT_SECONDS = 60.0
PAUSE_SECONDS = 0.0005


def step_outputs(core: EngineCore, seconds: float = WAIT_SECONDS) -> Iterator[list[TokenOutput]]:
    """What each step brings, without end until the time is over; who has enough stops asking."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if core.has_work():
            yield core.step()
        else:  # until a transfer ends, or it is time to ask a store again
            time.sleep(PAUSE_SECONDS)
