# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench tiers`: slab, SSD store and index against the limits of this machine.

Blocks of 256 KiB, 2 MiB and 5 MiB into and out of the real slab, against plain copies; the same to
and from the real store, durable and checked, against random I/O past the page cache; what checksums
cost; look-ups, memory and opening of an index with a million blocks. Every figure and its limit are
taken in turn, a ratio is the median of the ratios within a round, and beside it stands how far they
spread, and how far the limit spreads against itself.
"""

import argparse
from pathlib import Path

from .scale import SECTIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; `--quick` and `--out` are the dispatcher's."""
    parser.add_argument(
        "--path", metavar="DIR", default=Path("build/bench/tiers.disk"),
        help="a folder on the disk to be measured (default: build/bench/tiers.disk)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", metavar="NAME",
        help="what the disk is driven by for its limit: fio, or loop, which this benchmark brings "
        "(default: fio where it is installed)",
    )  # fmt: skip
    parser.add_argument(
        "--huge-pages", action="store_true",
        help="blocks for the disk, ours and the limit's, lie on huge pages of the host's pool",
    )  # fmt: skip
    parser.add_argument(
        "--durability", default="sync", help="of the store, sync or async: its limit too (sync)"
    )
    parser.add_argument(
        "--sections", metavar="NAMES", help=f"only these, by commas: {', '.join(SECTIONS)} (all)"
    )
