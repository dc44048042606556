# SPDX-License-Identifier: Apache-2.0
"""A whole engine with a disk: what it has of a job's turn is in the slab before the next one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import AddRequest, RequestExtras
from stratakv.tiers.slab.cpu_slab import HELD_SHARE

from ...stepping import WAIT_SECONDS
from .conftest import MakeCore, Reference, prompt_of, request, run

BLOCK = 8
PROMPT = 200  # tokens
TOOL = "build"


def counters(core: EngineCore) -> dict[str, Any]:
    connector: dict[str, Any] = core.call("stats", "")["connector"]
    return connector


def turn(name: str, prompt: list[int], job: str, **extras: Any) -> AddRequest:
    return request(name, prompt, extras=RequestExtras(session=job, **extras))


def test_a_disk_is_read_before_the_turn_that_was_announced(
    make_core: MakeCore, greedy_reference: Reference, tmp_path: Path
) -> None:
    core = make_core(
        scheduling_policy="continuum",
        kv_offload="cpu,ssd",
        kv_offload_cpu_bytes="1MiB",
        kv_offload_ssd_path=str(tmp_path / "ssd"),
        kv_offload_ssd_bytes="16MiB",
        kv_offload_load="always",  # a busy machine's measured costs would have the turn computed
    )
    slots = counters(core)["tiers"]["cpu"]["capacity_blocks"]
    blocks = PROMPT // BLOCK
    # Other jobs' turns are all that may be held in the slab; this one's is on the disk in the end.
    held = int(HELD_SHARE * slots) // blocks + 1
    run(core, *[turn(f"h{n}", prompt_of(PROMPT, 100 + n), f"h{n}") for n in range(held)])
    text = prompt_of(PROMPT, 2)
    for name, tool in (("a", ""), ("b", TOOL)):  # the tool takes no time, as far as is known
        said = run(core, turn(name, text, "second", tool=tool))
        text = [*text, *said[name].new_token_ids, 7]
    others = slots // blocks + 2
    run(core, *[request(f"o{n}", prompt_of(PROMPT, 200 + n)) for n in range(others)])
    assert core.call("reset_prefix_cache", "pool")
    before = counters(core)["blocks_read_ahead_of_turns"]
    core.call("tool_called", json.dumps({"job_id": "second", "tool": TOOL}))
    deadline = time.monotonic() + WAIT_SECONDS
    while (
        counters(core)["blocks_read_ahead_of_turns"] == before
        or counters(core)["tiers"]["cpu"]["reserved_blocks"]
    ):
        assert time.monotonic() < deadline
        core.step()
        time.sleep(0.005)
    num_read = counters(core)["blocks_read_ahead_of_turns"] - before
    assert num_read <= slots // 4
    result = run(core, turn("c", text, "second", is_last_step=True))["c"]
    found = result.cached_tokens_by_tier or {}
    assert found["cpu"] >= num_read * BLOCK
    assert found.get("pool", 0) == 0
    assert result.new_token_ids == greedy_reference(text, 6)
    assert counters(core)["kept_turns"] == held, "of the other jobs"
