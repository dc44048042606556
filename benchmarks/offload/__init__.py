# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench offload`: what keeping blocks in tiers saves, and what it costs without hits.

The first section is seen from a client. It asks a real server about documents that are far longer
than the questions. The server's KV pool holds little more than one document. The same questions are
asked
    cold      with every cache reset before each request,
    pool      with the document still in the pool,
    cpu       after other documents have pushed it out of the pool,
    ssd       after the server was stopped and started again,
    remote    of another server, which shares a cache server with one that computed them,
one request at a time. Every phase must give the tokens of the cold phase. If a phase's blocks do
not come from its tier, the benchmark stops with an error.

In the full form other sections follow: engines without a server, with tiers and without in
alternating pairs, in processor seconds. They measure unique prompts, mixes of hits with a slow
tier, requests behind one prefix, and steps while blocks leave the pool (`sections.py`). A last one
measures the time to the first token of a made-up model whose layers carry states (`hybrid.py`).
Equal prompts must give equal tokens."""

import argparse
from pathlib import Path

from .scale import PHASES, SECTIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark; `stratakv bench` itself adds `--quick` and `--out`."""
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
