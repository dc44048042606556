# SPDX-License-Identifier: Apache-2.0
"""How much one run of `stratakv bench transfer` does, and what it promises of each ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..harness.comparison import Gate
from ..tiers.scale import MIB

SIZES: Mapping[str, int] = {
    "64KiB": 64 * 1024,
    "256KiB": 256 * 1024,
    "2MiB": 2 * MIB,
    "5MiB": 5 * MIB,
}
JOB_BLOCKS = 64  # what one step or one request moves
RUN_BLOCKS = 8  # neighbours in the pool that are neighbours in the slab
MOVES = (
    "pool_to_slab",
    "slab_to_pool",
    "pool_to_slab_runs",
    "slab_to_pool_runs",
    "both_ways",
)  # each of them at every size


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes in bytes and numbers of rounds."""

    region_bytes: int  # of pool, slab and each plain region; at least this
    rounds: int
    submissions: int
    cached: Sequence[str]  # rows of `layer_ranges.CACHED`


FULL = Scale(region_bytes=128 * MIB, rounds=15, submissions=101, cached=("1k", "3k", "8k"))
QUICK = Scale(region_bytes=32 * MIB, rounds=3, submissions=15, cached=("1k",))


def copy_name(move: str, size: str) -> str:
    """The name of a copying ratio."""
    return f"{move}_{size}"


def submit_name(size: str) -> str:
    """The name of a ratio of submitting."""
    return f"submit_over_copy_{size}"


GATES: Mapping[str, Gate] = {
    **{copy_name(move, size): Gate(least=0.8) for move in MOVES for size in SIZES},
    **{submit_name(size): Gate(most=0.02) for size in SIZES},
}
