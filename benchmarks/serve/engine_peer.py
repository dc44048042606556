# SPDX-License-Identifier: Apache-2.0
"""The engine without a server: its core is stepped in a plain loop, with all prompts at once.

As a child of `peer.Peer` it shows what HTTP, the front-end process and its messages cost."""

from __future__ import annotations

import sys
from pathlib import Path

from ..harness.peer import PeerRun, Work, serve
from ..harness.workloads import CONTEXT_TOKENS
from ..offload.workbench import MeasuredEngine, greedy


def make_work(model_path: Path, threads: int) -> Work:
    """Load the model; return the function that runs prompts on it."""
    engine = MeasuredEngine(
        model_path, {"num_threads": threads, "max_model_len": CONTEXT_TOKENS, "dtype": "float32"}
    )

    def work(mode: str, prompts: list[list[int]], max_tokens: int) -> PeerRun:
        # Cached blocks of the last round would make this round cheaper.
        engine.forget("pool")
        run = engine.run(prompts, greedy(max_tokens))
        return PeerRun(run.wall_seconds, run.token_ids)

    return work


if __name__ == "__main__":
    sys.exit(serve(make_work))
