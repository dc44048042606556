# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench gpu`: compares kernels, copies and engine steps with the limits of a GPU.

The first section measures the GPU's limits. Further sections measure KV writes, decode and prefill
attention, copies by every method, size and direction, and the slowdown of decode by copies that run
at the same time. The last sections run the whole engine on a model of Llama-3.1-8B's shape: the
time of a step against its bound, and the time to the first token from every tier. Every case is
compared with a reference before it is timed. The JSON is written after every case; the table of
targets is printed last."""

import argparse

NAMES = (  # the sections, in the order of a run
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
