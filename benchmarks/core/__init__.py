# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench core`: how fast the engine names blocks, hands them out and makes up steps.

No model is computed: the real block hasher, cache manager and scheduler do their work, and the
worker's answers are made up; or the whole engine runs beside a device that is a clock
(`device.py`). All figures are taken in turn, once a round, so that other work of the machine
affects them alike; each is the median of its rounds, and a ratio is the median of the ratios
within a round. Token ids are int32 throughout.
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; `--quick` and `--out` are the dispatcher's."""
    parser.add_argument("--repeats", type=int, help="timings of each figure (25, quick 5)")
    parser.add_argument(
        "--peer-python", metavar="PATH", help="a Python with vLLM, to measure its core in turn"
    )
