# SPDX-License-Identifier: Apache-2.0
"""Replay one simulated life: `python -m tests.simulation SEED` from the root of the repository.

With `--trace` every line of what happened is shown; two runs of one seed show the same. `--cluster`
replays the life of a cluster, see cluster.py; `--count` lives of so many seeds one after the other.
"""

from __future__ import annotations

import argparse
import logging
import random

from .clock import VirtualClock, virtual_time
from .cluster import Cluster
from .world import World


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--trace", action="store_true", help="show what happens")
    parser.add_argument("--cluster", action="store_true", help="of prefill and decode engines")
    parser.add_argument("--count", type=int, default=1, help="so many seeds, from this one on")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    show = print if given.trace else None
    clock, rng = VirtualClock(), random.Random()
    for seed in range(given.seed, given.seed + given.count):
        try:
            if given.cluster:
                with virtual_time(clock, rng):
                    trace = Cluster(clock, rng, show).live(seed)
            else:
                trace = World(seed, show).live()
        except BaseException:
            print(f"seed {seed} fails")
            raise
        if given.count == 1:
            print(f"seed {seed}: {trace}")


if __name__ == "__main__":
    main()
