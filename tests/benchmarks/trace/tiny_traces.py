# SPDX-License-Identifier: Apache-2.0
"""Traces small enough to replay by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

from stratakv.benchmarks.trace.formats import BLOCK_TOKENS, Prompt, Trace


def trace_of(*chains: Sequence[int], name: str = "tiny") -> Trace:
    """One prompt a second, with these blocks."""
    return Trace(
        name,
        [
            Prompt(float(second), list(chain), len(chain) * BLOCK_TOKENS)
            for second, chain in enumerate(chains)
        ],
    )


def random_trace(rng: random.Random, requests: int, blocks: int) -> Trace:
    """Prefix-chained: blocks form a forest, and each prompt is the path from a root to one."""
    parents = [rng.randrange(-1, block) for block in range(blocks)]
    chains = []
    for _ in range(requests):
        path = [rng.randrange(blocks)]
        while (parent := parents[path[-1]]) >= 0:
            path.append(parent)
        chains.append(path[::-1])
    return trace_of(*chains)
