# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench gpu`: the limits of a GPU, and kernels, copies and steps compared with them.

The first section measures the device's limits. Others measure KV writes, decode and prefill
attention, copies by every method, size and direction, and what copies cost a decode beside them.
The last ones run the whole engine on a model of Llama-3.1-8B's shape: a step against its bound, and
the first token from every tier. Every case is compared with a reference before it is timed. The
JSON is written after every case; the table of targets comes last."""

import argparse

NAMES = (  # of the sections, as the command runs them
    "ceilings", "writes", "decode", "prefill", "prefill-library", "copies", "copy device",
    "interference", "engine-step", "engine-phases", "launch-sweep", "peers",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark; `stratakv bench` itself adds `--quick` and `--out`."""
    parser.add_argument(
        "--sections", metavar="NAMES", help=f"which to run, by commas (all): {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--peers", metavar="DIR", help="a folder to import peers from, if they are installed there"
    )
    parser.add_argument(
        "--rehearse", action="store_true",
        help="run on the CPU at tiny sizes: tests this benchmark, measures no GPU",
    )  # fmt: skip
    parser.add_argument("--time-limit", metavar="SECONDS", type=float, help="start no case later")
