# SPDX-License-Identifier: Apache-2.0
"""Messages and steps take turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from stratakv.engine.core.loop import CoreLoop
from stratakv.engine.request.core_messages import AddRequest, TokenOutput
from stratakv.engine.request.sampling_params import SamplingParams

NUM_REQUESTS = 20
ADD_SECONDS = 0.01


class SlowCore:
    """Takes long over every request and notes what it did."""

    num_failed_steps = 0

    def __init__(self) -> None:
        self.done: list[str] = []
        self.threads: list[int] = []  # that have entered

    def add(self, request: AddRequest) -> list[TokenOutput]:
        time.sleep(ADD_SECONDS)
        self.done.append("add")
        return []

    def abort_requests(self, request_ids: list[str], reason: str) -> None:
        pass

    def call(self, name: str, argument: str) -> Any:
        return None

    def has_work(self) -> bool:
        return True

    def idle_seconds(self) -> float:
        return 0.1

    def step(self) -> list[TokenOutput]:
        self.done.append("step")
        return []

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        pass

    def enter_thread(self) -> None:
        self.threads.append(threading.get_ident())

    def shutdown(self) -> None:
        pass


def test_a_flood_of_slow_requests_does_not_hold_up_the_steps() -> None:
    core = SlowCore()
    loop = CoreLoop(core, lambda message: None)
    for number in range(NUM_REQUESTS):
        loop.submit(AddRequest(str(number), b"\1\0\0\0", SamplingParams()), 0.0)
    while core.done.count("add") < NUM_REQUESTS:
        loop._take_messages(may_wait=False)
        core.step()
    turns = "".join(kind[0] for kind in core.done).split("s")
    # Two or three of 10 ms in 20 ms, fewer where a sleep takes longer; never all of them.
    assert all(1 <= len(adds) <= 3 for adds in turns if adds)
    assert len([adds for adds in turns if adds]) >= NUM_REQUESTS // 3


def test_the_thread_that_steps_enters_first() -> None:
    """CUDA's current device and stream are a thread's own, and the core was built in another."""
    core = SlowCore()
    loop = CoreLoop(core, lambda message: None)
    thread = threading.Thread(target=loop.run)
    loop.stop()
    thread.start()
    thread.join()
    assert core.threads == [thread.ident]
