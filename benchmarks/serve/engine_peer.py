# SPDX-License-Identifier: Apache-2.0
"""The engine without a server, as peer: its core is stepped in a loop, with all prompts at once.

The module runs as a child of `peer.Peer`. The difference to a server is the cost of HTTP, the
front-end process and its messages."""

from __future__ import annotations

import sys
from pathlib import Path

from ..harness.peer import PeerRun, Work, serve
from ..harness.workloads import CONTEXT_TOKENS
from ..offload.workbench import MeasuredEngine, greedy


def make_work(model_path: Path, threads: int) -> Work:
    """Load the model; return the function that answers prompts."""
    engine = MeasuredEngine(
        model_path, {"num_threads": threads, "max_model_len": CONTEXT_TOKENS, "dtype": "float32"}
    )

    def work(mode: str, prompts: list[list[int]], max_tokens: int) -> PeerRun:
        # Cached blocks of the previous round would make the round cheaper.
        engine.forget("pool")
        run = engine.run(prompts, greedy(max_tokens))
        return PeerRun(run.wall_seconds, run.token_ids)

    return work


if __name__ == "__main__":
    sys.exit(serve(make_work))
