# SPDX-License-Identifier: Apache-2.0
"""The engine without a server around it: the core stepped in a plain loop, all prompts at once.

What HTTP, the front's process and its messages cost is measured against this. Runs as a child of
`peer.Peer`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from ...engine.core.engine_core import EngineCore
from ...engine.options import engine_config
from ...engine.sampling_params import SamplingParams
from ...engine.wire import AddRequest
from ..harness.peer import PeerRun, Work, serve
from ..harness.workloads import CONTEXT_TOKENS


def make_work(model_path: Path, threads: int) -> Work:
    """Load the model; the function that runs prompts on it."""
    options = {"num_threads": threads, "max_model_len": CONTEXT_TOKENS, "dtype": "float32"}
    core = EngineCore(engine_config(model_path, options))

    def work(mode: str, prompts: list[list[int]], max_tokens: int) -> PeerRun:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        made: list[list[int]] = [[] for _ in prompts]
        # What was kept of the round before would make this one cheaper.
        core.call("reset_prefix_cache", "pool")
        started = time.perf_counter()
        for index, prompt in enumerate(prompts):
            core.add(AddRequest(str(index), np.array(prompt, "<i4").tobytes(), params))
        while core.has_work():
            for output in core.step():
                made[int(output.request_id)] += output.new_token_ids
        return PeerRun(time.perf_counter() - started, made)

    return work


if __name__ == "__main__":
    sys.exit(serve(make_work))
