# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench core`: the speed of hashing blocks, allocating blocks and scheduling steps.

No model is computed. The real block hasher, cache manager and scheduler run with generated answers
of a worker, or the whole engine runs with a simulated device (`device.py`). All figures are
measured once per round, in alternation, so that other work of the machine affects all figures
equally. Each figure is the median of its rounds, and a ratio is the median of the ratios within a
round. Token ids are int32."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark; `stratakv bench` itself adds `--quick` and `--out`."""
    parser.add_argument("--repeats", type=int, help="timings of each figure (25, quick 5)")
    parser.add_argument(
        "--peer-python", metavar="PATH", help="a Python with vLLM, to measure its core in turn"
    )
