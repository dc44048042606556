# SPDX-License-Identifier: Apache-2.0
"""Prompts of numbers are let in by their memory, not by their number alone."""

from __future__ import annotations

import numpy as np
import pytest

from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler import request_limits as limits
from stratakv.engine.scheduler.request_limits import QueueFull

from .conftest import HASHER, Engine, MakeEngine


def add(engine: Engine, name: str, num_tokens: int) -> None:
    embeds = np.zeros((num_tokens, 128), np.float32)
    request = Request(
        name, [0] * num_tokens, SamplingParams(max_tokens=2), block_hasher=HASHER,
        prompt_embeds=embeds,
    )  # fmt: skip
    engine.scheduler.add_request(request)


def test_more_wait_for_memory(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_EMBED_BYTES", 8 * 1024)
    engine = make_engine()
    add(engine, "alone", 40)  # too large for the limit, and nobody else is there
    with pytest.raises(QueueFull, match=r"take 20\.?0? ?KiB.*try later"):
        add(engine, "b", 4)
    engine.add("tokens", [1, 2, 3])
    engine.scheduler.finish_requests(["alone"])
    add(engine, "b", 4)
    add(engine, "c", 12)
    with pytest.raises(QueueFull):
        add(engine, "d", 4)
    engine.run_all()
    assert engine.scheduler._states.embed_bytes == 0
    add(engine, "d", 4)
