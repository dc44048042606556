# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench offload`: what keeping blocks in tiers saves, and what it costs where it cannot.

Seen from a client first. Documents far longer than the questions about them are asked of a real
server whose KV pool holds little more than one of them. The same questions are asked
    cold      with every cache reset before each request,
    pool      with the document still in the pool,
    cpu       after other documents have pushed it out of the pool,
    ssd       after the server was stopped and started again,
    remote    of another server, which shares a cache server with one that computed them,
one request at a time. Every phase must give the tokens of the cold one; a phase that was not
answered from where it should have been is an error, not a figure.

Then, unless it is the quick form, engines without a server around them, with tiers and without in
alternating pairs, in processor seconds: unique prompts, mixes of hits with a tier that is slow,
requests behind one prefix, and steps while blocks leave the pool (`sections.py`); and the time to
the first token of a model whose layers carry states, which the benchmark makes (`hybrid.py`). Equal
prompts must give equal tokens.
"""

import argparse
from pathlib import Path

from .scale import PHASES, SECTIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; `--quick` and `--out` are the dispatcher's."""
    parser.add_argument("--model", type=Path, help="a model directory (the embedded model)")
    parser.add_argument("--documents", type=int, help="documents asked about (5, quick 3)")
    parser.add_argument("--prefix-tokens", type=int, help="tokens of each document (3,600)")
    parser.add_argument("--output-tokens", type=int, default=16, help="tokens generated (16)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block (16)")
    parser.add_argument(
        "--device", default="cpu",
        help=f"where the server computes: cpu, cuda, cuda:1 (cpu); a GPU: {PHASES} only",
    )  # fmt: skip
    parser.add_argument(
        "--sections", metavar="NAMES",
        help=f"only these, by commas: {', '.join(SECTIONS)} (all of them, quick: {PHASES})",
    )  # fmt: skip
