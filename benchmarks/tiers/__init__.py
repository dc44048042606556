# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench tiers`: compares slab, SSD store and index with the limits of the machine.

Copies of blocks of 256 KiB, 2 MiB and 5 MiB into and out of the real slab are compared with plain
copies. Durable writes and verified reads of the real SSD store are compared with random I/O without
the page cache. Further figures are the cost of checksums, and look-ups, memory and opening of an
index of a million blocks. A figure and its limit are measured alternately, and a ratio is the
median of the ratios within a round. The report has the spread of the ratios, and the spread of the
limit against itself."""

import argparse
from pathlib import Path

from .scale import SECTIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark; `stratakv bench` itself adds `--quick` and `--out`."""
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
