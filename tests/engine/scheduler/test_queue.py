# SPDX-License-Identifier: Apache-2.0
"""The queue of waiting requests: its order."""

from __future__ import annotations

from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler.policies import FCFSQueue


def test_first_come_first_served_and_the_front() -> None:
    a, b, c, d = [Request(name, [1], SamplingParams()) for name in "abcd"]
    queue = FCFSQueue()
    assert not queue
    queue.add(a)
    queue.add(b)
    queue.prepend(c)
    assert list(queue) == [c, a, b]
    assert queue.remove_request(c)
    assert queue.remove_request(b)
    assert not queue.remove_request(b)
    queue.add_all([c, d])
    assert list(queue) == [a, c, d]
    assert len(queue) == 3
