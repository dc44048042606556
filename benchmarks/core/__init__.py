# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench core`: how fast the engine hashes blocks, allocates them and schedules steps.

No model is computed. The real block hasher, cache manager and scheduler run, and the worker's
answers are made up; or the whole engine runs beside a simulated device that only takes time
(`device.py`). All figures are measured alternately, once a round, so that other work of the machine
affects them alike. Each figure is the median of its rounds, and a ratio is the median of the ratios
within a round. Token ids are int32."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark; `stratakv bench` itself adds `--quick` and `--out`."""
    parser.add_argument("--repeats", type=int, help="timings of each figure (25, quick 5)")
    parser.add_argument(
        "--peer-python", metavar="PATH", help="a Python with vLLM, to measure its core in turn"
    )
