# SPDX-License-Identifier: Apache-2.0
"""Replay one simulated life: `python -m tests.simulation SEED` from the root of the repository.

With `--trace` every line of what happened is shown; two runs of one seed show the same.
"""

from __future__ import annotations

import argparse

from .world import World


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--trace", action="store_true", help="show what happens")
    given = parser.parse_args()
    world = World(given.seed, show=print if given.trace else None)
    print(f"seed {given.seed}: {world.live()}")


if __name__ == "__main__":
    main()
