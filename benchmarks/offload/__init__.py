# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench offload`: the time that blocks in tiers save, and the cost of tiers without hits.

In the first section, a client sends a real server questions about documents that are far longer
than the questions. The server's KV pool is little larger than one document. The same questions are
sent
    cold      with every cache reset before each request,
    pool      with the document in the pool,
    cpu       after other documents have evicted the document from the pool,
    ssd       after the server was stopped and started again,
    remote    to another server, with the cache server of the server that computed them,
one request at a time. The tokens of every phase must be those of the cold phase. If a phase's
blocks do not come from its tier, the benchmark stops with an error.

The full form has more sections, with engines without a server. Alternating pairs of an engine with
tiers and an engine without tiers are measured in processor seconds: for unique prompts, mixes of
hits with a slow tier, requests with one common prefix, and steps during which blocks leave the pool
(`sections.py`). The last section measures the time to the first token of a small model with
recurrent states (`hybrid.py`). Equal prompts must give equal tokens."""

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
