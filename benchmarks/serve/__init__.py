# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench serve`: many concurrent clients over HTTP, with the figures of vLLM's benchmark.

First, five workloads, each with empty caches at the start, run on a server whose pool is not larger
than the workloads' documents, so that the lower tiers are used. Then prompts without shared parts
are sent to a server with default settings, several times, in turn with the same work in
    engine                the engine without HTTP, which is the limit
    transformers_serial   transformers, one request after the other
    transformers_padded   transformers, all requests in one padded batch
with the same model, number type, number of threads, prompts and output lengths. Every side must
give exactly the requested number of tokens, or the run fails. With --peer-python, vLLM's CPU build
is compared with the engine without HTTP (`peer_engines.py`). With --limits, the engine without HTTP
is compared with the limits of one request (`limits.py`), and with --lora, steps with adapters are
compared with steps without adapters (`lora_limits.py`)."""

import argparse
from pathlib import Path

from ..harness.workloads import WORKLOADS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark; `stratakv bench` itself adds `--quick` and `--out`."""
    parser.add_argument("--model", type=Path, help="a model directory (the embedded model)")
    parser.add_argument(
        "--workload", action="append", metavar="NAME",
        help=f"only this one, repeatable: {', '.join(WORKLOADS)} (all of them)",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, help="requests of each workload (96, quick 24)")
    parser.add_argument("--concurrency", type=int, default=16, help="users at once (16)")
    parser.add_argument(
        "--request-rate", type=float, metavar="R",
        help="begin R requests a second at random times, instead of keeping users busy",
    )  # fmt: skip
    parser.add_argument("--output-tokens", type=int, help="tokens of each answer (128, quick 32)")
    parser.add_argument(
        "--rounds", type=int, help="turns of the comparison, 0 for none (5, quick 3)"
    )
    parser.add_argument(
        "--num-threads", type=int, help="threads that compute, on every side (the cores less one)"
    )
    parser.add_argument(
        "--peer-python", metavar="PATH",
        help="only this: a Python with vLLM's CPU build, whose engine and ours take turns",
    )  # fmt: skip
    parser.add_argument(
        "--limits", action="store_true",
        help="only this: one request of a model in the shape of Qwen3-0.6B, in bfloat16, against "
        "reading its weights, reading its KV and its matrices alone",
    )  # fmt: skip
    parser.add_argument(
        "--lora", action="store_true",
        help="with --limits, also the cost of adapters: steps with adapters against steps without",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrival times (0)")
